"""Ports and PCIe links, read from files like those in /sys; and the findings on a network."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from muster.check import fabric
from muster.check.doctor import network
from muster.check.options import DoctorOptions
from muster.train.distributed.world import World
from tests.check.doctor.healthy import healthy, only, with_node


def write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def pcie(width: int, speed: str, what: str = "max") -> dict[str, str]:
    return {f"{what}_link_width": str(width), f"{what}_link_speed": speed}


def adapter(sys: Path, slot: Mapping[str, str], card: Mapping[str, str]) -> None:
    """Writes an adapter in a slot as the kernel shows it: a device below its bridge, with a link from its class."""
    bridge = sys / "devices/pci0000:00/0000:00:01.0"
    write(bridge, slot)
    write(bridge / "0000:01:00.0", card)
    own = sys / "class/infiniband/mlx5_0"
    own.mkdir(parents=True)
    (own / "device").symlink_to(bridge / "0000:01:00.0")


def test_ports_have_rates(tmp_path: Path) -> None:
    for device, state, rate in (
        ("mlx5_0", "4: ACTIVE", "200 Gb/sec (4X HDR)"),
        ("mlx5_1", "1: DOWN", "2.5 Gb/sec (1X SDR)"),
    ):
        write(tmp_path / f"class/infiniband/{device}/ports/1", {"state": state, "rate": rate})
    assert network.ports(tmp_path) == {"mlx5_0/1": 200, "mlx5_1/1": None}


CARD = pcie(16, "16.0 GT/s PCIe")


@pytest.mark.parametrize(
    ("slot", "link", "said"),
    [
        (pcie(16, "32.0 GT/s PCIe"), pcie(8, "16.0 GT/s PCIe", "current"), "8 lanes of 16"),
        (pcie(16, "32.0 GT/s PCIe"), pcie(16, "8.0 GT/s PCIe", "current"), "8 GT/s of 16"),
        # The slot is unknown.
        ({}, pcie(8, "8.0 GT/s PCIe", "current"), "8 lanes of 16"),
    ],
)
def test_an_adapter_whose_link_is_less_than_it_can_be(
    tmp_path: Path, slot: dict[str, str], link: dict[str, str], said: str
) -> None:
    adapter(tmp_path, slot, CARD | link)
    assert network.slow_pcie_links(tmp_path) == {"mlx5_0": said}


def test_an_adapter_can_no_more_than_its_slot(tmp_path: Path) -> None:
    """The slot has fewer lanes than the card, and is of an older generation."""
    adapter(tmp_path, pcie(8, "8.0 GT/s PCIe"), CARD | pcie(8, "8.0 GT/s PCIe", "current"))
    assert network.slow_pcie_links(tmp_path) == {}


def test_gpus_are_those_of_their_driver(tmp_path: Path) -> None:
    """The link of an idle GPU is slower, but has no fewer lanes."""
    files = pcie(16, "32.0 GT/s PCIe")
    write(tmp_path / "bus/pci/drivers/nvidia/0000:17:00.0", files | pcie(4, "2.5 GT/s PCIe", "current"))
    write(tmp_path / "bus/pci/drivers/nvidia/0000:18:00.0", files | pcie(16, "2.5 GT/s PCIe", "current"))
    write(tmp_path / "bus/pci/drivers/nvidia/module", {})
    assert network.slow_pcie_links(tmp_path) == {"GPU at 0000:17:00.0": "4 lanes of 16"}


def test_what_has_no_link_of_its_own_is_left_out(tmp_path: Path) -> None:
    """Such as a virtual function; also a machine without adapters."""
    assert (network.ports(tmp_path), network.slow_pcie_links(tmp_path)) == ({}, {})
    adapter(tmp_path, {}, pcie(0, "Unknown") | pcie(0, "Unknown", "current"))
    assert network.slow_pcie_links(tmp_path) == {}


@pytest.mark.parametrize("width", ["255", "N/A", "-1", ""])
def test_a_link_of_which_the_kernel_does_not_know_all_is_left_out(tmp_path: Path, width: str) -> None:
    unknown = {"max_link_width": width, "max_link_speed": "Unknown"}
    adapter(tmp_path, {}, unknown | pcie(16, "16.0 GT/s PCIe", "current"))
    assert network.slow_pcie_links(tmp_path) == {}


def test_devices_that_may_not_be_opened() -> None:
    closed = with_node(healthy(), "node01", devices="this user may not open /dev/infiniband/uverbs0")
    assert (only(closed).host, only(closed).about) == ("node01", "fabric")


def test_memory_that_may_be_locked() -> None:
    finding = only(with_node(healthy(2), "node02", memlock="64 KiB may be locked"))
    assert (finding.host, finding.about, finding.level) == ("node02", "memlock", "warning")
    assert "64 KiB" in finding.seen


def test_the_fabrics_devices_are_asked_as_fabric_check_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "DEVICES", ("/dev/null",))
    monkeypatch.setattr(fabric.os, "access", lambda path, mode: False)
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda which: (65536, 65536))
    told = network.gather(World(host="a", hosts=("a",)), DoctorOptions(device="cpu"))
    assert (told.devices, told.memlock[:20]) == ("this user may not open /dev/null", "64 KiB may be locked")


def test_a_limit_that_is_large_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an eighth of the memory, the default of some systems."""
    monkeypatch.setattr(fabric, "DEVICES", ("/dev/null",))
    monkeypatch.setattr(fabric.resource, "getrlimit", lambda which: (64 << 30, 64 << 30))
    assert network.gather(World(host="a", hosts=("a",)), DoctorOptions(device="cpu")).memlock == ""


def test_two_nodes_of_one_name() -> None:
    told = healthy(2)
    told["network"]["node02"][1] = replace(told["network"]["node02"][1], address="10.0.0.9")
    finding = only(told)
    assert (finding.host, finding.about, finding.level) == ("node02", "host", "warning")
    assert finding.seen.endswith("10.0.0.2, 10.0.0.9")


def test_the_interface_is_the_one_that_the_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route to the first node may lead through another interface."""
    monkeypatch.setattr(network, "own_addresses", lambda: {"eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"]})
    monkeypatch.setattr(network, "source_address", lambda host: "10.0.0.5")
    world = World(rank=1, world_size=2, host="b", hosts=("b", "b"))
    for told, interface, address in (("ib0", "ib0", "10.1.0.5"), ("", "eth0", "10.0.0.5")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", told)
        found = network.gather(world, DoctorOptions())
        assert (found.interface, found.address) == (interface, address)
