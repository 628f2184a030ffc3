"""The network that the ranks really used, by NCCL's own log, and whether it is the expected one.

NCCL falls back to TCP without an error. Its log shows what it did, and goes to a file in memory for each rank. The
wording of NCCL 2.12 to 2.30 is known:

    Using network IB                                    the network for connections between nodes, if there are any
    Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA      the network of one connection, with GPUDirect
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM           the transport of a connection inside a node

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
"""The variable that the launch sets: the name of the fabric's profile, tcp, or off."""

NO_RDMA = ("tcp",)
"""The fabrics in jobs/fabrics that have no RDMA."""

# Networks of NCCL, and libfabric's providers, that send by TCP.
_TCP = ("socket", "fastsocket")
_TCP_PROVIDERS = ("tcp", "sockets", "udp")

SHOWN: list[str] = []
"""The user's NCCL_DEBUG if it asks for the log: as the log goes to a file in memory, it has to be printed too."""

# The beginning of a line differs by version and settings.
_LINE = re.compile(r"NCCL (INFO|WARN) (.*\S)")
_VERSION = re.compile(r"NCCL version (\d\S*)")
_CHOSEN = re.compile(r"Using network (.+)")
_CONNECTED = re.compile(r"(?:Channel|CollNet) \d+.* via (.+)")
# A network's name may have spaces (AWS Libfabric); after its device comes the rank that sends for this one, if any.
_NET = re.compile(r"NET/(.+?)/\d+(?:\(\d+\))?((?:/.*)?)")
_PROVIDER = re.compile(r"NET/OFI Selected provider is ([^\s,]+)", re.IGNORECASE)


@dataclass(frozen=True)
class NcclLog:
    """The contents of one process's NCCL log.

    Attributes:
        version: NCCL's, as `2.27.5+cuda12.9`.
        network: the network in use, with libfabric's provider; where this process has no connection over a network, the
            one that it would use; empty where the log names none.
        is_tcp: whether the network, or one of several, is TCP.
        gpudirect: whether all its connections over a network read the GPU's memory directly; None where it has none.
        within: its transports inside a node, or over NVLink: P2P/CUMEM, SHM, NVLS, COLLNET/SHARP.
        warnings: NCCL's messages of the level WARN.
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
        expected: the network to be expected here, with the evidence for it; empty without evidence.
        is_rdma: whether the expected network is RDMA.
        log: the contents of NCCL's log.
        interface: GLOO_SOCKET_IFNAME; empty where gloo resolves the host's name instead.
    """

    host: str
    expected: str = ""
    is_rdma: bool = False
    log: NcclLog = field(default_factory=NcclLog)
    interface: str = ""


@dataclass(frozen=True)
class Transport:
    """The network that the ranks communicate through.

    Attributes:
        network: IB, Socket, AWS Libfabric (cxi) between nodes; P2P/CUMEM inside one; gloo over eth0.
        says: the network in one line.
        gpudirect: whether all connections between nodes read the GPUs' memory directly; None where there are none.
        notes: what else the user should know.
        error: what is wrong, if the network is not the expected one.
    """

    network: str
    says: str
    gpudirect: bool | None = None
    notes: tuple[str, ...] = ()
    error: MusterError | None = None


def used(world: World, options: BenchOptions) -> Transport:
    """The network used so far, the same on all ranks. To be called on all ranks, after the first collectives."""
    if world.world_size == 1:
        return Transport("none", "one rank: nothing to communicate")
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
    notes = (f"gloo supports TCP only: on GPUs NCCL would use {rdma.partition(' by ')[0]}",) if rdma else ()
    return Transport(network, f"{network}: TCP, which is all that gloo supports", notes=notes)


