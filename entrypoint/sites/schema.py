"""The schema of profiles, jobs/sites/SITE.toml and jobs/fabrics/FABRIC.toml, and the conditions on their values.

Each value has a source. A value that nobody could find out is left out: it is detected at the start. docs/sites.md
explains each key of a site.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from muster.paths import text_of

Status = Literal["unverified", "documented", "verified"]
STATUS: Mapping[Status, str] = {
    "unverified": "put together from what was found, not tried",
    "documented": "as the centre describes it, not tried",
    "verified": "seen to work there",
}
"""The meaning of each status of a profile."""


T = TypeVar("T")

MEANINGS = {
    "`object | null`": "a table, {key = ...}",
    "`object`": "a table, {key = ...}",
    "`array`": "a list",
    "Invalid RFC3339 encoded date": "Expected a day, such as 2026-01-31",
}
"""Plain words for errors, by the words of msgspec that they replace."""


def _matching(pattern: str, meaning: str) -> msgspec.Meta:
    """A pattern that a whole text has to match, with the `meaning` that errors give for it."""
    whole = rf"\A(?:{pattern})\Z"
    MEANINGS[f"`str` matching regex {whole!r}"] = meaning
    return msgspec.Meta(pattern=whole)


# Each goes into job scripts and variables, so nothing in them may start a command or end a line. Control characters
# could act on a terminal too.
Line = Annotated[str, _matching(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*", "one line without control characters")]
Url = Annotated[
    str,
    _matching(
        r"https?://[A-Za-z0-9.-]+\.[A-Za-z]{2,}(?::[0-9]+)?(?:/[^\s\"'<>`\\]*)?",
        "an address, such as https://docs.example.org/gpu",
    ),
]
Name = Annotated[str, _matching(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name")]
COMPARISONS = {">": gt, ">=": ge, "<": lt, "<=": le, "==": eq, "!=": ne}
_BOUND = r"(?:[<>]=?|[!=]=) ?[0-9]+"
Range = Annotated[str, _matching(rf"{_BOUND}(?:, ?{_BOUND})*", 'numbers, such as ">1" or ">=2,<64"')]

GPUS = Path("/proc/driver/nvidia/gpus")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table without other keys than its fields: a misspelt key is an error."""


class Source(_Table, frozen=True):
    """The source of values: its `url`, and the day on which it was `read`."""

    url: Url
    read: date


class When(_Table, frozen=True):
    """A condition on the job's number of nodes, on the GPU's name or on both: all that is given has to hold."""

    nodes: Range | None = None
    gpu: Annotated[str, _matching(r".*\S.*", "a part of a GPU's name")] | None = None


class Fact(_Table, Generic[T], frozen=True):
    """A value, the key of its source in `sources`, and the condition under which it holds."""

    value: T
    source: Line
    when: When | None = None
    note: Line = ""


Words = Fact[tuple[Line, ...]]
Text = Fact[Line]
Word = Fact[Annotated[str, _matching(r"[A-Za-z0-9_.,:@/+-]+", "one word of letters, digits and - _ . , : @ / +")]]
Number = Fact[Annotated[int, msgspec.Meta(ge=0)]]


class Recognise(_Table, frozen=True):
    """The evidence for this site, of which one kind is enough: patterns as in `fnmatch`, of whole names.

    These keys stand before a profile's first table: `recognise.hosts = {value = ["jwb*"], source = "docs"}`.
    """

    cluster: Words | None = None
    hosts: Words | None = None
    variables: Fact[dict[Name, Line]] | None = None


class Nodes(_Table, frozen=True):
    """A node's GPUs and CPU cores that a job may use, the GPUs' name, and the memory to ask for in GiB."""

    gpus: Number | None = None
    gpu: Text | None = None
    cores: Number | None = None
    memory_gib: Number | None = None


class Launch(_Table, frozen=True):
    """The options that request a job, and those that start its processes."""

    partition: Word | None = None
    account: Fact[bool] | None = None
    gpus: Fact[Annotated[str, _matching(r"[ -~]*\{gpus\}[ -~]*", "a line with {gpus} in it")]] | None = None
    directives: Words | None = None
    flags: Words | None = None
    launcher: Word | None = None


class Network(_Table, frozen=True):
    """The suffix that makes a host's name its address on the fabric; the prefix of interfaces for NCCL and gloo."""

    address_suffix: Word | None = None
    interface: Word | None = None


class Container(_Table, frozen=True):
    """The command, modules, options and binds that start a container at the site."""

    command: Word | None = None
    modules: Words | None = None
    options: Words | None = None
    binds: Words | None = None


