"""A node's fabric devices and network interfaces, as the kernel tells them in /sys and /dev."""

import re

from entrypoint.fabric.hostroot import HostRoot
from entrypoint.fabric.model import Device, Interface

# PCI's vendor number of Amazon. Source: https://github.com/amzn/amzn-drivers (kernel/linux/efa/src/efa_main.c)
_AMAZON = "0x1d0f"
_LINK_LAYERS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


def find(root: HostRoot) -> tuple[Device, ...]:
    """All devices of fabrics, by kind and name."""
    found = [*_verbs(root), *_slingshot(root)]
    for name, kind in (("gdrdrv", "gdrcopy"), ("xpmem", "xpmem")):
        if root.exists(f"/dev/{name}"):
            found.append(Device(name, kind, f"/dev/{name}"))
    return tuple(found)


def interfaces(root: HostRoot) -> tuple[Interface, ...]:
    """The network's interfaces, without the loopback."""
    base = "/sys/class/net"
    names = [name for name in root.names(base) if name != "lo" and root.folder(f"{base}/{name}")]
    return tuple(Interface(name, _speed(root, f"{base}/{name}"), _is_up(root, f"{base}/{name}")) for name in names)


def driver(root: HostRoot) -> str | None:
    """The version of NVIDIA's driver, as the kernel's part tells it."""
    for path in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        match = re.search(r"(?<![\w.])[0-9]{3,4}\.[0-9]+(?:\.[0-9]+)?(?![\w.])", root.read_text(path) or "")
        if match:
            return match[0]
    return None


def _verbs(root: HostRoot) -> list[Device]:
    base = "/sys/class/infiniband"
    files = _character_devices(root)
    found: list[Device] = []
    for name in root.names(base):
        folder = f"{base}/{name}"
        ports = root.names(f"{folder}/ports")
        states = [_state(root.read_text(f"{folder}/ports/{port}/state")) for port in ports]
        state = "ACTIVE" if "ACTIVE" in states else next((state for state in states if state), "")
        kind = _verbs_kind(root, folder, ports, states)
        found.append(Device(name, kind, files.get(name, folder), state))
    return found


def _verbs_kind(root: HostRoot, folder: str, ports: list[str], states: list[str]) -> str:
    if root.read_text(f"{folder}/device/vendor") == _AMAZON:
        return "efa"
    if (root.read_text(f"{folder}/node_type") or "").endswith("RNIC"):
        return "iwarp"
    if folder.rpartition("/")[2].startswith("hfi1"):
        return "omnipath"
    # The active port tells, where there are several.
    ordered = sorted(zip(ports, states, strict=True), key=lambda port: port[1] != "ACTIVE")
    layers = [root.read_text(f"{folder}/ports/{port}/link_layer") or "" for port, _ in ordered]
    return next((_LINK_LAYERS[layer] for layer in layers if layer in _LINK_LAYERS), "unknown")


def _character_devices(root: HostRoot) -> dict[str, str]:
    """/dev/infiniband/uverbs0 by the device's name."""
    base = "/sys/class/infiniband_verbs"
    named = {root.read_text(f"{base}/{name}/ibdev") or "": f"/dev/infiniband/{name}" for name in root.names(base)}
    return {name: path for name, path in named.items() if name and root.exists(path)}


def _slingshot(root: HostRoot) -> list[Device]:
    names = {name for folder in ("/dev", "/sys/class/cxi", "/sys/class/cxi_user") for name in root.names(folder)}
    found: list[Device] = []
    for name in sorted(name for name in names if re.fullmatch(r"cxi[0-9]+", name)):
        paths = (f"/dev/{name}", f"/sys/class/cxi/{name}", f"/sys/class/cxi_user/{name}")
        found.append(Device(name, "slingshot", next(path for path in paths if root.exists(path) or path == paths[-1])))
    return found


def _state(text: str | None) -> str:
    # 4: ACTIVE
    return (text or "").rpartition(":")[2].strip()


def _speed(root: HostRoot, folder: str) -> int | None:
    text = root.read_text(f"{folder}/speed") or ""
    # -1 where it is down.
    return int(text) if re.fullmatch("[0-9]{1,9}", text) and int(text) > 0 else None


def _is_up(root: HostRoot, folder: str) -> bool:
    state = root.read_text(f"{folder}/operstate")
    return state == "up" or (state == "unknown" and root.read_text(f"{folder}/carrier") == "1")