def of_nccl(ranks: Sequence[RankTransport], *, allow_tcp: bool = False) -> Transport:
    """The transport of NCCL, by the logs of all ranks.

    Between nodes, TCP, or a log that names no network, is an error if any node has reason to expect RDMA: only the log
    proves that it was used. With `allow_tcp` it is a note.
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
        line = f"data go through the host's memory on {_hosts(indirect)}: not all connections use GPUDirect RDMA"
        notes.insert(0, f"{line}; fix: load nvidia-peermem there, or enable DMA-BUF (Linux 5.12, open kernel modules)")
    error = _unexpected(ranks)
    if error is not None and allow_tcp:
        notes.insert(0, f"{error.wrong}, as --allow-tcp allows: {error.seen}")
        error = None
    wanted = next((each.expected for each in sorted(ranks, key=lambda each: not each.is_rdma) if each.expected), "")
    says += f"; expected: {wanted}" if wanted else "; nothing shows that there is anything but TCP"
    return Transport(network, says, not indirect if by_rdma else None, tuple(notes), error)


def _unexpected(ranks: Sequence[RankTransport]) -> MusterError | None:
    """The error for a network that is not the expected one, or not the same on all ranks; None otherwise."""
    rdma = next((f"{each.expected} on {each.host}" for each in ranks if each.is_rdma), "")
    silent, tcp = [each for each in ranks if not each.log.network], [each for each in ranks if each.log.is_tcp]
    known = [each for each in ranks if each.log.network]
    fix = "muster fabric check on that node, then muster fabric plan; or, if TCP is enough: --allow-tcp"
    if rdma and tcp:
        wrong = f"NCCL uses TCP, but RDMA was expected: {_hosts(tcp)}"
        seen = f"{_networks(tcp)}; expected {rdma}"
        wanted = os.environ.get("NCCL_NET", "")
        fix = f"unset NCCL_NET, which is {wanted}; {fix}" if wanted.lower() in _TCP else fix
    elif rdma and silent:
        wrong = f"NCCL's log does not name the network, so nothing proves that it is not TCP: {_hosts(silent)}"
        where = os.environ.get("NCCL_DEBUG_FILE", "(unset)")
        seen = f"no such line in NCCL's log (NCCL_DEBUG_FILE={where}); expected {rdma}"
        fix = f"unset NCCL_DEBUG_FILE, if you have set it; {fix}"
    elif len({each.log.network for each in known}) > 1:
        wrong, seen = "not all ranks use the same network", _networks(known)
    else:
        return None
    return MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)


def _networks(ranks: Sequence[RankTransport]) -> str:
    """The networks with their hosts, in words: Socket on node02, node03; IB on node01."""
    networks = dict.fromkeys(each.log.network for each in ranks)
    return "; ".join(f"{name} on {_hosts([each for each in ranks if each.log.network == name])}" for name in networks)


def _hosts(ranks: Sequence[RankTransport]) -> str:
    return listed((each.host for each in ranks), 8)


def expected(found: str, root: str = "/") -> tuple[str, bool]:
    """The network to be expected here, with the evidence for it, and whether it is RDMA.

    Args:
        found: the fabric that the launch found; empty, or `off`, if it did not look for one. Then the evidence is the
            device files of RDMA, without those of InfiniBand if none of its ports has a link.
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
    """Makes NCCL, which is not loaded yet, write its log: to the file that the user named, or to one in memory.

    A file in memory is not left behind after a crash.
    """
    if (level := environ.get("NCCL_DEBUG", "").upper()) not in ("INFO", "TRACE"):
        environ["NCCL_DEBUG"] = "INFO"
    wanted = environ.get("NCCL_DEBUG_SUBSYS", "")
    # A list that begins with ^ names the subsystems that are not wanted.
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
    """The contents of one process's log, `text`."""
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
    # The provider is a plugin's, which NCCL may open without using it.
    provider = found[1] if found and not {"IB", "Socket"}.issuperset(networks) else ""
    return NcclLog(
        version=version[1] if version else "",
        network="+".join(networks) + (f" ({provider})" if provider else ""),
        is_tcp=provider.lower().startswith(_TCP_PROVIDERS) or any(name.lower() in _TCP for name in networks),
        gpudirect=all(directs) if directs else None,
        within=tuple(dict.fromkeys(within)),
        warnings=tuple(dict.fromkeys(message for level, message in lines if level == "WARN")),
    )
