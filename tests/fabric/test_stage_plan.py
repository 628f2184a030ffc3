"""Plans with all libraries that they need, on hosts and images of compiled libraries; allowed ones are opened."""

import pytest

from muster.entrypoint.fabric.stage import FabricPlan
from muster.entrypoint.sites.schema import Devices, Fabric, Fact, Libraries, When
from tests.fabric import trees
from tests.fabric.trees import Tree, fabric, fact

LIB = "/usr/lib64"
PLUGIN = "libnccl-net.so"


def planned(host: Tree, image: Tree, profile: Fabric, nodes: int = 2, libraries: Libraries | None = None) -> FabricPlan:
    return trees.planned(host.root, image.as_image(), profile, nodes, libraries)


def names(plan: FabricPlan) -> dict[str, str]:
    assert plan.refusals == ()
    return {injected.soname: injected.path for injected in plan.injected}


def says(plan: FabricPlan, host: Tree, image: Tree, name: str = PLUGIN) -> str:
    """The loader's error for the library `name`, with the injected libraries and the image's in the plan's order."""
    folders = host.root.parent / "wins", host.root.parent / "last"
    for folder, wins in zip(folders, (True, False), strict=True):
        chosen = {injected.soname: injected.path for injected in plan.injected if injected.wins is wins}
        trees.links(folder, host.root, chosen)
    return trees.opened(name, folders[0], image.at(LIB), folders[1])