class Storage(_Table, frozen=True):
    """Folders, with variables as in a shell ($SCRATCH/...): for runs, on the node's own disk; and hints for users."""

    scratch: Text | None = None
    node_local: Text | None = None
    hints: Words | None = None


class Libraries(_Table, frozen=True):
    """The host's libraries that a fabric needs.

    Attributes:
        plugins: file names of NCCL's network plugin, the best first.
        roots: sonames that are needed even if no library names them.
        search: folders of the host that are searched before those of its loader; `*` allowed.
        host_wins: sonames that have to be the host's even if the image has them too.
        sets: groups of sonames and folders: those of a group come all from the host, or all from the image.
        files: further files and folders of the host, under the same path in the container.
    """

    plugins: Words | None = None
    roots: Words | None = None
    search: Words | None = None
    host_wins: Words | None = None
    sets: Fact[tuple[tuple[Line, ...], ...]] | None = None
    files: Words | None = None


class Devices(_Table, frozen=True):
    """Device files and folders of the host that a container needs, `*` allowed.

    Attributes:
        recognise: any one of these shows that the host has the fabric.
        needed: devices that docker and podman have to be given, where they exist.
        folders: folders to be bound, where they exist.
    """

    recognise: Words | None = None
    needed: Words | None = None
    folders: Words | None = None


class Fabric(_Table, frozen=True):
    """A fabric's profile.

    Attributes:
        is_rdma: whether it has RDMA, so that TCP in its place would be a silent fallback.
        net: NCCL_NET's value on several nodes, where it is not the plugin's own name.
    """

    title: Line
    status: Status
    is_rdma: bool
    sources: dict[Line, Source] = {}
    net: Text | None = None
    devices: Devices = Devices()
    libraries: Libraries = Libraries()
    variables: dict[Name, Text] = {}


class Site(_Table, frozen=True):
    """A site's profile. The generic ones have no centre."""

    title: Line
    scheduler: Line
    status: Status
    centre: Line = ""
    extends: Line | None = None
    refused: Text | None = None
    documentation: Url | None = None
    contact: Text | None = None
    sources: dict[Line, Source] = {}
    recognise: Recognise = Recognise()
    nodes: Nodes = Nodes()
    launch: Launch = Launch()
    network: Network = Network()
    container: Container = Container()
    storage: Storage = Storage()
    libraries: Libraries = Libraries()
    caches: dict[Name, Text] = {}
    modules: Words | None = None
    variables: dict[Name, Text] = {}


def facts(profile: Any, key: str = "") -> Iterator[tuple[str, Fact[Any]]]:
    """All values of a profile that have a source, each with its key, in the schema's order."""
    if isinstance(profile, Fact):
        yield key, profile  # pyright: ignore[reportUnknownVariableType]
        return
    fields: dict[str, Any] = {}
    if isinstance(profile, dict):
        fields = profile  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(profile, msgspec.Struct):
        fields = {name: getattr(profile, name) for name in profile.__struct_fields__}
    for name, value in fields.items():
        yield from facts(value, f"{key}.{name}" if key else name)


@dataclass(frozen=True)
class Context:
    """The values that conditions are checked against: the job's number of nodes; the GPU's name, None if unknown."""

    nodes: int
    gpu: str | None = None

    @classmethod
    def here(cls, num_nodes: int, is_live: bool = True, gpus: Path = GPUS) -> "Context":
        """The context of a launch on `num_nodes`; if `is_live`, with the name of this node's first GPU by its driver.

        Source: https://download.nvidia.com/XFree86/Linux-x86_64/550.54.14/README/procinterface.html
        """
        for path in sorted(gpus.glob("*/information")) if is_live else ():
            if match := re.search(r"^Model:\s*(.+?)\s*$", text_of(path), re.MULTILINE):
                return cls(num_nodes, match[1])
        return cls(num_nodes)


def holds(when: When | None, context: Context) -> bool:
    """Whether all of `when` holds; a condition on an unknown GPU does not."""
    if when is None:
        return True
    bounds = re.findall(r"([<>!=]+) ?([0-9]+)", when.nodes or "")
    is_size = all(COMPARISONS[comparison](context.nodes, int(number)) for comparison, number in bounds)
    return is_size and (when.gpu is None or when.gpu.casefold() in (context.gpu or "").casefold())


def value_of(fact: Fact[T] | None, context: Context) -> T | None:
    """The value of `fact`, or None where there is no fact or its condition does not hold."""
    return fact.value if fact is not None and holds(fact.when, context) else None


def resolve(facts: Mapping[str, Fact[str]], context: Context) -> dict[str, str]:
    """The values of those facts whose condition holds."""
    return {name: fact.value for name, fact in facts.items() if holds(fact.when, context)}
