"""What ranks and nodes tell of themselves, None for what they can't tell; and what is found wrong in it.

A finding names the host, says what is wrong and what to do. Most of them are nodes that differ.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from muster.check.ranks import listed
from muster.errors import ExitCode

UNLIMITED = -1

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Software:
    """What is installed on a node, and loaded there.

    Attributes:
        image: the version of the container image; None outside of one.
        revision: of the image.
        lock: the digest of the lock that it was installed from.
        packages: all that is installed for this Python, with versions.
        code: a digest of this project's own files.
        cuda: the version that torch was built for.
        nccl: the version that torch's calls go to, and `nccl_path` the file.
    """

    image: str | None = None
    revision: str | None = None
    lock: str | None = None
    packages: tuple[str, ...] | None = None
    code: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nccl_path: str | None = None
    cudnn: str | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as the driver tells of it.

    Attributes:
        used: bytes that processes hold.
        uncorrected: ECC errors since the driver was loaded that could not be corrected.
        remapping: what is wrong with the rows of its memory: `pending` a reset, or `failed`.
        slowed_by: why the clock is lower than it could be, where it is heat or power.
        links: NVLinks that are up; None without any.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    used: int | None = None
    uncorrected: int | None = None
    remapping: str | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()
    mig: bool | None = None
    links: int | None = None


@dataclass(frozen=True, kw_only=True)
class Port:
    """An InfiniBand or RoCE port.

    Attributes:
        name: device and port: mlx5_0/1.
        rate_gbit_s: 10^9 bits a second.
    """

    name: str
    is_active: bool
    rate_gbit_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class PcieLink:
    """The PCIe link of a network adapter or a GPU.

    Attributes:
        width, max_width: lanes in use; lanes that both the card and its slot have.
        speed_gt_s, max_speed_gt_s: 10^9 transfers a second and lane.
    """

    name: str
    is_gpu: bool
    width: int
    max_width: int
    speed_gt_s: float | None = None
    max_speed_gt_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Space:
    """A file system.

    Attributes:
        path: where it was looked at.
        free: bytes; None where it has no limit.
        files_free: how many files may still be made.
        trouble: why nothing can be written.
    """

    path: str
    size: int | None = None
    free: int | None = None
    files_free: int | None = None
    trouble: str | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """What the first rank of a node tells of it.

    Attributes:
        gpus: all that the driver shows; None without one.
        memlock: bytes that may be locked, or UNLIMITED; so open_files.
        interfaces: those with an address, but the loopback.
        fabric: what the launch found.
        closed: device files of the fabric that this user may not open; `devices` are all of them.
        variables: settings of what the ranks speak through.
    """

    host: str
    software: Software = field(default_factory=Software)
    gpus: tuple[Gpu, ...] | None = None
    memory_free: int | None = None
    shm: Space | None = None
    checkpoints: Space | None = None
    memlock: int | None = None
    open_files: int | None = None
    interfaces: tuple[str, ...] = ()
    fabric: str | None = None
    ports: tuple[Port, ...] = ()
    pcie: tuple[PcieLink, ...] = ()
    devices: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What a rank tells of itself.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES.
        num_gpus: how many torch sees.
        cores: that it may run on.
        address: its own towards rank 0, which the `interface` has.
        node: of the node's first rank only.
    """

    rank: int
    host: str
    local_rank: int = 0
    visible: str | None = None
    num_gpus: int = 0
    cores: tuple[int, ...] = ()
    address: str | None = None
    interface: str | None = None
    node: Node | None = None


