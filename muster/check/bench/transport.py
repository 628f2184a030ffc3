"""Which network the ranks really used, by NCCL's own log, and whether it is the one that they should have.

NCCL falls back to TCP without an error. What it did stands in its log, which goes to a file in memory for each rank.
The wording of 2.4 to 2.30 is known:

    Using network IB                                    what it would cross the network by
    Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA      what it does cross it by, with GPUDirect
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM           what it does inside a node

Source: https://github.com/NVIDIA/nccl/blob/master/src/transport/net.cc and the files beside it.
"""

import glob
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field

import msgspec
import torch

from muster.check.options import BenchOptions
from muster.check.ranks import listed
from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import World
from muster.variables import LaunchVariable

FOUND = LaunchVariable.FABRIC_FOUND
"""What the launch tells: the fabric by its profile's name, tcp, or off."""

NO_RDMA = ("tcp",)
"""The fabrics in jobs/fabrics that are none."""

# Networks of NCCL, and libfabric's providers, that send by TCP.
_TCP = ("socket", "fastsocket")
_TCP_PROVIDERS = ("tcp", "sockets", "udp")

SUBSYSTEMS = ("INIT", "NET")

SHOWN: list[str] = []
"""The level of a user who wanted to see the log, which now goes elsewhere: it has to be shown."""

# What stands before differs by version and settings.
_LINE = re.compile(r"NCCL (INFO|WARN) (.*\S)")
_VERSION = re.compile(r"NCCL version (\d\S*)")
_CHOSEN = re.compile(r"Using network (.+)")
_CONNECTED = re.compile(r"(?:Channel|Ring|CollNet) \d+.* via (.+)")
# A network's name may have spaces (AWS Libfabric); after its device comes the rank that sends for this one, if any.
_NET = re.compile(r"NET/(.+?)/\d+(?:\(\d+\))?((?:/.*)?)")
_PROVIDER = re.compile(r"NET/OFI Selected provider is ([^\s,]+)", re.IGNORECASE)
_REASON = re.compile(
    r"NET/Plugin ?: .*(?:No plugin found|cannot open|Could not find|could not be|symbols? .*not supported)"
    r"|NET/Plugin ?: Plugin load .* returned"
    r"|NET/IB : No device found|Failed to open libibverbs|Failed to initialize NET plugin|NCCL_IB_DISABLE set .* to 1"
    r"|network \S+ not found"
)
MAX_REASONS = 4


@dataclass(frozen=True)
class NcclLog:
    """What the log of one process's NCCL says.

    Attributes:
        version: its own, as `2.27.5+cuda12.9`.
        networks: those in use; where no connection of this process crosses, those that it would use.
        gpudirect: whether all its connections over a network read the GPU's memory directly; None where it has none.
        within: by what it speaks inside a node, or over NVLink: P2P/CUMEM, SHM, NVLS, COLLNET/SHARP.
        provider: libfabric's, where the plugin is the one for it.
        reasons: why some network is not there.
        warnings: what NCCL itself calls so.
    """

    version: str = ""
    networks: tuple[str, ...] = ()
    gpudirect: bool | None = None
    within: tuple[str, ...] = ()
    provider: str = ""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankTransport:
    """The transport of one rank.

    Attributes:
        found: what the launch found: see `FOUND`; empty where it says nothing.
        devices: files of RDMA devices in this container, of which one at least has a link.
        said: what NCCL said.
        interface: which gloo is told; empty where it goes by the host's name.
    """

    host: str
    found: str = ""
    devices: tuple[str, ...] = ()
    said: NcclLog = field(default_factory=NcclLog)
    interface: str = ""

    @property
    def rdma(self) -> str:
        """Why RDMA is to be expected here; empty where it is not."""
        if self.found and self.found != "off":
            return "" if self.found in NO_RDMA else f"{self.found} by {FOUND}"
        return f"RDMA by {self.devices[0]}" if self.devices else ""

    @property
    def network(self) -> str:
        """What this rank crosses the network by, with libfabric's provider; empty where it does not say."""
        names = "+".join(self.said.networks)
        return f"{names} ({self.said.provider})" if self._is_plugin and self.said.provider else names

    @property
    def is_tcp(self) -> bool:
        """Whether any of its networks is TCP."""
        if self._is_plugin and self.said.provider.lower().startswith(_TCP_PROVIDERS):
            return True
        return any(name.lower() in _TCP for name in self.said.networks)

    @property
    def _is_plugin(self) -> bool:
        """Whether it is not one of NCCL's own networks: a plugin that was opened need not be used."""
        return any(name not in ("IB", "Socket") for name in self.said.networks)


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


