"""What ranks and nodes tell of themselves; None for what they can't tell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
        active_ports: InfiniBand and RoCE ports that are up; None without any.
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
    active_ports: int | None = None
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