@dataclass(frozen=True)
class Facts:
    """What all ranks told, by rank.

    Attributes:
        device: what trainings are to run on: auto, cuda or cpu.
    """

    ranks: Sequence[Rank]
    device: str = "auto"

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in the order of their first rank."""
        return [rank.node for rank in self.ranks if rank.node is not None]

    @property
    def hosts(self) -> list[str]:
        """Their names."""
        return [node.host for node in self.nodes]

    def on(self, host: str) -> list[Rank]:
        """The ranks of a host."""
        return [rank for rank in self.ranks if rank.host == host]

    @property
    def on_gpus(self) -> bool:
        """Whether trainings would run on GPUs."""
        return self.device == "cuda" or (self.device == "auto" and any(rank.num_gpus for rank in self.ranks))

    def by_host(self, of: Callable[[Node], Any]) -> dict[str, Any]:
        """A value of each node, by its host."""
        return {node.host: of(node) for node in self.nodes}


def attempt(function: Callable[[], Result]) -> Result | None:
    """What `function` returns; None where it fails: one answer that is missing must not cost the others."""
    try:
        return function()
    except Exception:
        return None


Level = Literal["fault", "warning"]

DIED = "died"
"""What a finding is about where the check itself failed, as a rank of it died."""


@dataclass(frozen=True)
class Finding:
    """What is wrong somewhere.

    Attributes:
        level: `fault`: a training would fail, hang or be wrong; `warning`: it may.
        about: a short word for programs: image, lock, clock, port, name.
        host: where; two hosts as `a -> b`; empty where it is all of them.
        wrong: what is wrong.
        seen: the values, with the hosts that they are from.
        fix: what to type, or whom to tell.
    """

    level: Level
    about: str
    host: str
    wrong: str
    seen: str
    fix: str


@dataclass(frozen=True)
class Part:
    """The answer to one subject, on rank 0; other ranks make an empty one.

    Attributes:
        name: a word or two for the table.
        says: the answer in one line, where nothing was found.
        findings: what was found.
        values: what was measured, as JSON can hold it.
        is_seen: False for what was not checked; `says` tells why.
    """

    name: str
    says: str = ""
    findings: Sequence[Finding] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_seen: bool = True


def code_of(findings: Sequence[Finding]) -> int:
    """The exit code that stands for all `findings`: with warnings alone a training may start."""
    faults = [finding for finding in findings if finding.level == "fault"]
    if any(finding.about == DIED for finding in faults):
        return ExitCode.FAILED
    return ExitCode.USER_MUST_CHANGE if faults else ExitCode.DONE


def outliers(values: Mapping[str, Any]) -> tuple[Any, dict[Any, list[str]]]:
    """The value of most hosts, None where none has a majority; and the hosts of each other value.

    Args:
        values: by host; None is no value, and nobody is an outlier by it.
    """
    known = {host: value for host, value in values.items() if value is not None}
    counts = Counter(known.values())
    usual, number = counts.most_common(1)[0] if counts else (None, 0)
    if number * 2 <= len(known):
        usual = None
    others: dict[Any, list[str]] = {}
    for host, value in known.items():
        if value != usual:
            others.setdefault(value, []).append(host)
    return usual, others


def differences(
    values: Mapping[str, Any], level: Level, about: str, what: str, fix: str, shown: Callable[[Any], str] = str
) -> list[Finding]:
    """The findings of `values` that should be the same on all nodes: none, one for each outlier, or one of all.

    Args:
        what: what the values are of, after "another" and "the same": "torch".
        shown: makes words of a value.
    """
    usual, others = outliers(values)
    if len(others) < (1 if usual is not None else 2):
        return []
    if usual is None:
        # As many on each side: none of them can be called the right one.
        seen = ", ".join(f"{shown(value)} on {listed(hosts)}" for value, hosts in others.items())
        everyone = [host for hosts in others.values() for host in hosts]
        return [Finding(level, about, listed(everyone), f"not all nodes have the same {what}", seen, fix)]
    there = listed([host for host, value in values.items() if value == usual])
    return [
        Finding(
            level,
            about,
            listed(hosts),
            f"{'it has' if len(hosts) == 1 else 'they have'} another {what} than most nodes",
            f"{shown(value)} on {listed(hosts)}, {shown(usual)} on {there}",
            fix,
        )
        for value, hosts in others.items()
    ]


def distinct(values: Sequence[Any]) -> str:
    """The different values in words."""
    return ", ".join(dict.fromkeys(str(each) for each in values if each is not None))


def size(number: int) -> str:
    """Bytes in words: "1.5 GiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number // 2**10} KiB"
