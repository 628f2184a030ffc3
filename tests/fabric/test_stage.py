"""The host's libraries in a plan: linked in a private folder of this user, found by the loader, and proved to open."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from muster.entrypoint.fabric import Need, proof, stage
from muster.entrypoint.fabric.proof import Image
from muster.entrypoint.fabric.stage import Injected
from muster.errors import MusterError
from tests.entrypoint import standins
from tests.fabric import nodes
from tests.fabric.nodes import Staged

SEVERAL = Need(num_nodes=2, uses_nccl=True)
ONE = Need(num_nodes=1, uses_nccl=True)


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """The variables of a process with a temporary folder of its own."""
    (tmp_path / "tmp").mkdir()
    return {"TMPDIR": str(tmp_path / "tmp")}


def staged(root: Path, env: dict[str, str], need: Need = SEVERAL, **changes: object) -> Staged:
    return nodes.staged(nodes.planned(root, **changes), env, need)


def test_the_plugin_opens_by_what_was_staged_and_not_without(tmp_path: Path, temporary: dict[str, str]) -> None:
    found = staged(nodes.host(tmp_path / "host"), temporary)
    log = tmp_path / "loaded"
    env = {**os.environ, "LOADED": str(log)}
    plugin = found.settings.variables["NCCL_NET_PLUGIN"]
    with pytest.raises(MusterError, match="can't be loaded"):
        proof.prove(found.folder, [Path(plugin).name], Image(env))
    assert nodes.loaded(log) == []
    proof.prove(found.folder, [Path(plugin).name], Image({**env, **found.settings.variables}))
    assert sorted(nodes.loaded(log)) == ["libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so"]


def test_the_loaders_own_words_are_shown(tmp_path: Path, temporary: dict[str, str]) -> None:
    root = nodes.host(tmp_path / "host")
    found = staged(root, temporary)
    (Path(f"{root}{nodes.FOLDER}/libcxi.so.1.5.0")).unlink()
    with pytest.raises(MusterError) as refused:
        proof.prove(found.folder, found.links, Image({**os.environ, **found.settings.variables}))
    assert "libcxi.so.1: cannot open shared object file" in refused.value.seen
    assert "--fabric tcp" in refused.value.fix


@pytest.mark.parametrize(("body", "seen"), [("abort()", "SIGABRT"), ("for (;;) sleep(9)", "no answer within 1 s")])
def test_a_library_that_ends_or_holds_its_process(
    tmp_path: Path, temporary: dict[str, str], body: str, seen: str
) -> None:
    source = (
        f"#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void go(void) {{ {body}; }}"
    )
    standins.compiled(source, tmp_path / "host/lib/libbad.so")
    found = staged(tmp_path / "host", temporary, injected=(Injected("libbad.so", "/lib/libbad.so", "x"),), plugin=None)
    with pytest.raises(MusterError) as refused:
        proof.prove(found.folder, ["libbad.so"], Image(os.environ), timeout_s=1)
    assert seen in refused.value.seen


def test_the_folder_is_private_and_the_next_run_shares_it(tmp_path: Path, temporary: dict[str, str]) -> None:
    root = nodes.host(tmp_path / "host")
    first, second = staged(root, temporary), staged(root, temporary)
    assert first.folder == second.folder
    assert stat.S_IMODE(first.folder.parent.stat().st_mode) == 0o700
    assert os.listdir(temporary["TMPDIR"]) == [first.folder.parent.name]
    assert os.listdir(first.folder.parent) == [first.folder.name]
    other = staged(root, temporary, injected=nodes.planned(root).injected[:1])
    assert other.folder != first.folder


def test_nothing_is_made_before_it_is_asked_for(tmp_path: Path, temporary: dict[str, str]) -> None:
    found = nodes.staged(nodes.planned(tmp_path), temporary, SEVERAL, is_dry=True)
    assert found.settings.variables["NCCL_NET_PLUGIN"] == str(found.folder / "libnccl-net.so")
    assert os.listdir(temporary["TMPDIR"]) == []


STAGE = """
import sys
from pathlib import Path
from muster.entrypoint.fabric import stage
from tests.fabric import nodes
plan = nodes.planned(Path(sys.argv[1]))
sys.stdin.readline()
print(stage.link(plan, {"TMPDIR": sys.argv[2]}))
"""


def test_all_tasks_of_a_node_stage_at_once(tmp_path: Path, temporary: dict[str, str]) -> None:
    command = [sys.executable, "-c", STAGE, str(tmp_path / "host"), temporary["TMPDIR"]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    tasks = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for task in tasks:
        assert task.stdin
        task.stdin.write("go\n")
        task.stdin.flush()
    said = {task.communicate(timeout=240)[0].strip() for task in tasks}
    assert [task.returncode for task in tasks] == [0] * 6
    assert len(said) == 1
    assert sorted(os.listdir(said.pop())) == ["libcxi.so.1", "libfabric.so.1", "libnccl-net.so"]


@pytest.mark.parametrize("what", ["a link", "a file", "open to others"])
def test_a_folder_that_is_not_ours_alone_is_refused(tmp_path: Path, temporary: dict[str, str], what: str) -> None:
    private = nodes.staged(nodes.planned(tmp_path), temporary, SEVERAL, is_dry=True).folder.parent
    if what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        private.symlink_to(tmp_path / "elsewhere")
    elif what == "a file":
        private.touch()
    else:
        staged(tmp_path, temporary)
        private.chmod(0o777)
    with pytest.raises(MusterError, match="must be private to this user") as refused:
        staged(tmp_path, temporary)
    assert refused.value.seen == str(private)
    assert "TMPDIR=" in refused.value.fix


def test_links_that_somebody_cleaned_away_are_made_again(tmp_path: Path, temporary: dict[str, str]) -> None:
    folder = staged(tmp_path, temporary).folder
    (folder / "libcxi.so.1").unlink()
    assert staged(tmp_path, temporary).folder == folder
    assert os.readlink(folder / "libcxi.so.1") == f"{tmp_path}{nodes.FOLDER}/libcxi.so.1.5.0"


def test_a_name_that_is_taken_is_an_error(tmp_path: Path, temporary: dict[str, str]) -> None:
    folder = nodes.staged(nodes.planned(tmp_path), temporary, SEVERAL, is_dry=True).folder
    folder.parent.mkdir(mode=0o700)
    folder.touch()
    with pytest.raises(MusterError, match="no folder can be made"):
        staged(tmp_path, temporary)


@pytest.mark.parametrize("name", ["with:colon", "with blank", "with,comma", "with$ORIGIN"])
def test_a_temporary_folder_that_no_library_path_can_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    found = nodes.staged(nodes.planned(tmp_path), {"TMPDIR": str(tmp_path / name)}, SEVERAL, is_dry=True)
    assert name not in str(found.folder)


def test_the_library_path_keeps_what_is_before_it_unless_the_hosts_copy_has_to_win(tmp_path: Path) -> None:
    ours, theirs = Path("/tmp/ours"), tmp_path / "libs"
    theirs.mkdir()
    (theirs / "libfabric.so.1").touch()

    def library_path(path: str, soname: str, *, wins: bool = True) -> str:
        injected = (Injected(soname, f"/usr/lib64/{soname}", "x", wins),)
        plan = nodes.planned(tmp_path, injected=injected, plugin=None)
        return stage.settings(plan, {"LD_LIBRARY_PATH": path}, SEVERAL, ours).variables["LD_LIBRARY_PATH"]

    path = f"/usr/local/cuda/compat::{theirs}"
    assert library_path(path, "libcxi.so.1") == f"/usr/local/cuda/compat:{theirs}:/tmp/ours"
    assert library_path(path, "libfabric.so.1") == f"/tmp/ours:/usr/local/cuda/compat:{theirs}"
    assert library_path(f"/tmp/ours:{theirs}", "libfabric.so.1", wins=False) == f"{theirs}:/tmp/ours"
    assert library_path("", "libfabric.so.1") == "/tmp/ours"


def test_the_loader_takes_the_copy_that_has_to_win(tmp_path: Path, temporary: dict[str, str]) -> None:
    root = nodes.host(tmp_path / "host")
    nodes.library(tmp_path / "image/libcxi.so.1")
    env = {**os.environ, **temporary, "LD_LIBRARY_PATH": str(tmp_path / "image"), "LOADED": str(tmp_path / "loaded")}
    plan = nodes.planned(root)
    winning = tuple(Injected(each.soname, each.path, each.needed_by, wins=True) for each in plan.injected)
    for injected, copy in ((plan.injected, "libcxi.so.1"), (winning, "libcxi.so.1.5.0")):
        found = staged(root, env, injected=injected)
        (tmp_path / "loaded").unlink(missing_ok=True)
        proof.prove(found.folder, ["libnccl-net.so"], Image({**env, **found.settings.variables}))
        assert [name for name in nodes.loaded(tmp_path / "loaded") if "cxi" in name] == [copy]


def test_nccl_is_held_to_the_network_only_where_it_has_to_cross_it(tmp_path: Path, temporary: dict[str, str]) -> None:
    assert staged(tmp_path, temporary).settings.variables["NCCL_NET"] == "Libfabric"
    assert "NCCL_NET" not in staged(tmp_path, temporary, ONE).settings.variables


def test_what_the_user_set_stays_and_is_told(tmp_path: Path, temporary: dict[str, str]) -> None:
    mine = {**temporary, "NCCL_NET": "Socket", "FI_CXI_RX_MATCH_MODE": "hybrid", "NCCL_NET_PLUGIN": "mine"}
    found = staged(tmp_path, mine)
    assert not {"NCCL_NET", "FI_CXI_RX_MATCH_MODE", "NCCL_NET_PLUGIN"} & set(found.settings.variables)
    assert found.settings.notes == (
        "NCCL_NET=Socket is yours: it was kept",
        "NCCL_NET_PLUGIN=mine is yours: it was kept",
    )


@pytest.mark.parametrize(
    ("value", "fits"), [("hsn", True), ("ib", False), ("=hsn0,ib0", True), ("=hsn", False), ("^lo", True)]
)
def test_an_interface_that_is_not_here_is_not_asked_for(
    tmp_path: Path, temporary: dict[str, str], value: str, fits: bool
) -> None:
    found = staged(tmp_path, temporary, variables={"NCCL_SOCKET_IFNAME": value})
    assert ("NCCL_SOCKET_IFNAME" in found.settings.variables) == fits
    named = staged(tmp_path, temporary, Need(1, True, interface="eth0"), variables={"NCCL_SOCKET_IFNAME": value})
    assert "NCCL_SOCKET_IFNAME" not in named.settings.variables


def test_providers_of_verbs_are_named_by_their_files(tmp_path: Path, temporary: dict[str, str]) -> None:
    injected = (
        Injected("libibverbs.so.1", "/usr/lib64/libibverbs.so.1.14.48.0", "infiniband"),
        Injected("libmlx5-rdmav34.so", "/usr/lib64/libmlx5.so.1.24.48.0", "infiniband"),
        Injected("libefa-rdmav34.so", "/usr/lib64/libefa.so.1.3.48.0", "infiniband"),
    )
    found = staged(tmp_path, temporary, injected=injected, plugin=None)
    assert found.settings.variables["IBV_DRIVERS"] == f"{found.folder}/libmlx5:{found.folder}/libefa"
    theirs = staged(tmp_path, {**temporary, "RDMAV_DRIVERS": "mlx5"}, injected=injected, plugin=None)
    assert "IBV_DRIVERS" not in theirs.settings.variables


def test_links_lead_somewhere_though_the_root_is_relative(
    tmp_path: Path, temporary: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.host(tmp_path / "host")
    monkeypatch.chdir(tmp_path)
    found = staged(Path("host"), temporary)
    assert [name for name in found.links if not (found.folder / name).exists()] == []


def test_a_temporary_folder_that_can_not_be_looked_at(tmp_path: Path) -> None:
    found = nodes.staged(nodes.planned(tmp_path), {"TMPDIR": "/" + "x" * 300}, SEVERAL, is_dry=True)
    assert "xxx" not in str(found.folder)
