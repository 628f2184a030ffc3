"""The fabric of a launch. The libraries are stand-ins, which are really opened; NCCL does not use them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.entrypoint.fabric import Need, find, launch, stage
from muster.entrypoint.fabric.launch import Mounts
from muster.entrypoint.launch.program import Additions, Program
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from muster.variables import LaunchVariable
from tests.fabric import nodes

FOUND = LaunchVariable.FABRIC_FOUND
SEVERAL = Need(num_nodes=2, uses_nccl=True)
ONE, ON_CPU = Need(num_nodes=1, uses_nccl=True), Need(num_nodes=2, uses_nccl=False)
NAMED = replace(ONE, wanted="slingshot")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "tmp"), "LOADED": str(tmp_path / "loaded")}


def mounts(folder: Path, host: Path | None = None, *, has_device: bool = True) -> Mounts:
    """A container with the host's devices, where `host` is mounted, and with no libraries of a fabric."""
    if host is not None and has_device:
        (folder / "own/dev").mkdir(parents=True, exist_ok=True)
        (folder / "own/dev/cxi0").touch()
    return Mounts(host or folder / "nothing", folder / "bound", folder / "own")


def verbs(root: Path, state: str = "4: ACTIVE", layer: str = "InfiniBand", *, has_files: bool = True) -> None:
    """Gives a root one device of InfiniBand or RoCE."""
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")
    (root / "sys/class/infiniband/mlx5_0/node_type").write_text("1: CA\n")
    if has_files:
        (root / "dev/infiniband").mkdir(parents=True)
        (root / "dev/infiniband/uverbs0").touch()


def with_verbs(folder: Path, env: dict[str, str]) -> dict[str, str]:
    """`env` with a library path that has a stand-in for libibverbs."""
    nodes.library(folder / "verbs/libibverbs.so.1")
    return {**env, "LD_LIBRARY_PATH": str(folder / "verbs")}


