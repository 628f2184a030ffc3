"""Links as the kernel shows them: InfiniBand and RoCE ports with their rates, and PCIe links of adapters and GPUs.

A cable or a slot with a bad contact does not fail: its link comes up with fewer lanes, or at a lower speed.

Source: https://docs.kernel.org/admin-guide/abi-stable.html (infiniband), abi-testing.html (current_link_width)
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from muster.check.doctor.facts import Facts, Finding, Node, Part, PcieLink, Port, attempt, differences, distinct
from muster.check.ranks import listed


def gather(sys: Path = Path("/sys")) -> dict[str, Any]:
    """The fields of a Node that tell of its links.

    Args:
        sys: where the kernel shows them.
    """
    return {"ports": attempt(lambda: tuple(_ports(sys))) or (), "pcie": attempt(lambda: tuple(_pcie(sys))) or ()}


def _ports(sys: Path) -> Iterator[Port]:
    for folder in sorted(sys.glob("class/infiniband/*/ports/*")):
        # "4: ACTIVE", "200 Gb/sec (4X HDR)"
        state, rate = _read(folder / "state"), _read(folder / "rate")
        name = f"{folder.parents[1].name}/{folder.name}"
        yield Port(name=name, is_active=state.endswith(": ACTIVE"), rate_gbit_s=_number(rate))


def _pcie(sys: Path) -> Iterator[PcieLink]:
    adapters = [(folder.name, folder / "device", False) for folder in sorted(sys.glob("class/infiniband/*"))]
    gpus = [(f"GPU at {folder.name}", folder, True) for folder in sorted(sys.glob("bus/pci/drivers/nvidia/*:*:*.*"))]
    for name, folder, is_gpu in adapters + gpus:
        device = folder.resolve()
        # Both ends have to be able: a card of 16 lanes in a slot of 8 is as it was built.
        ends = [end for end in (device, device.parent) if (end / "max_link_width").exists()]
        width, max_width = _least([device], "current_link_width"), _least(ends, "max_link_width")
        if width and max_width:
            speeds = _least([device], "current_link_speed"), _least(ends, "max_link_speed")
            yield PcieLink(
                name=name,
                is_gpu=is_gpu,
                width=int(width),
                max_width=int(max_width),
                speed_gt_s=speeds[0],
                max_speed_gt_s=speeds[1],
            )


def _least(folders: list[Path], name: str) -> float | None:
    """The smallest number that these devices have in the file `name`; None without any, and for 0, a virtual link's."""
    return min((number for folder in folders if (number := _number(_read(folder / name)))), default=None)


def _number(text: str) -> float | None:
    """The number at the start of "16.0 GT/s PCIe"."""
    found = re.match(r"\d+(\.\d+)?", text)
    return float(found.group()) if found else None


def _read(path: Path) -> str:
    return attempt(lambda: path.read_text().strip()) or ""


def findings(facts: Facts) -> Part:
    """Ports that are down or slower than on other nodes; adapters and GPUs whose PCIe link is less than it can be."""
    fix = "tell the site: a link of that node is down (ibstat)"
    up = {node.host: len(_rates(node)) if node.ports else None for node in facts.nodes}
    found = differences(up, "warning", "ports", "number of active InfiniBand ports", fix)
    # Where ports are down the rates differ for that reason. Names of devices are each node's own: only rates count.
    most = max((number for number in up.values() if number), default=0)
    rates = {node.host: _rates(node) if len(_rates(node)) == most else None for node in facts.nodes}
    shown = {
        _rates(node): ", ".join(f"{port.name} at {port.rate_gbit_s:g} Gb/s" for port in node.ports if _is_up(port))
        for node in facts.nodes
    }
    fix = "tell the site: the cable or the port of a slow link (ibstat, mlxlink)"
    found += differences(rates, "warning", "ports", "rate of InfiniBand ports", fix, lambda value: shown[value])
    less: dict[tuple[str, str], list[str]] = {}
    for node in facts.nodes:
        for link in node.pcie:
            if said := _less(link):
                less.setdefault((link.name, said), []).append(node.host)
    fix = "tell the site: the card in its slot, or the slot (lspci -vv: LnkSta against LnkCap)"
    for (name, said), hosts in less.items():
        wrong = f"the PCIe link of {name} is less than the card and its slot can"
        found.append(Finding("warning", "pcie", listed(hosts), wrong, said, fix))
    usual = distinct([f"{rate:g}" for node in facts.nodes for rate in _rates(node)])
    return Part("links", f"{most} ports up, at {usual} Gb/s" if most else "no InfiniBand or RoCE port", found)


def _is_up(port: Port) -> bool:
    return port.is_active and port.rate_gbit_s is not None


def _rates(node: Node) -> tuple[float, ...]:
    """Of the ports that are up, in order."""
    return tuple(sorted(port.rate_gbit_s or 0.0 for port in node.ports if _is_up(port)))


def _less(link: PcieLink) -> str:
    """In what a PCIe link is less than it can be; empty where it is not."""
    if link.width < link.max_width:
        return f"{link.width} lanes of {link.max_width}"
    speed, can = link.speed_gt_s, link.max_speed_gt_s
    # An idle GPU lowers its speed by itself.
    return f"{speed:g} GT/s of {can:g}" if speed and can and speed < can and not link.is_gpu else ""