def test_the_plugin_comes_with_all_that_it_needs_and_the_image_lacks(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": ["FAB_1.0"], "libnl.so.3": []})
    host.library("/opt/fab/lib/libfab.so.1.2", "libfab.so.1", ["FAB_1.0"], {"libdeep.so.1": []})
    host.link("/opt/fab/lib/libfab.so.1", "libfab.so.1.2")
    host.library(f"{LIB}/libdeep.so.1", "libdeep.so.1", needs={"libfab.so.1": ["FAB_1.0"]})
    host.library(f"{LIB}/libnl.so.3", "libnl.so.3")
    image.library(f"{LIB}/libnl.so.3", "libnl.so.3")
    plan = planned(host, image, fabric(plugins=(PLUGIN,), search=("/opt/*/lib",)))
    assert names(plan) == {
        PLUGIN: f"{LIB}/{PLUGIN}",
        "libfab.so.1": "/opt/fab/lib/libfab.so.1.2",
        "libdeep.so.1": f"{LIB}/libdeep.so.1",
    }
    assert (plan.plugin, plan.net) == (PLUGIN, "Libfabric")
    assert [injected.needed_by for injected in plan.injected] == [
        "NCCL",
        f"{LIB}/{PLUGIN}",
        "/opt/fab/lib/libfab.so.1.2",
    ]
    assert not any(injected.wins for injected in plan.injected)
    assert says(plan, host, image) == ""


@pytest.mark.parametrize("option", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_library_is_looked_for_where_the_one_that_needs_it_says(host: Tree, image: Tree, option: str) -> None:
    host.plugin(
        f"/opt/net/{PLUGIN}",
        needs={"libfab.so.1": ["FAB_1.0"]},
        options=[option, "-rpath", "$ORIGIN/../fab/lib:/opt/none"],
    )
    host.library("/opt/fab/lib/libfab.so.1", "libfab.so.1", ["FAB_1.0"])
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_0.9"])
    plan = planned(host, image, fabric(plugins=(PLUGIN,), search=("/opt/net",)))
    assert names(plan)["libfab.so.1"] == "/opt/fab/lib/libfab.so.1"
    assert says(plan, host, image) == ""


def test_folders_of_the_profile_go_before_the_hosts_cache_and_that_before_default_folders(
    host: Tree, image: Tree
) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libone.so.1": [], "libtwo.so.1": [], "libthree.so.1": []})
    for folder in ("/opt/first", "/srv/second", LIB):
        for name in {"/opt/first": ["one"], "/srv/second": ["one", "two"]}.get(folder, ["one", "two", "three"]):
            host.library(f"{folder}/lib{name}.so.1", f"lib{name}.so.1")
    host.cache({f"lib{name}.so.1": f"/srv/second/lib{name}.so.1" for name in ("one", "two")})
    plan = planned(host, image, fabric(plugins=(PLUGIN,), search=("/opt/first",)))
    assert [names(plan)[f"lib{name}.so.1"] for name in ("one", "two", "three")] == [
        "/opt/first/libone.so.1",
        "/srv/second/libtwo.so.1",
        f"{LIB}/libthree.so.1",
    ]
    assert says(plan, host, image) == ""


def test_what_is_the_images_or_the_drivers_never_comes_from_the_host(host: Tree, image: Tree) -> None:
    kept = ["libc.so.6", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "libnccl.so.2", "ld-linux-x86-64.so.2"]
    cuda = ["libcuda.so.1", "libnvidia-ml.so.1"]
    for name in (*kept, *cuda, "libcudart.so.13", "libcudart.so.12"):
        host.library(f"{LIB}/{name}", name, ["V_1"])
    for name in (*kept, "libcudart.so.13"):
        image.library(f"{LIB}/{name}", name, ["V_1"])
    needs = {name: ["V_1"] for name in (*kept, *cuda, "libcudart.so.13", "libcudart.so.12")}
    host.plugin(f"{LIB}/{PLUGIN}", needs=needs)
    plan = planned(host, image, fabric(plugins=(PLUGIN,), roots=("libc.so.6", "libcuda.so.1")))
    assert list(names(plan)) == [PLUGIN, "libcudart.so.12"]


def test_an_image_with_what_the_root_needs_gets_nothing(host: Tree, image: Tree) -> None:
    for tree in (host, image):
        tree.library(f"{LIB}/libibverbs.so.1", "libibverbs.so.1", ["IBVERBS_1.0"])
    plan = planned(host, image, fabric(net="IB", roots=("libibverbs.so.1",)))
    assert (plan.injected, plan.refusals, plan.plugin, plan.net) == ((), (), None, "IB")


def test_the_hosts_copy_wins_where_the_images_is_too_old(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": ["FAB_1.2"]})
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1.0", "FAB_1.1", "FAB_1.2"])
    image.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1.0", "FAB_1.1"])
    image.library(f"{LIB}/libuser.so.1", "libuser.so.1", needs={"libfab.so.1": ["FAB_1.0"]})
    plan = planned(host, image, fabric(plugins=(PLUGIN,)))
    assert {injected.soname: injected.wins for injected in plan.injected} == {PLUGIN: False, "libfab.so.1": True}
    assert says(plan, host, image) == ""
    assert trees.opened("libuser.so.1", host.root.parent / "wins", image.at(LIB)) == ""


def test_the_hosts_copy_wins_where_the_profile_says_so_though_the_images_would_do(host: Tree, image: Tree) -> None:
    for tree in (host, image):
        tree.library(f"{LIB}/libfab.so.1", "libfab.so.1", ["FAB_1.0"], {"libcxi.so.1": []} if tree is host else {})
    host.library(f"{LIB}/libcxi.so.1", "libcxi.so.1")
    plan = planned(host, image, fabric(net="x", host_wins=("libfab.so.1",)))
    assert {injected.soname: injected.wins for injected in plan.injected} == {
        "libfab.so.1": True,
        "libcxi.so.1": False,
    }
    assert says(plan, host, image, "libfab.so.1") == ""


def test_of_two_plugins_the_first_named_is_taken(host: Tree, image: Tree) -> None:
    profile = fabric(plugins=("libnccl-net-ofi.so", PLUGIN), search=("/opt/a", "/opt/*/lib"))
    host.plugin(f"/opt/b/lib/{PLUGIN}")
    assert names(planned(host, image, profile)) == {PLUGIN: f"/opt/b/lib/{PLUGIN}"}
    host.plugin("/opt/c/lib/libnccl-net-ofi.so")
    host.plugin(f"/opt/a/{PLUGIN}")
    assert names(planned(host, image, profile)) == {"libnccl-net-ofi.so": "/opt/c/lib/libnccl-net-ofi.so"}


def test_a_plugin_in_the_hosts_cache_is_found_there(host: Tree, image: Tree) -> None:
    host.plugin(f"/srv/lib/{PLUGIN}")
    host.cache({PLUGIN: f"/srv/lib/{PLUGIN}"})
    assert names(planned(host, image, fabric(plugins=(PLUGIN,)))) == {PLUGIN: f"/srv/lib/{PLUGIN}"}


def test_what_wins_can_make_others_win(host: Tree, image: Tree) -> None:
    """libfab is too old in the image; the host's needs a newer libnl than the image's; and that a newer libdeep."""
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": ["FAB_2"]})
    chain = {"libfab.so.1": ("FAB", "libnl.so.3", "NL"), "libnl.so.3": ("NL", "libdeep.so.1", "DEEP")}
    for name, (mine, other, theirs) in chain.items():
        host.library(f"{LIB}/{name}", name, [f"{mine}_1", f"{mine}_2"], {other: [f"{theirs}_2"]})
        image.library(f"{LIB}/{name}", name, [f"{mine}_1"], {other: [f"{theirs}_1"]})
    host.library(f"{LIB}/libdeep.so.1", "libdeep.so.1", ["DEEP_1", "DEEP_2"])
    image.library(f"{LIB}/libdeep.so.1", "libdeep.so.1", ["DEEP_1"])
    plan = planned(host, image, fabric(plugins=(PLUGIN,)))
    assert [injected.soname for injected in plan.injected if injected.wins] == [*chain, "libdeep.so.1"]
    assert says(plan, host, image) == ""


def verbs(tree: Tree, private: int, newest: str) -> None:
    """Adds an rdma-core whose parts only fit each other."""
    own = f"IBVERBS_PRIVATE_{private}"
    tree.library(f"{LIB}/libibverbs.so.1", "libibverbs.so.1", ["IBVERBS_1.0", newest, own])
    tree.library(f"{LIB}/librdmacm.so.1", "librdmacm.so.1", ["RDMACM_1.0"], {"libibverbs.so.1": [own]})
    tree.library(f"{LIB}/libmlx5.so.1", "libmlx5.so.1", ["MLX5_1.0"], {"libibverbs.so.1": [own]})
    tree.link(f"{LIB}/libibverbs/libmlx5-rdmav{private}.so", "../libmlx5.so.1")
    tree.file("/etc/libibverbs.d/mlx5.driver", "driver mlx5\n")


SET = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "/usr/lib*/libibverbs")


def test_a_set_comes_as_a_whole_with_what_its_library_opens_by_itself(host: Tree, image: Tree) -> None:
    verbs(host, 50, "IBVERBS_1.14")
    verbs(image, 34, "IBVERBS_1.13")
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libibverbs.so.1": ["IBVERBS_1.14"]})
    plan = planned(host, image, fabric(plugins=(PLUGIN,), sets=(SET,), files=("/etc/libibverbs.d",)))
    assert names(plan) == {
        PLUGIN: f"{LIB}/{PLUGIN}",
        "libibverbs.so.1": f"{LIB}/libibverbs.so.1",
        "librdmacm.so.1": f"{LIB}/librdmacm.so.1",
        "libmlx5-rdmav50.so": f"{LIB}/libmlx5.so.1",
        "libmlx5.so.1": f"{LIB}/libmlx5.so.1",
    }
    assert plan.files == ("/etc/libibverbs.d",)
    assert says(plan, host, image) == ""
    wins, last = host.root.parent / "wins", host.root.parent / "last"
    for name in ("librdmacm.so.1", "libmlx5-rdmav50.so", "libmlx5.so.1"):
        assert trees.opened(name, wins, image.at(LIB), last) == ""


def test_a_set_that_nobody_needs_of_the_host_stays_the_images(host: Tree, image: Tree) -> None:
    verbs(host, 50, "IBVERBS_1.14")
    verbs(image, 34, "IBVERBS_1.13")
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libibverbs.so.1": ["IBVERBS_1.0"]})
    plan = planned(
        host, image, fabric(plugins=(PLUGIN,), roots=("libibverbs.so.1",), sets=(SET,), files=("/etc/libibverbs.d",))
    )
    assert list(names(plan)) == [PLUGIN]
    assert plan.files == ()
    assert says(plan, host, image) == ""


def test_variables_and_net_hold_under_their_conditions(host: Tree, image: Tree) -> None:
    several = When(nodes=">1")
    profile = Fabric(
        title="x",
        status="documented",
        is_rdma=True,
        net=Fact(value="IB", source="s"),
        variables={
            "ALWAYS": Fact(value="$(id) 'x'", source="s"),
            "SEVERAL": Fact(value="1", source="s", when=several),
        },
    )
    assert planned(host, image, profile, nodes=2).variables == {"ALWAYS": "$(id) 'x'", "SEVERAL": "1"}
    assert planned(host, image, profile, nodes=1).variables == {"ALWAYS": "$(id) 'x'"}


def test_a_plugin_whose_name_can_not_be_read_is_noted(host: Tree, image: Tree) -> None:
    source = """
.bss
.globl ncclNetPlugin_v8
.type ncclNetPlugin_v8, %object
ncclNetPlugin_v8: .skip 168
.size ncclNetPlugin_v8, 168
"""
    host.library(f"{LIB}/{PLUGIN}", source=source)
    plan = planned(host, image, fabric(plugins=(PLUGIN,)))
    assert (plan.net, list(names(plan))) == (None, [PLUGIN])
    assert any("unless NCCL_NET is set" in note for note in plan.notes)


def test_of_several_versions_the_newest_is_taken_unless_the_site_has_a_default(host: Tree, image: Tree) -> None:
    for version in ("1.3.0", "1.22.0", "1.15.2"):
        host.library(f"/opt/fab/{version}/lib/libfab.so.1", "libfab.so.1")
    profile = fabric(net="x", roots=("libfab.so.1",), search=("/opt/fab/*/lib",))
    assert names(planned(host, image, profile)) == {"libfab.so.1": "/opt/fab/1.22.0/lib/libfab.so.1"}
    host.link("/opt/fab/default", "1.15.2")
    assert names(planned(host, image, profile)) == {"libfab.so.1": "/opt/fab/1.15.2/lib/libfab.so.1"}


def test_a_file_that_is_damaged_is_passed_over_with_a_note(host: Tree, image: Tree) -> None:
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libfab.so.1": []})
    whole = host.library(f"{LIB}/libfab.so.1", "libfab.so.1").read_bytes()
    host.file("/opt/fab/libfab.so.1", whole[: len(whole) // 2])
    plan = planned(host, image, fabric(plugins=(PLUGIN,), search=("/opt/fab",)))
    assert names(plan)["libfab.so.1"] == f"{LIB}/libfab.so.1"
    assert "left out: /opt/fab/libfab.so.1 can't be read as a shared object" in plan.notes


def test_files_folders_and_devices_are_those_that_the_host_has(host: Tree, image: Tree) -> None:
    for name in ("/dev/infiniband/uverbs0", "/dev/gdrdrv", "/run/cxi/x", "/etc/fab/a b;$(id).conf"):
        host.file(name)
    profile = Fabric(
        title="x",
        status="documented",
        is_rdma=True,
        devices=Devices(needed=fact("/dev/infiniband/*", "/dev/gdrdrv", "/dev/xpmem"), folders=fact("/run/cxi", "/no")),
        libraries=Libraries(files=fact("/etc/fab/*.conf", "/etc/none"), roots=fact("libfab.so.1")),
    )
    image.library(f"{LIB}/libfab.so.1", "libfab.so.1")
    # Settings files are taken only with the host's libraries.
    assert planned(host, image, profile).files == ("/run/cxi",)
    image.at(f"{LIB}/libfab.so.1").unlink()
    host.library(f"{LIB}/libfab.so.1", "libfab.so.1")
    plan = planned(host, image, profile)
    assert plan.devices == ("/dev/infiniband/uverbs0", "/dev/gdrdrv")
    assert plan.files == ("/etc/fab/a b;$(id).conf", "/run/cxi")


def test_what_a_site_sets_takes_the_place_of_the_profiles_and_no_more(host: Tree, image: Tree) -> None:
    host.plugin("/opt/theirs/libnccl-net-ofi.so")
    host.plugin("/opt/site/libnccl-net-ofi.so")
    profile = fabric(plugins=("libnccl-net-ofi.so",), search=("/opt/theirs",))
    site = Libraries(search=fact("/opt/site"))
    assert names(planned(host, image, profile)) == {"libnccl-net-ofi.so": "/opt/theirs/libnccl-net-ofi.so"}
    assert names(planned(host, image, profile, libraries=site)) == {
        "libnccl-net-ofi.so": "/opt/site/libnccl-net-ofi.so"
    }


def test_a_soname_that_is_a_path_is_no_name_of_a_link(host: Tree, image: Tree) -> None:
    """The name of a link in the container must not lead out of its folder."""
    host.plugin(f"{LIB}/{PLUGIN}", needs={"libevil.so.1": []})
    host.library(f"{LIB}/libevil.so.1", "../../../etc/evil.so")
    plan = planned(host, image, fabric(plugins=(PLUGIN,)))
    assert names(plan) == {PLUGIN: f"{LIB}/{PLUGIN}", "libevil.so.1": f"{LIB}/libevil.so.1"}
