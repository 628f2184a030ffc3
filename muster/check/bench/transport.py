"""Which network the ranks really used, by NCCL's own log, and whether it is the one that they should have.

NCCL falls back to TCP without an error. What it did stands in its log, which goes to a file in memory for each rank.
The wording of 2.12 to 2.30 is known:

    Using network IB                                    what it would cross the network by
    Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA      what it does cross it by, with GPUDirect
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM           what it does inside a node

Source: https://github.com/NVIDIA/nccl/blob/master/src/transport/net.cc and the files beside it.
"""

import os
import re
import socket
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from muster.check.options import BenchOptions
from muster.errors import ExitCode, MusterError
from muster.paths import text_of
from muster.train.distributed.world import World
from muster.units import listed
from muster.variables import LaunchVariable

FOUND = LaunchVariable.FABRIC_FOUND
"""Set by the launch: the fabric by its profile's name, tcp, or off."""

NO_RDMA = ("tcp",)
"""The fabrics in jobs/fabrics that are none."""

# Networks of NCCL, and libfabric's providers, that send by TCP.
_TCP = ("socket", "fastsocket")
_TCP_PROVIDERS = ("tcp", "sockets", "udp")

SHOWN: list[str] = []
"""The level of a user who wanted to see the log, which now goes elsewhere: it has to be shown."""

# What stands before differs by version and settings.
_LINE = re.compile(r"NCCL (INFO|WARN) (.*\S)")
_VERSION = re.compile(r"NCCL version (\d\S*)")
_CHOSEN = re.compile(r"Using network (.+)")
_CONNECTED = re.compile(r"(?:Channel|CollNet) \d+.* via (.+)")
# A network's name may have spaces (AWS Libfabric); after its device comes the rank that sends for this one, if any.
_NET = re.compile(r"NET/(.+?)/\d+(?:\(\d+\))?((?:/.*)?)")
_PROVIDER = re.compile(r"NET/OFI Selected provider is ([^\s,]+)", re.IGNORECASE)


@dataclass(frozen=True)
class NcclLog:
    """What the log of one process's NCCL shows.

    Attributes:
        version: its own, as `2.27.5+cuda12.9`.
        network: the one in use, with libfabric's provider; where no connection of this process crosses, the one that it
            would use; empty where the log does not have it.
        is_tcp: whether it is TCP, or any of several is.
        gpudirect: whether all its connections over a network read the GPU's memory directly; None where it has none.
        within: its transports inside a node, or over NVLink: P2P/CUMEM, SHM, NVLS, COLLNET/SHARP.
        warnings: what NCCL itself calls so.
    """

    version: str = ""
    network: str = ""
    is_tcp: bool = False
    gpudirect: bool | None = None
    within: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankTransport:
    """The transport of one rank.

    Attributes:
        expected: the network to be expected here, and by what; empty where nothing shows one.
        is_rdma: whether that is more than TCP.
        log: what NCCL printed.
        interface: gloo's, as it was set; empty where it goes by the host's name.
    """

    host: str
    expected: str = ""
    is_rdma: bool = False
    log: NcclLog = field(default_factory=NcclLog)
    interface: str = ""


@dataclass(frozen=True)
class Transport:
    """What the ranks speak through.

    Attributes:
        network: IB, Socket, AWS Libfabric (cxi) between nodes; P2P/CUMEM inside one; gloo over eth0.
        says: one line.
        gpudirect: whether all connections between nodes read the GPUs' memory directly; None where there are none.
        notes: what else the user should know.
        error: why it is not what was to be expected.
    """

    network: str
    says: str
    gpudirect: bool | None = None
    notes: tuple[str, ...] = ()
    error: MusterError | None = None


def used(world: World, options: BenchOptions) -> Transport:
    """What the ranks used so far, on all ranks the same. To be called on all, after the first collectives."""
    if world.world_size == 1:
        return Transport("none", "one rank: nothing to speak to")
    is_gloo = world.backend == "gloo"
    text = "" if is_gloo else log_text()
    if SHOWN:
        print(text, end="", file=sys.stderr, flush=True)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    own = RankTransport(world.host, *expected(os.environ.get(FOUND, "")), parse_log(text), interface)
    ranks = msgspec.convert(world.gather(asdict(own)), list[RankTransport])
    return of_gloo(ranks) if is_gloo else of_nccl(ranks, allow_tcp=options.allow_tcp)