def prepare(options: BenchOptions) -> None:
    """Lets NCCL write its log where `used` can read it. To be called before NCCL is."""
    if options.backend == "gloo" or options.device == "cpu" or not torch.cuda.is_available():
        return
    request_log(os.environ)


def used(world: World, options: BenchOptions) -> Transport:
    """What the ranks used so far, on all ranks the same. To be called on all, after the first collectives."""
    if world.world_size == 1:
        return Transport("none", "one rank: nothing to speak to")
    is_gloo = world.backend == "gloo"
    text = "" if is_gloo else log_text()
    if SHOWN:
        print(text, end="", file=sys.stderr, flush=True)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    own = RankTransport(world.host, os.environ.get(FOUND, ""), rdma_devices(), parse_log(text), interface)
    ranks = msgspec.convert(world.gather(asdict(own)), list[RankTransport])
    return of_gloo(ranks) if is_gloo else of_nccl(ranks, allow_tcp=options.allow_tcp)


def complaints() -> str:
    """What NCCL gives as reasons so far, in this process, where it then failed; empty where it gives none."""
    said = parse_log(log_text())
    return "; ".join([*said.warnings[-2:], *said.reasons])


def of_gloo(ranks: Sequence[RankTransport]) -> Transport:
    """The transport of gloo, which has no network but TCP."""
    interfaces = ", ".join(dict.fromkeys(each.interface for each in ranks if each.interface))
    network = f"gloo over {interfaces or 'TCP'}"
    if _is_one_node(ranks):
        return Transport(network, "gloo, in one node")
    rdma = next((each.rdma for each in ranks if each.rdma), "")
    notes = (f"gloo knows TCP only: on GPUs NCCL would use {rdma.partition(' by ')[0]}",) if rdma else ()
    return Transport(network, f"{network}: TCP, which is all that gloo has", notes=notes)


def of_nccl(ranks: Sequence[RankTransport], *, allow_tcp: bool = False) -> Transport:
    """The transport of NCCL, by what the ranks say.

    Between nodes, TCP or silence is a failure where any node has reason to expect RDMA: nothing else proves that it
    was used. With `allow_tcp` it is a note.
    """
    version = next((each.said.version for each in ranks if each.said.version), "")
    name = f"NCCL {version}".rstrip()
    notes = [f"NCCL warns on {each.host}: {words}" for each in ranks for words in each.said.warnings[:1]][:3]
    if _is_one_node(ranks):
        within = ", ".join(dict.fromkeys(way for each in ranks for way in each.said.within)) or "not said"
        return Transport(within, f"{name}, in one node: {within}", notes=tuple(notes))
    network = ", ".join(dict.fromkeys(each.network for each in ranks if each.network)) or "not said"
    by_rdma = [each for each in ranks if each.said.gpudirect is not None and not each.is_tcp]
    indirect = [each for each in by_rdma if not each.said.gpudirect]
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
    return Transport(network, f"{says}; {_expectation(ranks)}", not indirect if by_rdma else None, tuple(notes), error)


def _unexpected(ranks: Sequence[RankTransport]) -> MusterError | None:
    """Why the network is not the one to be expected; None where it is."""
    rdma = next((f"{each.rdma} on {each.host}" for each in ranks if each.rdma), "")
    silent, tcp = [each for each in ranks if not each.network], [each for each in ranks if each.is_tcp]
    known = [each for each in ranks if each.network]
    fix = "muster fabric check on that node, then muster fabric plan; or, if TCP will do: --allow-tcp"
    if rdma and tcp:
        wrong = f"NCCL sends by TCP, and RDMA was to be expected: {_hosts(tcp)}"
        reasons = next((each.said.reasons for each in tcp if each.said.reasons), ())
        seen = f"{_networks(tcp)}; expected {rdma}" + ("; NCCL says: " + "; ".join(reasons) if reasons else "")
        wanted = os.environ.get("NCCL_NET", "")
        fix = f"unset NCCL_NET, which is {wanted}; {fix}" if wanted.lower() in _TCP else fix
    elif rdma and silent:
        wrong = f"NCCL did not say which network it uses, so nothing proves that it is not TCP: {_hosts(silent)}"
        where = os.environ.get("NCCL_DEBUG_FILE", "(unset)")
        seen = f"no such line in NCCL's log (NCCL_DEBUG_FILE={where}); expected {rdma}"
        fix = f"unset NCCL_DEBUG_FILE, if it is yours; {fix}"
    elif len({each.said.networks for each in known}) > 1:
        wrong, seen = "not all ranks use the same network", _networks(known)
    else:
        return None
    return MusterError(wrong, seen=seen, fix=fix, code=ExitCode.FAILED)


