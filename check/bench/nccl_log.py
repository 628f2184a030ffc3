"""NCCL's own log: `ask` for it, have its `text`, `read` what NCCL used. The wording of 2.4 to 2.30 is known.

    Using network IB                                    what it would cross the network by
    Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA      what it does cross it by, with GPUDirect
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM           what it does inside a node

Source: https://github.com/NVIDIA/nccl/blob/master/src/transport/net.cc and the files beside it.
"""

import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

SUBSYSTEMS = ("INIT", "NET")

SHOWN: list[str] = []
"""The level of a user who wanted to see the log, which now goes elsewhere: it has to be shown."""

_LINE = re.compile(r"NCCL (INFO|WARN) (.*\S)")
_VERSION = re.compile(r"NCCL version (\d\S*)")
_CHOSEN = re.compile(r"Using network (.+)")
_CONNECTED = re.compile(r"(?:Channel|Ring|CollNet) \d+.* via (.+)")
# A network's name may have spaces (AWS Libfabric); after its device comes the rank that sends for this one, if any.
_NET = re.compile(r"NET/(.+?)/\d+(?:\(\d+\))?((?:/.*)?)")
_DEVICES = re.compile(r"NET/(IB|Socket) : Using(.*)")
_DEVICE = re.compile(r"\[\d+\]\s*([^\s\[\]{};,=]+)")
_PROVIDER = re.compile(r"NET/OFI Selected provider is ([^\s,]+)", re.IGNORECASE)
_LOADED = re.compile(r"NET/Plugin ?: Loaded net plugin (.+)|P2P plugin (\S+)")
_REASON = re.compile(
    r"NET/Plugin ?: .*(?:No plugin found|cannot open|Could not find|could not be|symbols? .*not supported)"
    r"|NET/Plugin ?: Plugin load .* returned"
    r"|NET/IB : No device found|Failed to open libibverbs|Failed to initialize NET plugin|NCCL_IB_DISABLE set .* to 1"
    r"|network \S+ not found"
)
MAX_REASONS = 4


@dataclass(frozen=True)
class Said:
    """What one process's NCCL said.

    Attributes:
        version: its own, as `2.27.5+cuda12.9`.
        chosen: the networks that it would cross by: one, or more where communicators differ.
        channels: those that its connections do cross by, each with the number of connections,
            and of those with GPUDirect.
        within: by what it speaks inside a node, or over NVLink: P2P/CUMEM, SHM, NVLS, COLLNET/SHARP.
        devices: of InfiniBand `mlx5_0:1/IB`; of TCP the interfaces, `eth0`.
        provider: libfabric's, where the plugin is the one for it.
        plugin: the network plugin that was loaded.
        reasons: why some network is not there.
        warnings: what NCCL itself calls so.
    """

    version: str = ""
    chosen: tuple[str, ...] = ()
    channels: tuple[tuple[str, int, int], ...] = ()
    within: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    provider: str = ""
    plugin: str = ""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks in use; where no connection of this process crosses, those that it would use."""
        return tuple(name for name, _, _ in self.channels) or self.chosen

    @property
    def gpudirect(self) -> bool | None:
        """Whether all its connections over a network read the GPU's memory directly; None where it has none."""
        if not self.channels:
            return None
        return all(number == direct for _, number, direct in self.channels)


def ask(environ: MutableMapping[str, str]) -> None:
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


def path_of(environ: Mapping[str, str]) -> str:
    """The file that NCCL writes in this process; empty where it writes none that can be read.

    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-file
    """
    named, path, words = (
        environ.get("NCCL_DEBUG_FILE", ""),
        "",
        {"h": socket.gethostname().partition(".")[0], "p": str(os.getpid()), "%": "%"},
    )
    while named:
        before, percent, named = named.partition("%")
        path += before
        if percent:
            path += words.get(named[:1], f"%{named[:1]}")
            named = named[1:]
    try:
        return path if path and stat.S_ISREG(os.stat(path).st_mode) else ""
    except OSError:
        return ""


def text() -> str:
    """NCCL's log of this process so far."""
    path = path_of(os.environ)
    if not path:
        return ""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read(text: str) -> Said:
    """What the log `text` of one process says."""
    version = _VERSION.search(text)
    said: dict[str, dict[str, None]] = {name: {} for name in ("chosen", "within", "devices", "provider", "plugin")}
    said |= {"reasons": {}, "warnings": {}}
    channels: dict[str, list[int]] = {}
    for level, message in _messages(text):
        if level == "WARN":
            said["warnings"][message] = None
        if found := _CHOSEN.fullmatch(message):
            said["chosen"][found[1]] = None
        elif found := _CONNECTED.fullmatch(message):
            _connected(found[1], channels, said["within"])
        elif found := _DEVICES.fullmatch(message):
            said["devices"] |= dict.fromkeys(_devices(found[1], found[2]))
        elif found := _PROVIDER.search(message):
            said["provider"][found[1]] = None
        elif found := _LOADED.fullmatch(message):
            said["plugin"][found[1] or found[2]] = None
        elif message.startswith("Connected NVLS"):
            said["within"]["NVLS"] = None
        elif _REASON.search(message) and len(said["reasons"]) < MAX_REASONS:
            said["reasons"][message] = None
    return Said(
        version=version[1] if version else "",
        chosen=tuple(said["chosen"]),
        channels=tuple((name, number, direct) for name, (number, direct) in channels.items()),
        within=tuple(said["within"]),
        devices=tuple(said["devices"]),
        provider=next(iter(said["provider"]), ""),
        plugin=next(iter(said["plugin"]), ""),
        reasons=tuple(said["reasons"]),
        warnings=tuple(said["warnings"]),
    )


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Level and message of each line; what stands before them differs by version and settings."""
    for line in text.splitlines():
        if found := _LINE.search(line):
            yield found[1], found[2]


def _connected(by: str, channels: dict[str, list[int]], within: dict[str, None]) -> None:
    if found := _NET.fullmatch(by):
        counts = channels.setdefault(found[1], [0, 0])
        counts[0] += 1
        counts[1] += "/GDRDMA" in found[2]
        return
    kind, _, way = by.partition("/")
    is_shared = kind in ("SHM", "direct shared memory")
    within["SHM" if is_shared else f"{kind}/{way.partition('/')[0]}".rstrip("/")] = None


def _devices(network: str, listed: str) -> list[str]:
    names: list[str] = _DEVICE.findall(listed.partition("; OOB")[0])
    return [name.partition(":")[0] for name in names] if network == "Socket" else names
