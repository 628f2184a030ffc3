"""Every reason to refuse a host's libraries, with its message; and the same host without it, which is allowed."""

from pathlib import Path

import pytest

from muster.entrypoint.fabric.find import own_machine
from muster.entrypoint.fabric.proof import Refusal
from muster.entrypoint.fabric.stage import FabricPlan
from muster.entrypoint.sites.schema import Fabric
from tests.fabric import trees
from tests.fabric.trees import Tree, fabric

LIB = "/usr/lib64"
PLUGIN = "libnccl-net.so"
PROFILE = fabric(plugins=(PLUGIN,))
SET = ("libibverbs.so.1", "librdmacm.so.1", f"{LIB}/libibverbs")


def planned(host: Tree, image: Tree, profile: Fabric = PROFILE) -> FabricPlan:
    return trees.planned(host.root, image.as_image(), profile)


def refusal(host: Tree, image: Tree, profile: Fabric = PROFILE) -> Refusal:
    """The plan's only refusal; asserts that nothing is injected then."""
    plan = planned(host, image, profile)
    assert plan.injected == ()
    assert (plan.plugin, plan.net, plan.variables, plan.files, plan.devices) == (None, None, {}, (), ())
    assert len(plan.refusals) == 1, plan.refusals
    assert plan.refusals[0].fix
    return plan.refusals[0]


def allowed(host: Tree, image: Tree, profile: Fabric = PROFILE) -> list[str]:
    """The injected libraries; asserts that nothing is refused."""
    plan = planned(host, image, profile)
    assert plan.refusals == ()
    return [injected.soname for injected in plan.injected]


