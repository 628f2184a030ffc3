"""Which fabric is found on hosts with synthetic devices: no device is taken for one of another kind."""

import os
from pathlib import Path

import pytest

from muster.entrypoint.fabric import find
from muster.entrypoint.fabric.find import Device, Finding
from muster.entrypoint.sites.schema import Fabric
from muster.errors import MusterError
from tests.fabric.trees import Tree, fabric

PROFILES = {
    "tcp": fabric("TCP", net="Socket"),
    "infiniband": fabric("InfiniBand", net="IB", recognise=("/sys/class/infiniband/*", "/dev/infiniband")),
    "efa": fabric("EFA", recognise=("/sys/class/infiniband/*", "/dev/infiniband/uverbs*")),
    "slingshot": fabric("Slingshot", recognise=("/dev/cxi*", "/sys/class/cxi/cxi*")),
}


def found(host: Tree, wanted: str = "auto", profiles: dict[str, Fabric] | None = None) -> Finding:
    return find.find(host.root, wanted, fabrics=profiles or PROFILES)


def test_a_host_without_anything(host: Tree) -> None:
    finding = found(host)
    assert (finding.fabric, finding.why) == ("tcp", "no device of a fabric")
    assert (finding.devices, finding.interfaces) == ((), ())


def test_a_root_without_what_is_mounted_below_it_is_noted(host: Tree) -> None:
    """Otherwise TCP would be chosen, and nothing would say why."""
    assert any(f"nothing is mounted at {host.root}/sys" in note for note in found(host).notes)
    host.file("/sys/class/net/lo/operstate", "up")
    assert not any("mounted" in note for note in found(host).notes)


def test_infiniband(host: Tree) -> None:
    host.verbs("mlx5_0", "InfiniBand", "4: ACTIVE")
    host.verbs("mlx5_1", "InfiniBand", "1: DOWN")
    finding = found(host)
    assert finding.devices == (
        Device("mlx5_0", "infiniband", "/dev/infiniband/uverbs0", "ACTIVE"),
        Device("mlx5_1", "infiniband", "/dev/infiniband/uverbs1", "DOWN"),
    )
    assert finding.fabric == "infiniband"
    assert finding.why == "/dev/infiniband/uverbs0 (mlx5_0, infiniband ACTIVE)"


def test_ethernet_with_rdma_is_roce(host: Tree) -> None:
    host.verbs("mlx5_0", "Ethernet", "4: ACTIVE")
    finding = found(host)
    assert (finding.fabric, finding.devices[0].kind) == ("infiniband", "roce")


def test_the_active_port_of_a_card_with_two_tells_its_kind(host: Tree) -> None:
    host.verbs("mlx4_0", "InfiniBand", "1: DOWN", "4: ACTIVE")
    host.file("/sys/class/infiniband/mlx4_0/ports/2/link_layer", "Ethernet\n")
    assert found(host).devices == (Device("mlx4_0", "roce", "/dev/infiniband/uverbs0", "ACTIVE"),)


def test_a_fabric_that_is_down_is_none(host: Tree) -> None:
    """Many nodes have a card without a cable."""
    host.verbs("mlx5_0", "InfiniBand", "1: DOWN")
    finding = found(host)
    assert finding.fabric == "tcp"
    assert finding.why == "no device of a fabric; mlx5_0 is DOWN"
    assert found(host, "infiniband").fabric == "infiniband"


def test_efa_is_not_taken_for_infiniband(host: Tree) -> None:
    host.verbs("rdmap0s6", "Unspecified", "4: ACTIVE", vendor="0x1d0f")
    finding = found(host)
    assert (finding.fabric, finding.devices[0].kind) == ("efa", "efa")
    only_infiniband = {name: profile for name, profile in PROFILES.items() if name != "efa"}
    assert found(host, profiles=only_infiniband).fabric == "tcp"


@pytest.mark.parametrize(
    ("name", "layer", "node_type", "kind"),
    [
        ("siw0", "Ethernet", "4: RNIC", "iwarp"),
        ("hfi1_0", "InfiniBand", "1: CA", "omnipath"),
        ("usnic_0", "Unspecified", "5: usNIC", "unknown"),
    ],
)
def test_other_rdma_devices_are_no_fabric(host: Tree, name: str, layer: str, node_type: str, kind: str) -> None:
    host.verbs(name, layer, "4: ACTIVE", node_type=node_type)
    finding = found(host)
    assert (finding.devices[0].kind, finding.fabric) == (kind, "tcp")


def test_slingshot_goes_before_infiniband(host: Tree) -> None:
    host.verbs("mlx5_0", "InfiniBand", "4: ACTIVE")
    for name in ("cxi0", "cxi1", "cxi_ctl", "cxib"):
        host.file(f"/dev/{name}")
    finding = found(host)
    assert finding.fabric == "slingshot"
    assert finding.why == "/dev/cxi0 (cxi0, slingshot)"
    assert [device.name for device in finding.devices if device.kind == "slingshot"] == ["cxi0", "cxi1"]


def test_slingshot_without_its_files_in_dev(host: Tree) -> None:
    """As in a container that was given no devices."""
    host.file("/sys/class/cxi/cxi0/device/x")
    finding = found(host)
    assert (finding.fabric, finding.devices) == ("slingshot", (Device("cxi0", "slingshot", "/sys/class/cxi/cxi0"),))


def test_gdrcopy_and_xpmem_are_no_fabric(host: Tree) -> None:
    for name in ("gdrdrv", "xpmem"):
        host.file(f"/dev/{name}")
    finding = found(host)
    assert finding.fabric == "tcp"
    assert [(device.name, device.kind) for device in finding.devices] == [("gdrdrv", "gdrcopy"), ("xpmem", "xpmem")]


def test_a_profile_of_a_users_own_is_recognised_by_its_patterns(host: Tree) -> None:
    profiles = {**PROFILES, "mine": fabric("Mine", recognise=("/dev/mine*",))}
    host.file("/dev/mine 0")
    finding = found(host, profiles=profiles)
    assert (finding.fabric, finding.why) == ("mine", "/dev/mine 0")


def test_interfaces_without_the_loopback(host: Tree) -> None:
    for name in ("hsn0", "eth0", "lo"):
        host.file(f"/sys/devices/net/{name}/operstate", "up\n")
        host.link(f"/sys/class/net/{name}", f"../../devices/net/{name}")
    host.file("/sys/class/net/bonding_masters", "bond0\n")
    assert found(host).interfaces == ("eth0", "hsn0")


def test_an_unknown_fabric_is_refused_with_the_known_ones(host: Tree) -> None:
    with pytest.raises(MusterError) as refused:
        found(host, "infinband")
    assert refused.value.fix == "--fabric off|auto|tcp|infiniband|efa|slingshot"


def test_this_machine_itself_is_a_host() -> None:
    finding = find.find(Path("/"), "tcp", fabrics=PROFILES)
    expected = {name for name in os.listdir("/sys/class/net") if name != "lo" and Path("/sys/class/net", name).is_dir()}
    assert set(finding.interfaces) == expected


def test_a_port_without_a_link_layer_has_no_kind(host: Tree) -> None:
    host.verbs("mlx5_0", "InfiniBand", "4: ACTIVE")
    host.at("/sys/class/infiniband/mlx5_0/ports/1/link_layer").unlink()
    assert (found(host).devices[0].kind, found(host).fabric) == ("unknown", "tcp")