def with_warnings(error: object) -> str:
    """The first line of `error`, and the last warnings of NCCL in this process."""
    warnings = "; ".join(parse_log(log_text()).warnings[-2:])
    return "; NCCL says: ".join(filter(None, [str(error).strip().partition("\n")[0], warnings]))


def of_gloo(ranks: Sequence[RankTransport]) -> Transport:
    """The transport of gloo, which has no network but TCP."""
    network = f"gloo over {listed(each.interface for each in ranks) or 'TCP'}"
    if len({each.host for each in ranks}) == 1:
        return Transport(network, "gloo, in one node")
    rdma = next((each.expected for each in ranks if each.is_rdma), "")
    notes = (f"gloo knows TCP only: on GPUs NCCL would use {rdma.partition(' by ')[0]}",) if rdma else ()
    return Transport(network, f"{network}: TCP, which is all that gloo has", notes=notes)


def of_nccl(ranks: Sequence[RankTransport], *, allow_tcp: bool = False) -> Transport:
    """The transport of NCCL, by the logs of all ranks.

    Between nodes, TCP or silence is a failure where any node has reason to expect RDMA: nothing else proves that it
    was used. With `allow_tcp` it is a note.
    """
    version = next((each.log.version for each in ranks if each.log.version), "")
    name = f"NCCL {version}".rstrip()
    notes = [f"NCCL warns on {each.host}: {words}" for each in ranks for words in each.log.warnings[:1]][:3]
    if len({each.host for each in ranks}) == 1:
        within = listed(way for each in ranks for way in each.log.within) or "not said"
        return Transport(within, f"{name}, in one node: {within}", notes=tuple(notes))
    network = listed(each.log.network for each in ranks) or "not said"
    by_rdma = [each for each in ranks if each.log.gpudirect is not None and not each.log.is_tcp]
    indirect = [each for each in by_rdma if not each.log.gpudirect]
    says = f"{name}: {network}"
    if by_rdma:
        says += f", {'without' if indirect else 'with'} GPUDirect RDMA"
    if indirect:
        # Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#gpu-direct-rdma
        line = f"data go through the host's memory on {_hosts(indirect)}: no GPUDirect RDMA on all of its connections"
        notes.insert(0, f"{line}; fix: load nvidia-peermem there, or have DMA-BUF (Linux 5.12, open kernel modules)")
    error = _unexpected(ranks)
    if error is not None and allow_tcp:
        notes.insert(0, f"{error.wrong}, as --allow-tcp allows: {error.seen}")
        error = None
    wanted = next((each.expected for each in sorted(ranks, key=lambda each: not each.is_rdma) if each.expected), "")
    says += f"; expected: {wanted}" if wanted else "; nothing says that there is anything but TCP"
    return Transport(network, says, not indirect if by_rdma else None, tuple(notes), error)


def _unexpected(ranks: Sequence[RankTransport]) -> MusterError | None:
    """Why the network is not the one to be expected; None where it is."""
    rdma = next((f"{each.expected} on {each.host}" for each in ranks if each.is_rdma), "")
    silent, tcp = [each for each in ranks if not each.log.network], [each for each in ranks if each.log.is_tcp]
    known = [each for each in ranks if each.log.network]
    fix = "muster fabric check on that node, then muster fabric plan; or, if TCP will do: --allow-tcp"
    if rdma and tcp:
        wrong = f"NCCL sends by TCP, and RDMA was to be expected: {_hosts(tcp)}"
        seen = f"{_networks(tcp)}; expected {rdma}"
        wanted = os.environ.get("NCCL_NET", "")
        fix = f"unset NCCL_NET, which is {wanted}; {fix}" if wanted.lower() in _TCP else fix
    elif rdma and silent:
        wrong = f"NCCL did not say which network it uses, so nothing proves that it is not TCP: {_hosts(silent)}"
        where = os.environ.get("NCCL_DEBUG_FILE", "(unset)")
        seen = f"no such line in NCCL's log (NCCL_DEBUG_FILE={where}); expected {rdma}"
        fix = f"unset NCCL_DEBUG_FILE, if it is yours; {fix}"
    elif len({each.log.network for each in known}) > 1:
        wrong, seen = "not all ranks use the same network", _networks(known)
    else:
        return None
    return MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)


