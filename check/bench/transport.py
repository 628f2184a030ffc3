"""Which network the ranks really used, by NCCL's own word, and whether it is the one that they should have.

NCCL falls back to TCP without an error. What it did stands in its log, which goes to a file in memory for each rank.
"""

import glob
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch

from check.bench import nccl_log
from check.bench.nccl_log import Said
from check.doctor.odd import named
from check.options import BenchOptions
from train.world import World

FOUND = "MUSTER_FABRIC_FOUND"
"""What the launch tells: the fabric by its profile's name, tcp, or off."""

NO_RDMA = ("tcp",)
"""The fabrics in jobs/fabrics that are none."""

# Networks of NCCL, and libfabric's providers, that send by TCP.
_TCP = ("socket", "fastsocket")
_TCP_PROVIDERS = ("tcp", "sockets", "udp")

_DIRECT = {True: "with GPUDirect RDMA", False: "without GPUDirect RDMA", None: "GPUDirect RDMA not said"}


@dataclass(frozen=True)
class Heard:
    """What one rank tells about itself.

    Attributes:
        found: what the launch found: see `FOUND`; empty where it says nothing.
        devices: files of RDMA devices in this container, of which one at least has a link.
        said: what NCCL said; for gloo its interface in `said.devices`.
        log: where it said so; empty where that can't be read.
    """

    rank: int
    host: str
    found: str = ""
    devices: tuple[str, ...] = ()
    said: Said = field(default_factory=Said)
    log: str = ""

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
        gpudirect: whether all connections between nodes read the GPUs' memory directly; None where there are none.
        is_expected: False where it is a failure.
        says: one line.
        wrong, seen, fix: of the failure.
        notes: what else the user should know.
        ranks: what each rank tells, for programs.
    """

    network: str
    gpudirect: bool | None = None
    is_expected: bool = True
    says: str = ""
    wrong: str = ""
    seen: str = ""
    fix: str = ""
    notes: tuple[str, ...] = ()
    ranks: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


def prepare(options: BenchOptions) -> None:
    """Lets NCCL write its log where `used` can read it. To be called before NCCL is."""
    if options.backend == "gloo" or options.device == "cpu" or not torch.cuda.is_available():
        return
    nccl_log.ask(os.environ)


def used(world: World, options: BenchOptions) -> Transport:
    """What the ranks used so far, on all ranks the same. To be called on all, after the first collectives."""
    if world.world_size == 1:
        return Transport("none", says="one rank: nothing to speak to")
    text = nccl_log.text() if world.backend != "gloo" else ""
    if nccl_log.SHOWN:
        print(text, end="", file=sys.stderr, flush=True)
    said = Said(devices=(gloo_interface(),)) if world.backend == "gloo" else nccl_log.read(text)
    log = nccl_log.path_of(os.environ)
    own = Heard(world.rank, world.host, os.environ.get(FOUND, ""), rdma_devices(), said, log)
    heard = [_from_json(value) for value in world.gather(asdict(own))]
    if world.backend == "gloo":
        return of_gloo(heard)
    return of_nccl(heard, allow_tcp=options.allow_tcp)


def complaints() -> str:
    """What NCCL gives as reasons so far, in this process, where it then failed; empty where it gives none."""
    said = nccl_log.read(nccl_log.text())
    return "; ".join([*said.warnings[-2:], *said.reasons])


def of_gloo(heard: Sequence[Heard]) -> Transport:
    """The transport of gloo, which has no network but TCP."""
    interfaces = ", ".join(dict.fromkeys(name for each in heard for name in each.said.devices if name))
    network = f"gloo over {interfaces or 'TCP'}"
    if _num_hosts(heard) == 1:
        return Transport(network, says="gloo, in one node", ranks=_values(heard))
    rdma = next((each.rdma for each in heard if each.rdma), "")
    notes = (f"gloo knows TCP only: on GPUs NCCL would use {rdma.partition(' by ')[0]}",) if rdma else ()
    return Transport(network, says=f"{network}: TCP, which is all that gloo has", notes=notes, ranks=_values(heard))


def of_nccl(heard: Sequence[Heard], *, allow_tcp: bool = False) -> Transport:
    """The transport of NCCL, by what the ranks say.

    Between nodes, TCP or silence is a failure where any node has reason to expect RDMA: nothing else proves that it
    was used. With `allow_tcp` it is a note.
    """
    version = next((each.said.version for each in heard if each.said.version), "")
    name = f"NCCL {version}".rstrip()
    warnings = tuple(f"NCCL warns on {each.host}: {words}" for each in heard for words in each.said.warnings[:1])[:3]
    if _num_hosts(heard) == 1:
        within = ", ".join(dict.fromkeys(way for each in heard for way in each.said.within)) or "not said"
        return Transport(within, None, says=f"{name}, in one node: {within}", notes=warnings, ranks=_values(heard))
    network = ", ".join(dict.fromkeys(each.network for each in heard if each.network)) or "not said"
    direct = [each.said.gpudirect for each in heard if each.said.gpudirect is not None and not each.is_tcp]
    gpudirect = all(direct) if direct else None
    is_tcp = all(each.is_tcp for each in heard)
    direction = "" if is_tcp else ", " + _DIRECT[gpudirect]
    says = f"{name}: {network}{direction}; {_expectation(heard)}"
    notes = (*_direct_notes(heard), *warnings)
    trouble = _trouble(heard)
    if trouble and allow_tcp:
        notes = (f"{trouble['wrong']}, as --allow-tcp allows: {trouble['seen']}", *notes)
        trouble = {}
    return Transport(network, gpudirect, not trouble, says, notes=notes, ranks=_values(heard), **trouble)


def _trouble(heard: Sequence[Heard]) -> dict[str, str]:
    """What is wrong, seen, and to be done; empty where nothing is."""
    rdma = next((f"{each.rdma} on {each.host}" for each in heard if each.rdma), "")
    silent, tcp = [each for each in heard if not each.network], [each for each in heard if each.is_tcp]
    fix = "muster fabric check on that node, then muster fabric plan; or, if TCP will do: --allow-tcp"
    if rdma and tcp:
        reasons = next((each.said.reasons for each in tcp if each.said.reasons), ())
        why = "; NCCL says: " + "; ".join(reasons) if reasons else ""
        wanted = os.environ.get("NCCL_NET", "")
        fix = f"unset NCCL_NET, which is {wanted}; {fix}" if wanted.lower() in _TCP else fix
        wrong = f"NCCL sends by TCP, and RDMA was to be expected: {_hosts(tcp)}"
        return {"wrong": wrong, "seen": f"{_told(tcp)}; expected {rdma}{why}", "fix": fix}
    if rdma and silent:
        wrong = f"NCCL did not say which network it uses, so nothing proves that it is not TCP: {_hosts(silent)}"
        where = os.environ.get("NCCL_DEBUG_FILE", "(unset)")
        seen = f"no such line in NCCL's log (NCCL_DEBUG_FILE={where}); expected {rdma}"
        return {"wrong": wrong, "seen": seen, "fix": f"unset NCCL_DEBUG_FILE, if it is yours; {fix}"}
    told = [each for each in heard if each.network]
    if len({each.said.networks for each in told}) > 1:
        return {"wrong": "not all ranks use the same network", "seen": _told(told), "fix": fix}
    return {}


def _told(heard: Sequence[Heard]) -> str:
    """Socket on node02, node03; IB on node01."""
    networks = dict.fromkeys(each.network for each in heard)
    return "; ".join(f"{name} on {_hosts([each for each in heard if each.network == name])}" for name in networks)


def _hosts(heard: Sequence[Heard]) -> str:
    """node02, node03; all nodes can be many."""
    return named(list(dict.fromkeys(each.host for each in heard)), 8)


def _expectation(heard: Sequence[Heard]) -> str:
    rdma = next((each.rdma for each in heard if each.rdma), "")
    if rdma:
        return f"expected: {rdma}"
    founds = {each.found for each in heard}
    return f"expected: TCP by {FOUND}" if founds <= set(NO_RDMA) else "nothing says that there is anything but TCP"


def _direct_notes(heard: Sequence[Heard]) -> tuple[str, ...]:
    """What to do where the data go through the host's memory, though the network would not need it.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#gpu-direct-rdma
    """
    without = [each for each in heard if each.said.gpudirect is False and not each.is_tcp]
    if not without:
        return ()
    line = f"data go through the host's memory on {_hosts(without)}: no GPUDirect RDMA on all of its connections"
    return (f"{line}; fix: load nvidia-peermem there, or have DMA-BUF (Linux 5.12, open kernel modules)",)


def rdma_devices(root: str = "/") -> tuple[str, ...]:
    """The files of RDMA devices here; none where not one of the ports has a link."""
    states = [_read(path) for path in glob.glob(f"{root}sys/class/infiniband/*/ports/*/state")]
    verbs = sorted(glob.glob(f"{root}dev/infiniband/uverbs*"))
    if states and not any("ACTIVE" in state for state in states):
        verbs = []
    return (*verbs, *sorted(glob.glob(f"{root}dev/cxi[0-9]*")))


def gloo_interface() -> str:
    """The interface that gloo uses: the one that it is told, or that has the address of this host's name."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        return named
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return ""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address in addresses for entry in entries):
            return name
    return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _num_hosts(heard: Sequence[Heard]) -> int:
    return len({each.host for each in heard})


def _values(heard: Sequence[Heard]) -> tuple[Mapping[str, Any], ...]:
    return tuple({**asdict(each), "network": each.network, "gpudirect": each.said.gpudirect} for each in heard)


def _from_json(value: dict[str, Any]) -> Heard:
    said = Said(**{name: _tuples(part) for name, part in value["said"].items()})
    own = {name: _tuples(part) for name, part in value.items() if name != "said"}
    return Heard(**own, said=said)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