def test_the_hosts_libraries_are_staged_proved_and_told(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    found = launch.for_need(SEVERAL, env, mounts=mounts(tmp_path, slingshot))
    assert found.notes[0] == (
        "fabric: slingshot (cxi0): libnccl-net.so, libfabric.so.1, libcxi.so.1 from the host; NCCL_NET=Libfabric"
    )
    folder = Path(found.variables["LD_LIBRARY_PATH"])
    assert found.variables["NCCL_NET_PLUGIN"] == f"{folder}/libnccl-net.so"
    assert found.variables["FI_CXI_RX_MATCH_MODE"] == "hybrid"
    assert found.variables[FOUND] == "slingshot"
    assert sorted(nodes.loaded(Path(env["LOADED"]))) == ["libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so"]


def test_more_than_three_are_counted(tmp_path: Path, env: dict[str, str]) -> None:
    root = nodes.host(tmp_path / "host")
    folder = Path(f"{root}{nodes.FOLDER}")
    others = [nodes.library(folder / f"libother{number}.so.1") for number in range(2)]
    cxi = folder / "libcxi.so.1.5.0"
    nodes.library(cxi, "", *others, soname="libcxi.so.1")
    found = launch.for_need(ONE, env, mounts=mounts(tmp_path, root))
    assert "libnccl-net.so, libfabric.so.1 and 3 more from the host" in found.notes[0]


@pytest.mark.parametrize("need", [ONE, ON_CPU], ids=["one node", "no GPUs"])
def test_nccl_net_is_not_set_where_nccl_does_not_cross_nodes(
    tmp_path: Path, env: dict[str, str], slingshot: Path, need: Need
) -> None:
    found = launch.for_need(need, env, mounts=mounts(tmp_path, slingshot))
    assert "NCCL_NET" not in found.variables
    assert found.variables["NCCL_NET_PLUGIN"]


def test_what_the_driver_needs_stays_first(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    compat = {**env, "LD_LIBRARY_PATH": "/usr/local/cuda/compat:/.singularity.d/libs"}
    found = launch.for_need(SEVERAL, compat, mounts=mounts(tmp_path, slingshot))
    first, second, ours = found.variables["LD_LIBRARY_PATH"].split(":")
    assert (first, second) == ("/usr/local/cuda/compat", "/.singularity.d/libs")
    assert ours.startswith(env["TMPDIR"])


def test_a_dry_run_makes_and_opens_nothing(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    real = launch.for_need(SEVERAL, env, mounts=mounts(tmp_path, slingshot))
    Path(env["LOADED"]).unlink()
    (tmp_path / "other").mkdir()
    other = {**env, "TMPDIR": str(tmp_path / "other")}
    dry = launch.for_need(replace(SEVERAL, is_dry=True), other, mounts=mounts(tmp_path, slingshot))
    assert os.listdir(tmp_path / "other") == []
    assert not Path(env["LOADED"]).exists()
    assert set(dry.variables) == set(real.variables)


@pytest.fixture
def unfit(tmp_path: Path) -> Path:
    """A host whose plugin needs a symbol version that no library has."""
    root = nodes.host(tmp_path / "unfit")
    folder = Path(f"{root}{nodes.FOLDER}")
    cxi = folder / "libcxi.so.1.5.0"
    script = tmp_path / "script"
    script.write_text("CXI_9 { global: cxi; };\n")
    nodes.library(cxi, "int cxi(void) { return 9; }", f"-Wl,--version-script={script}", soname="libcxi.so.1")
    use = "extern int cxi(void); int use(void) { return cxi(); }"
    plugin = nodes.PLUGIN.format(net="Libfabric")
    nodes.library(folder / "libnccl-net.so", use + plugin, folder / "libfabric.so.1.25.0", cxi)
    script.write_text("CXI_1 { global: cxi; };\n")
    nodes.library(cxi, "int cxi(void) { return 1; }", f"-Wl,--version-script={script}", soname="libcxi.so.1")
    return root


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A host whose plugin fits, as far as its file shows, but does not open."""
    root = nodes.host(tmp_path / "broken")
    folder = Path(f"{root}{nodes.FOLDER}")
    undefined = "extern int nobody_has_this; int *use(void) { return &nobody_has_this; }"
    nodes.library(
        folder / "libnccl-net.so", undefined + nodes.PLUGIN.format(net="Libfabric"), folder / "libfabric.so.1"
    )
    return root


@pytest.mark.parametrize("need", [SEVERAL, NAMED], ids=["several nodes", "named"])
@pytest.mark.parametrize(("kind", "seen"), [("unfit", "CXI_9"), ("broken", "nobody_has_this")])
def test_an_unfit_plugin_is_refused_on_several_nodes_or_if_named(
    request: pytest.FixtureRequest, tmp_path: Path, env: dict[str, str], need: Need, kind: str, seen: str
) -> None:
    root: Path = request.getfixturevalue(kind)
    with pytest.raises(MusterError) as refused:
        launch.for_need(need, env, mounts=mounts(tmp_path, root))
    assert seen in refused.value.seen
    assert "--fabric tcp" in refused.value.fix
    assert refused.value.code == 2


@pytest.mark.parametrize("need", [ONE, ON_CPU], ids=["one node", "no GPUs"])
@pytest.mark.parametrize("kind", ["unfit", "broken"])
def test_an_unfit_plugin_is_a_note_on_one_node_or_without_gpus(
    request: pytest.FixtureRequest, tmp_path: Path, env: dict[str, str], need: Need, kind: str
) -> None:
    found = launch.for_need(need, env, mounts=mounts(tmp_path, request.getfixturevalue(kind)))
    assert found.variables == {}
    assert len(found.notes) == 1
    assert found.notes[0].startswith("fabric: no library of the host is used: ")


def test_a_plugin_that_is_damaged_is_not_only_called_missing(tmp_path: Path, env: dict[str, str]) -> None:
    root = nodes.host(tmp_path / "damaged")
    plugin = Path(f"{root}{nodes.FOLDER}/libnccl-net.so")
    plugin.write_bytes(plugin.read_bytes()[:900])
    with pytest.raises(MusterError, match="the host has no network plugin") as refused:
        launch.for_need(SEVERAL, env, mounts=mounts(tmp_path, root))
    assert refused.value.seen.endswith(f"left out: {nodes.FOLDER}/libnccl-net.so can't be read as a shared object")


def test_without_a_host_one_node_is_not_looked_at(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "find", lambda *_: pytest.fail("it was looked at"))
    for need in (ONE, ON_CPU):
        assert launch.for_need(need, env, mounts=mounts(tmp_path)) == Additions()


def test_slingshot_without_its_libraries_is_refused(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "own/dev").mkdir(parents=True)
    (tmp_path / "own/dev/cxi0").touch()
    with pytest.raises(MusterError, match="silently use TCP") as refused:
        launch.for_need(SEVERAL, env, mounts=mounts(tmp_path))
    assert "--bind /:/host:ro" in refused.value.fix
    assert "--fabric tcp" in refused.value.fix
    own = launch.for_need(SEVERAL, {**env, "NCCL_NET_PLUGIN": "/opt/mine.so"}, mounts=mounts(tmp_path))
    assert "NCCL_NET_PLUGIN" not in own.variables
    assert own.variables[FOUND] == "slingshot"


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_nccl_net_is_set_for_the_images_own_verbs(tmp_path: Path, env: dict[str, str], layer: str) -> None:
    verbs(tmp_path / "own", layer=layer)
    found = launch.for_need(SEVERAL, with_verbs(tmp_path, env), mounts=mounts(tmp_path))
    assert found.variables == {"NCCL_NET": "IB", FOUND: "infiniband"}
    assert found.notes == ("fabric: infiniband (mlx5_0): the image's own libraries; NCCL_NET=IB",)


def test_verbs_without_device_files_are_refused(tmp_path: Path, env: dict[str, str]) -> None:
    verbs(tmp_path / "own", has_files=False)
    with pytest.raises(MusterError, match="device files") as refused:
        launch.for_need(SEVERAL, with_verbs(tmp_path, env), mounts=mounts(tmp_path))
    assert "--device /dev/infiniband" in refused.value.fix
    theirs = {**with_verbs(tmp_path, env), "NCCL_NET": "Socket"}
    found = launch.for_need(SEVERAL, theirs, mounts=mounts(tmp_path))
    assert "NCCL_NET=Socket is yours: it was kept" in found.notes


def test_verbs_that_do_not_open_are_refused(tmp_path: Path, env: dict[str, str]) -> None:
    verbs(tmp_path / "own")
    (tmp_path / "libibverbs.so.1").write_text("no library" * 100)
    with pytest.raises(MusterError, match="no library for it") as refused:
        launch.for_need(SEVERAL, {**env, "LD_LIBRARY_PATH": str(tmp_path)}, mounts=mounts(tmp_path))
    assert "invalid ELF header" in refused.value.seen


def test_a_port_that_is_down_is_no_fabric(tmp_path: Path, env: dict[str, str]) -> None:
    verbs(tmp_path / "own", state="1: DOWN")
    found = launch.for_need(SEVERAL, env, mounts=mounts(tmp_path))
    assert found == Additions({}, ("fabric: none: no device of a fabric; mlx5_0 is DOWN",))


def test_a_mount_without_the_hosts_devices_is_made_up_for(tmp_path: Path, env: dict[str, str]) -> None:
    """docker's --mount bind-recursive=disabled shows an empty /host/sys and /host/dev."""
    root = nodes.host(tmp_path / "host")
    (root / "dev/cxi0").unlink()
    found = launch.for_need(SEVERAL, env, mounts=mounts(tmp_path, root))
    assert found.notes[0].startswith("fabric: slingshot (cxi0): libnccl-net.so")


def test_interfaces_are_the_containers_own(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    here = mounts(tmp_path, slingshot)
    assert launch.for_need(SEVERAL, env, mounts=here).variables["NCCL_SOCKET_IFNAME"] == "hsn"
    (tmp_path / "own/sys/class/net/eth0").mkdir(parents=True)
    assert "NCCL_SOCKET_IFNAME" not in launch.for_need(SEVERAL, env, mounts=here).variables
    (tmp_path / "own/sys/class/net/hsn0").mkdir()
    assert launch.for_need(SEVERAL, env, mounts=here).variables["NCCL_SOCKET_IFNAME"] == "hsn"


def test_device_files_that_are_not_passed_are_named(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    here = replace(mounts(tmp_path, slingshot), own=tmp_path / "nothing")
    with pytest.raises(MusterError, match="device files") as refused:
        launch.for_need(SEVERAL, env, mounts=here)
    assert "--device /dev/cxi0" in refused.value.fix
    assert launch.for_need(ONE, env, mounts=here).variables["NCCL_NET_PLUGIN"]


def test_tcp_is_what_one_may_ask_for(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    for host in (None, slingshot):
        found = launch.for_need(replace(SEVERAL, wanted="tcp"), env, mounts=mounts(tmp_path, host))
        assert found.variables == {"NCCL_NET": "Socket", FOUND: "tcp"}


def test_a_fabric_that_does_not_exist_names_those_that_do(tmp_path: Path, env: dict[str, str]) -> None:
    with pytest.raises(MusterError) as refused:
        launch.for_need(replace(ONE, wanted="slingshoot"), env, mounts=mounts(tmp_path))
    assert "slingshot" in refused.value.fix


def test_bound_libraries_are_used_without_a_host(tmp_path: Path, env: dict[str, str], slingshot: Path) -> None:
    (tmp_path / "bound").mkdir()
    for name in ("libnccl-net.so", "libfabric.so.1", "libcxi.so.1"):
        (tmp_path / "bound" / name).symlink_to(f"{slingshot}{nodes.FOLDER}/{name}")
    found = launch.for_need(replace(SEVERAL, wanted="slingshot"), env, mounts=mounts(tmp_path))
    assert found.variables["NCCL_NET_PLUGIN"] == f"{tmp_path}/bound/libnccl-net.so"
    assert found.variables["NCCL_NET"] == "Libfabric"
    assert found.variables["LD_LIBRARY_PATH"] == f"{tmp_path}/bound"
    assert "libnccl-net.so" in nodes.loaded(Path(env["LOADED"]))


@pytest.mark.parametrize("words", [(), ("--device=cpu",)])
def test_a_trainer_on_the_cpu_needs_none(tmp_path: Path, env: dict[str, str], words: tuple[str, ...]) -> None:
    (tmp_path / "own/dev").mkdir(parents=True)
    (tmp_path / "own/dev/cxi0").touch()
    here = Environment({**env, "CUDA_VISIBLE_DEVICES": "0"}, host="n1")
    allocation = resolve.resolve(here, LaunchOptions(nnodes="2", node_rank=0, nproc_per_node="1"), ["train", "ddp"])
    program = Program("module", ("train", "ddp", *words), is_ours=True)
    live = replace(here, is_live=True)
    assert launch.inject(allocation, here, LaunchOptions(), program, {}, None, mounts(tmp_path)) == Additions()
    off = launch.inject(allocation, live, LaunchOptions(fabric="off"), program, {}, None, mounts(tmp_path))
    assert off == Additions({FOUND: "off"})
    if words:
        assert launch.inject(allocation, live, LaunchOptions(), program, {}, None, mounts(tmp_path)) == Additions()
    else:
        with pytest.raises(MusterError, match="Slingshot"):
            launch.inject(allocation, live, LaunchOptions(), program, {}, None, mounts(tmp_path))


def test_the_loader_is_not_asked_for_tcp(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host/etc").mkdir(parents=True)
    monkeypatch.setattr(stage, "make_plan", lambda *_: pytest.fail("it was planned"))
    assert launch.for_need(ONE, env, mounts=mounts(tmp_path, tmp_path / "host", has_device=False)) == Additions()