def _networks(ranks: Sequence[RankTransport]) -> str:
    """Socket on node02, node03; IB on node01."""
    networks = dict.fromkeys(each.log.network for each in ranks)
    return "; ".join(f"{name} on {_hosts([each for each in ranks if each.log.network == name])}" for name in networks)


def _hosts(ranks: Sequence[RankTransport]) -> str:
    return listed((each.host for each in ranks), 8)


def expected(found: str, root: str = "/") -> tuple[str, bool]:
    """The network to be expected here, with what shows it, and whether it is RDMA.

    Args:
        found: what the launch found; empty, or `off`, where it has not looked: then it is by RDMA's device files, none
            of which counts where not one of the ports has a link.
    """
    if found and found != "off":
        return (f"TCP by {FOUND}", False) if found in NO_RDMA else (f"{found} by {FOUND}", True)
    states = [text for path in Path(root).glob("sys/class/infiniband/*/ports/*/state") if (text := text_of(path))]
    verbs = sorted(Path(root).glob("dev/infiniband/uverbs*"))
    if states and not any("ACTIVE" in state for state in states):
        verbs = []
    devices = [*verbs, *sorted(Path(root).glob("dev/cxi[0-9]*"))]
    return (f"RDMA by {devices[0]}", True) if devices else ("", False)


def request_log(environ: MutableMapping[str, str]) -> None:
    """Asks NCCL, before it is loaded, for its log: in the file that the user named, or in one in memory.

    No crash can leave that behind.
    """
    if (level := environ.get("NCCL_DEBUG", "").upper()) not in ("INFO", "TRACE"):
        environ["NCCL_DEBUG"] = "INFO"
    wanted = environ.get("NCCL_DEBUG_SUBSYS", "")
    # With a ^ before them they are those that are not wanted.
    names = [] if wanted.startswith("^") else [name for name in wanted.upper().split(",") if name]
    if "ALL" not in names:
        environ["NCCL_DEBUG_SUBSYS"] = ",".join(dict.fromkeys([*names, "INIT", "NET"]))
    if not environ.get("NCCL_DEBUG_FILE"):
        environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{os.memfd_create('nccl')}"
        if level in ("INFO", "TRACE"):
            SHOWN.append(level)


def log_text() -> str:
    """NCCL's log of this process so far; empty where it does not go to a file.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-file
    """
    words = {"%h": socket.gethostname().partition(".")[0], "%p": str(os.getpid()), "%%": "%"}
    path = Path(re.sub("%.", lambda found: words.get(found[0], found[0]), os.environ.get("NCCL_DEBUG_FILE", "")))
    return path.read_text(errors="replace") if path.is_file() else ""


def parse_log(text: str) -> NcclLog:
    """What the log `text` of one process shows."""
    chosen: list[str] = []
    connected: list[str] = []
    directs: list[bool] = []
    within: list[str] = []
    lines = [(line[1], line[2]) for line in _LINE.finditer(text)]
    for _, message in lines:
        if found := _CHOSEN.fullmatch(message):
            chosen.append(found[1])
        elif (found := _CONNECTED.fullmatch(message)) and (network := _NET.fullmatch(found[1])):
            connected.append(network[1])
            directs.append("/GDRDMA" in network[2])
        elif found:
            kind, _, way = found[1].partition("/")
            within.append("SHM" if kind == "SHM" else f"{kind}/{way.partition('/')[0]}".rstrip("/"))
        elif message.startswith("Connected NVLS"):
            within.append("NVLS")
    networks = tuple(dict.fromkeys(connected or chosen))
    version, found = _VERSION.search(text), _PROVIDER.search(text)
    # Of a plugin: one that was opened need not be used.
    provider = found[1] if found and not {"IB", "Socket"}.issuperset(networks) else ""
    return NcclLog(
        version=version[1] if version else "",
        network="+".join(networks) + (f" ({provider})" if provider else ""),
        is_tcp=provider.lower().startswith(_TCP_PROVIDERS) or any(name.lower() in _TCP for name in networks),
        gpudirect=all(directs) if directs else None,
        within=tuple(dict.fromkeys(within)),
        warnings=tuple(dict.fromkeys(message for level, message in lines if level == "WARN")),
    )
