"""The profiles of jobs/fabrics, each on a synthetic host of the kind that it is for."""

from pathlib import Path

import msgspec
import pytest

from muster.entrypoint.fabric import find, stage
from muster.entrypoint.fabric.stage import FabricPlan
from muster.entrypoint.sites.schema import Context, Fabric
from muster.paths import ROOT
from tests.fabric import trees
from tests.fabric.trees import Tree

LIB = "/usr/lib64"
PROFILES = {
    path.stem: msgspec.toml.decode(path.read_bytes(), type=Fabric) for path in sorted(ROOT.glob("jobs/fabrics/*.toml"))
}


def planned(host: Tree, image: Tree, nodes: int = 2) -> FabricPlan:
    finding = find.find(host.root, fabrics=PROFILES)
    found = stage.make_plan(finding, PROFILES[finding.fabric], image.as_image(), Context(nodes))
    assert found.refusals == ()
    return found


def opens(plan: FabricPlan, image: Tree, folder: Path) -> bool:
    """Whether the plugin can be opened with the links of the plan."""
    paths = {one.soname: one.path for one in plan.injected}
    return trees.opened(str(plan.plugin), trees.links(folder, plan.finding.root, paths), image.at(LIB)) == ""


@pytest.fixture
def cray(host: Tree) -> Tree:
    """A node with Slingshot: libfabric in a folder of Cray's, and a chain of libraries that other systems lack."""
    host.file("/dev/cxi0")
    host.file("/dev/xpmem")
    host.file("/run/cxi/cxi0/x")
    host.library("/opt/cray/libfabric/1.15.2.0/lib64/libfabric.so.1", "libfabric.so.1", ["FABRIC_1.5"])
    needs = {"libcxi.so.1": [], "libcurl.so.4": ["CURL_OPENSSL_4"], "libjson-c.so.3": []}
    host.library(
        "/opt/cray/libfabric/1.22.0/lib64/libfabric.so.1", "libfabric.so.1", ["FABRIC_1.5", "FABRIC_1.7"], needs
    )
    host.library(f"{LIB}/libcxi.so.1", "libcxi.so.1")
    host.library(f"{LIB}/libcurl.so.4", "libcurl.so.4", ["CURL_OPENSSL_4"])
    host.library(f"{LIB}/libjson-c.so.3", "libjson-c.so.3")
    host.plugin(f"{LIB}/libnccl-net.so", [6, 7, 8], "AWS Libfabric", {"libfabric.so.1": ["FABRIC_1.7"]})
    return host


def test_slingshot(cray: Tree, image: Tree, tmp_path: Path) -> None:
    image.library(f"{LIB}/libfabric.so.1", "libfabric.so.1", ["FABRIC_1.5"])
    image.library(f"{LIB}/libcurl.so.4", "libcurl.so.4", ["CURL_OPENSSL_4"])
    plan = planned(cray, image)
    assert plan.finding.fabric == "slingshot"
    assert {one.soname: one.path for one in plan.injected} == {
        "libnccl-net.so": f"{LIB}/libnccl-net.so",
        "libfabric.so.1": "/opt/cray/libfabric/1.22.0/lib64/libfabric.so.1",
        "libcxi.so.1": f"{LIB}/libcxi.so.1",
        "libjson-c.so.3": f"{LIB}/libjson-c.so.3",
    }
    assert [one.soname for one in plan.injected if one.wins] == ["libfabric.so.1"]
    assert (plan.plugin, plan.net) == ("libnccl-net.so", "AWS Libfabric")
    assert (plan.devices, plan.files) == (("/dev/cxi0", "/dev/xpmem"), ("/run/cxi",))
    assert plan.variables["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    # Together: an eager message waits in the host's memory, and collectives may hang.
    assert {plan.variables[f"FI_CXI_RDZV_{name}"] for name in ("EAGER_SIZE", "THRESHOLD", "GET_MIN")} == {"0"}
    assert opens(plan, image, tmp_path / "links")


def test_one_node_with_slingshot_needs_no_variables(cray: Tree, image: Tree) -> None:
    assert planned(cray, image, nodes=1).variables == {}


def test_efa(host: Tree, image: Tree, tmp_path: Path) -> None:
    host.verbs("rdmap0s6", "Unspecified", "4: ACTIVE", vendor="0x1d0f")
    host.plugin(
        "/opt/amazon/ofi-nccl/lib64/libnccl-net-ofi.so", [9, 10], "Libfabric", {"libfabric.so.1": ["FABRIC_1.8"]}
    )
    needs = {"libefa.so.1": ["EFA_1.1"], "libibverbs.so.1": ["IBVERBS_1.1"]}
    host.library("/opt/amazon/efa/lib64/libfabric.so.1", "libfabric.so.1", ["FABRIC_1.6", "FABRIC_1.8"], needs)
    image.library(f"{LIB}/libfabric.so.1", "libfabric.so.1", ["FABRIC_1.6"])
    for tree in (host, image):
        tree.library(f"{LIB}/libefa.so.1", "libefa.so.1", ["EFA_1.1"], {"libibverbs.so.1": ["IBVERBS_PRIVATE_34"]})
        tree.library(f"{LIB}/libibverbs.so.1", "libibverbs.so.1", ["IBVERBS_1.1", "IBVERBS_PRIVATE_34"])
    host.file("/etc/libibverbs.d/efa.driver", "driver efa\n")
    plan = planned(host, image)
    assert plan.finding.fabric == "efa"
    # The image's verbs are good enough, and so are its settings files.
    assert [one.soname for one in plan.injected] == ["libnccl-net-ofi.so", "libfabric.so.1"]
    assert plan.files == ()
    assert (plan.plugin, plan.net, plan.variables) == ("libnccl-net-ofi.so", "Libfabric", {"FI_PROVIDER": "efa"})
    assert plan.devices == ("/dev/infiniband/uverbs0",)
    assert opens(plan, image, tmp_path / "links")


@pytest.mark.parametrize(
    ("layer", "nodes", "net"), [("InfiniBand", 2, "IB"), ("Ethernet", 2, "IB"), ("InfiniBand", 1, None)]
)
def test_infiniband_needs_nothing_of_the_host(host: Tree, image: Tree, layer: str, nodes: int, net: str | None) -> None:
    host.verbs("mlx5_0", layer, "4: ACTIVE")
    host.library(f"{LIB}/libibverbs.so.1", "libibverbs.so.1", ["IBVERBS_1.14"])
    host.file("/etc/libibverbs.d/mlx5.driver", "driver mlx5\n")
    image.library(f"{LIB}/libibverbs.so.1", "libibverbs.so.1", ["IBVERBS_1.1"])
    plan = planned(host, image, nodes)
    assert (plan.finding.fabric, plan.injected, plan.files, plan.net) == ("infiniband", (), (), net)
    assert plan.devices == ("/dev/infiniband/uverbs0",)


def test_tcp(host: Tree, image: Tree) -> None:
    plan = planned(host, image)
    assert (plan.finding.fabric, plan.injected, plan.net) == ("tcp", (), "Socket")