def test_a_library_of_another_architecture(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": ["FAB_1"]})
    path = host.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1"])
    assert allowed(host, image) == [PLUGIN, "libfab.so.1"]
    trees.as_machine(path, trees.FOREIGN)
    why = refusal(host, image)
    assert (why.library, why.needed_by) == (f"{LIB}/libfab.so.1", f"{LIB}/{PLUGIN}")
    assert "another architecture" in why.wrong
    assert why.needs == own_machine()
    # The loader goes on to the next folder.
    host.library("/usr/lib/libfab.so.1", "libfab.so.1", ["FAB_1"])
    assert allowed(host, image) == [PLUGIN, "libfab.so.1"]


@pytest.mark.parametrize(
    ("soname", "has", "lacks"),
    [
        ("libc.so.6", "GLIBC_2.36", "GLIBC_2.38"),
        ("libstdc++.so.6", "GLIBCXX_3.4.30", "GLIBCXX_3.4.32"),
        ("libgcc_s.so.1", "GCC_12.0.0", "GCC_14.0.0"),
    ],
)
def test_a_symbol_version_that_the_image_is_too_old_for(
    host: Tree, image: Tree, soname: str, has: str, lacks: str
) -> None:
    """These libraries are always the image's: it does not help that the host's has the version."""
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": []})
    host.library(f"{LIB}/{soname}", soname, [has, lacks])
    image.library(f"{LIB}/{soname}", soname, [has])
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", needs={soname: [has]})
    assert allowed(host, image) == [PLUGIN, "libfab.so.1"]
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", needs={soname: [has, lacks]})
    why = refusal(host, image)
    assert (why.library, why.needs, why.needed_by) == (f"{LIB}/libfab.so.1", lacks, f"{LIB}/libfab.so.1")
    assert f"the image's {image.at(LIB)}/{soname}" in why.wrong
    assert lacks in why.fix
    # No program would start with this test's C library; test_debian.py opens libraries with real ones.
    if soname != "libc.so.6":
        assert lacks in trees.opened(str(host.at(f"{LIB}/libfab.so.1")), image.at(LIB))


def test_a_missing_version_that_is_weak_is_none(host: Tree, image: Tree) -> None:
    path = host.library(f"{LIB}/{PLUGIN}", needs={"libc.so.6": ["GLIBC_2.38"]})
    image.library(f"{LIB}/libc.so.6", "libc.so.6", ["GLIBC_2.36"])
    profile = fabric(net="x", roots=(PLUGIN,))
    assert refusal(host, image, profile).needs == "GLIBC_2.38"
    trees.as_weak(path)
    assert allowed(host, image, profile) == [PLUGIN]


@pytest.mark.parametrize(
    ("soname", "has", "lacks"),
    [
        ("libfabric.so.1", "FABRIC_1.6", "FABRIC_1.7"),
        ("libcxi.so.1", "CXI_1.0", "CXI_2.0"),
        ("libibverbs.so.1", "IBVERBS_PRIVATE_34", "IBVERBS_PRIVATE_50"),
    ],
)
def test_a_symbol_version_that_no_copy_has(host: Tree, image: Tree, soname: str, has: str, lacks: str) -> None:
    host.library(f"{LIB}/{soname}", soname, [has])
    host.plugin(f"{LIB}/{PLUGIN}", needs={soname: [has]})
    assert allowed(host, image) == [PLUGIN, soname]
    host.plugin(f"{LIB}/{PLUGIN}", needs={soname: [has, lacks]})
    why = refusal(host, image)
    assert (why.library, why.needs) == (f"{LIB}/{PLUGIN}", lacks)
    assert f"the host's {LIB}/{soname}" in why.wrong
    image.library(f"{LIB}/{soname}", soname, [has])
    assert refusal(host, image) == why
    host.at(f"{LIB}/{soname}").unlink()
    why = refusal(host, image)
    assert (why.library, why.needs) == (f"{LIB}/{PLUGIN}", lacks)
    assert f"the image's {image.at(LIB)}/{soname}" in why.wrong
    host.library(f"{LIB}/{soname}", soname, [has])
    assert trees.opened(str(host.at(f"{LIB}/{PLUGIN}")), host.at(LIB)) != ""


def test_a_library_that_is_nowhere(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": []})
    why = refusal(host, image)
    assert (why.needs, why.needed_by) == ("libfab.so.1", f"{LIB}/{PLUGIN}")
    assert "neither the host nor the image" in why.wrong
    assert "search" in why.fix


@pytest.mark.parametrize("name", ["lib a.so", "lib;a.so", "lib,a.so"])
def test_a_name_that_no_list_of_libraries_can_hold_is_never_linked(host: Tree, image: Tree, name: str) -> None:
    host.library(f"{LIB}/{name}", name)
    host.plugin(f"{LIB}/{PLUGIN}", needs={name: []})
    assert name in refusal(host, image).needs


def test_a_library_that_is_needed_by_its_path(host: Tree, image: Tree) -> None:
    """The loader would look there in the container, where the host's folders are not."""
    path = host.library("/opt/fab/libfab.so")
    host.plugin(f"{LIB}/{PLUGIN}", options=[str(path)])
    host.file(str(path), path.read_bytes())
    path.unlink()
    assert refusal(host, image).needs == str(path)


def test_a_root_that_is_nowhere(host: Tree, image: Tree) -> None:
    profile = fabric(net="IB", roots=("libcxi.so.1",))
    assert refusal(host, image, profile).needs == "libcxi.so.1"
    host.library(f"{LIB}/libcxi.so.1", "libcxi.so.1")
    assert allowed(host, image, profile) == ["libcxi.so.1"]


def test_a_library_of_the_c_library_that_the_image_has_not(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libgcc_s.so.1": []})
    host.library(f"{LIB}/libgcc_s.so.1", "libgcc_s.so.1")
    assert refusal(host, image).needs == "libgcc_s.so.1"
    image.library(f"{LIB}/libgcc_s.so.1", "libgcc_s.so.1")
    assert allowed(host, image) == [PLUGIN]


def test_a_copy_of_the_hosts_that_has_less_than_the_image_needs(host: Tree, image: Tree) -> None:
    """libfab has to be the host's, but the image's libmpi would not find in it the version that it needs."""
    profile = fabric(plugins=(PLUGIN,), host_wins=("libfab.so.1",))
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libmpi.so.40": []})
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1"])
    image.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1", "FAB_2"])
    image.library(f"{LIB}/libmpi.so.40", "libmpi.so.40", needs={"libfab.so.1": ["FAB_1"]})
    assert allowed(host, image, profile) == [PLUGIN, "libfab.so.1"]
    image.library(f"{LIB}/libmpi.so.40", "libmpi.so.40", needs={"libfab.so.1": ["FAB_1", "FAB_2"]})
    why = refusal(host, image, profile)
    assert (why.library, why.needs, why.needed_by) == (f"{LIB}/libfab.so.1", "FAB_2", f"{image.at(LIB)}/libmpi.so.40")
    assert "the image's libfab.so.1" in why.wrong
    assert trees.opened("libmpi.so.40", host.at(LIB), image.at(LIB)) != ""
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1", "FAB_2"])
    assert allowed(host, image, profile) == [PLUGIN, "libfab.so.1"]


def test_a_library_that_has_to_be_the_hosts_and_is_not_there(host: Tree, image: Tree) -> None:
    image.library(f"{LIB}/libfab.so.1", "libfab.so.1")
    why = refusal(host, image, fabric(net="x", host_wins=("libfab.so.1",)))
    assert why.needs == "libfab.so.1"
    assert "it has to come from the host" in why.wrong


def test_a_plugin_that_has_to_be_the_hosts_is(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}")
    assert allowed(host, image, fabric(plugins=(PLUGIN,), host_wins=(PLUGIN,))) == [PLUGIN]


@pytest.mark.parametrize(
    ("versions", "is_allowed"), [((4, 5), False), ((13,), False), ((5, 6), True), ((12, 13), True)]
)
def test_a_plugin_of_versions_that_nccl_does_not_open(
    host: Tree, image: Tree, versions: tuple[int, ...], is_allowed: bool
) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", versions)
    if is_allowed:
        assert allowed(host, image) == [PLUGIN]
        return
    why = refusal(host, image)
    assert (why.library, why.needed_by, why.needs) == (f"{LIB}/{PLUGIN}", "NCCL", "ncclNetPlugin_v6 to v12")
    assert ", ".join(f"ncclNetPlugin_v{version}" for version in versions) in why.wrong


def test_a_library_that_is_no_nccl_plugin(host: Tree, image: Tree) -> None:
    host.library(f"{LIB}/{PLUGIN}")
    assert "no ncclNetPlugin_vN" in refusal(host, image).wrong


def test_a_host_without_the_plugin(host: Tree, image: Tree) -> None:
    """Without it NCCL would fall back to TCP silently; if NCCL supports the fabric itself, the plugin is not needed."""
    profile = fabric("Slingshot", plugins=("libnccl-net-ofi.so", PLUGIN), search=("/opt/ofi/lib",))
    why = refusal(host, image, profile)
    assert (why.needs, why.needed_by) == (f"libnccl-net-ofi.so or {PLUGIN}", "NCCL")
    assert "Slingshot" in why.wrong
    assert "/opt/ofi/lib" in why.wrong
    assert allowed(host, image, fabric(net="IB", plugins=(PLUGIN,))) == []


def rdma(tree: Tree, private: int, newest: str) -> None:
    own = f"IBVERBS_PRIVATE_{private}"
    tree.library(f"{LIB}/libibverbs.so.1", "libibverbs.so.1", ["IBVERBS_1.0", newest, own])
    tree.library(f"{LIB}/librdmacm.so.1", "librdmacm.so.1", ["RDMACM_1.0"], {"libibverbs.so.1": [own]})
    tree.library(f"{LIB}/libibverbs/libmlx5-rdmav{private}.so", "libmlx5.so.1", [], {"libibverbs.so.1": [own]})


@pytest.mark.parametrize("missing", ["librdmacm.so.1", "libibverbs"])
def test_a_set_of_which_the_host_has_a_half(host: Tree, image: Tree, missing: str) -> None:
    profile = fabric(plugins=(PLUGIN,), sets=(SET,))
    rdma(host, 50, "IBVERBS_1.14")
    rdma(image, 34, "IBVERBS_1.13")
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libibverbs.so.1": ["IBVERBS_1.14"], "librdmacm.so.1": ["RDMACM_1.0"]})
    assert "librdmacm.so.1" in allowed(host, image, profile)
    gone = host.at(f"{LIB}/{missing}")
    for path in sorted(gone.iterdir()) if gone.is_dir() else [gone]:
        path.unlink()
    why = refusal(host, image, profile)
    assert missing in why.seen
    assert "libibverbs.so.1" in why.seen


def test_a_half_that_nobody_uses_is_not_missed(host: Tree, image: Tree) -> None:
    """As in Mellanox's packages, which lack libmlx4: the image's copy can't be loaded then, but nothing loads it."""
    profile = fabric(plugins=(PLUGIN,), sets=((*SET, "libmlx4.so.1"),))
    rdma(host, 50, "IBVERBS_1.14")
    rdma(image, 34, "IBVERBS_1.13")
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libibverbs.so.1": ["IBVERBS_1.14"]})
    needs = {"libibverbs.so.1": ["IBVERBS_PRIVATE_34"]}
    image.library(f"{LIB}/libmlx4.so.1", "libmlx4.so.1", ["MLX4_1.0"], needs)
    assert "libibverbs.so.1" in allowed(host, image, profile)
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libibverbs.so.1": ["IBVERBS_1.14"], "libmlx4.so.1": ["MLX4_1.0"]})
    assert "libmlx4.so.1" in refusal(host, image, profile).needed_by


def test_a_provider_of_another_version_than_its_library(host: Tree, image: Tree) -> None:
    """As after an update of one of the two packages."""
    profile = fabric(plugins=(PLUGIN,), sets=(SET,))
    rdma(host, 50, "IBVERBS_1.14")
    rdma(image, 34, "IBVERBS_1.13")
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libibverbs.so.1": ["IBVERBS_1.14"]})
    path = f"{LIB}/libibverbs/libmlx5-rdmav34.so"
    host.library(path, "libmlx5-rdmav34.so", [], {"libibverbs.so.1": ["IBVERBS_PRIVATE_34"]})
    why = refusal(host, image, profile)
    assert (why.library, why.needs) == (path, "IBVERBS_PRIVATE_34")


def test_all_reasons_are_told_at_once(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", [3], needs={"libfab.so.1": ["FAB_1"], "libnone.so.1": [], "libarm.so.1": []})
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_0"], {"libc.so.6": ["GLIBC_2.99"]})
    image.library(f"{LIB}/libc.so.6", "libc.so.6", ["GLIBC_2.36"])
    trees.as_machine(host.library(f"{LIB}/libarm.so.1", "libarm.so.1"), trees.FOREIGN)
    plan = planned(host, image)
    machine = own_machine()
    assert {refusal.needs for refusal in plan.refusals} == {
        *("ncclNetPlugin_v6 to v12", machine, "libnone.so.1", "FAB_1", "GLIBC_2.99")
    }
    assert plan.injected == ()


def test_names_of_the_host_that_are_hostile_stay_names(host: Tree, image: Tree, tmp_path: Path) -> None:
    folder = "/opt/a b'\"$(touch x)`y`\n;/lib"
    host.plugin(f"{folder}/{PLUGIN}", needs={"libfab.so.1": ["FAB_1"]}, options=["-rpath", "$ORIGIN"])
    host.library(f"{folder}/libfab.so.1", "libfab.so.1", ["FAB_1"])
    host.file(b"/opt/\xff\xfe/lib/x".decode("utf-8", "surrogateescape"))
    profile = fabric(plugins=(PLUGIN,), search=("/opt/*/lib",))
    plan = planned(host, image, profile)
    assert [injected.path for injected in plan.injected] == [f"{folder}/{PLUGIN}", f"{folder}/libfab.so.1"]
    assert any("no UTF-8" in note for note in plan.notes)
    made = trees.links(tmp_path / "links", host.root, {one.soname: one.path for one in plan.injected})
    assert trees.opened(PLUGIN, made) == ""