def _networks(ranks: Sequence[RankTransport]) -> str:
    """Socket on node02, node03; IB on node01."""
    networks = dict.fromkeys(each.network for each in ranks)
    return "; ".join(f"{name} on {_hosts([each for each in ranks if each.network == name])}" for name in networks)


def _hosts(ranks: Sequence[RankTransport]) -> str:
    """node02, node03; all nodes can be many."""
    return listed(list(dict.fromkeys(each.host for each in ranks)), 8)


def _expectation(ranks: Sequence[RankTransport]) -> str:
    rdma = next((each.rdma for each in ranks if each.rdma), "")
    if rdma:
        return f"expected: {rdma}"
    founds = {each.found for each in ranks}
    return f"expected: TCP by {FOUND}" if founds <= set(NO_RDMA) else "nothing says that there is anything but TCP"


def rdma_devices(root: str = "/") -> tuple[str, ...]:
    """The files of RDMA devices here; none where not one of the ports has a link."""
    states = [_read(path) for path in glob.glob(f"{root}sys/class/infiniband/*/ports/*/state")]
    verbs = sorted(glob.glob(f"{root}dev/infiniband/uverbs*"))
    if states and not any("ACTIVE" in state for state in states):
        verbs = []
    return (*verbs, *sorted(glob.glob(f"{root}dev/cxi[0-9]*")))


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _is_one_node(ranks: Sequence[RankTransport]) -> bool:
    return len({each.host for each in ranks}) == 1


def request_log(environ: MutableMapping[str, str]) -> None:
    """Asks NCCL for its log: in the file that the user named, or in one in memory, which no crash can leave behind."""
    level = environ.get("NCCL_DEBUG", "").upper()
    if level not in ("INFO", "TRACE"):
        environ["NCCL_DEBUG"] = "INFO"
    wanted = environ.get("NCCL_DEBUG_SUBSYS", "")
    names = [name for name in wanted.upper().split(",") if name]
    # With a ^ before them they are those that are not wanted.
    if wanted.startswith("^") or "ALL" not in names:
        kept = () if wanted.startswith("^") else names
        environ["NCCL_DEBUG_SUBSYS"] = ",".join(dict.fromkeys([*kept, *SUBSYSTEMS]))
    if not environ.get("NCCL_DEBUG_FILE"):
        environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{os.memfd_create('nccl')}"
        if level in ("INFO", "TRACE"):
            SHOWN.append(level)


def log_path(environ: Mapping[str, str]) -> str:
    """The file that NCCL writes in this process; empty where it writes none that can be read.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-file
    """
    words = {"%h": socket.gethostname().partition(".")[0], "%p": str(os.getpid()), "%%": "%"}
    path = re.sub("%.", lambda found: words.get(found[0], found[0]), environ.get("NCCL_DEBUG_FILE", ""))
    try:
        return path if path and stat.S_ISREG(os.stat(path).st_mode) else ""
    except OSError:
        return ""


def log_text() -> str:
    """NCCL's log of this process so far."""
    return _read(log_path(os.environ))


def parse_log(text: str) -> NcclLog:
    """What the log `text` of one process says."""
    chosen: list[str] = []
    connected: list[str] = []
    directs: list[bool] = []
    within: list[str] = []
    reasons: list[str] = []
    lines = [(line[1], line[2]) for line in _LINE.finditer(text)]
    for _, message in lines:
        if found := _CHOSEN.fullmatch(message):
            chosen.append(found[1])
        elif (found := _CONNECTED.fullmatch(message)) and (network := _NET.fullmatch(found[1])):
            connected.append(network[1])
            directs.append("/GDRDMA" in network[2])
        elif found:
            kind, _, way = found[1].partition("/")
            is_shared = kind in ("SHM", "direct shared memory")
            within.append("SHM" if is_shared else f"{kind}/{way.partition('/')[0]}".rstrip("/"))
        elif message.startswith("Connected NVLS"):
            within.append("NVLS")
        elif _REASON.search(message):
            reasons.append(message)
    version, provider = _VERSION.search(text), _PROVIDER.search(text)
    return NcclLog(
        version=version[1] if version else "",
        networks=_distinct(connected or chosen),
        gpudirect=all(directs) if directs else None,
        within=_distinct(within),
        provider=provider[1] if provider else "",
        reasons=_distinct(reasons)[:MAX_REASONS],
        warnings=_distinct([message for level, message in lines if level == "WARN"]),
    )


def _distinct(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))
