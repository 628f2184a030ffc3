"""The options that bring the host's files into a container: read by a real shell, whatever the files are called."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from muster.entrypoint.fabric import Need, stage
from muster.entrypoint.fabric.find import Finding
from muster.entrypoint.fabric.stage import FabricPlan, Injected
from muster.errors import MusterError
from tests.fabric import nodes

LIBRARIES = [
    f"{nodes.FOLDER}/libnccl-net.so:/opt/fabric/lib/libnccl-net.so:ro",
    f"{nodes.FOLDER}/libfabric.so.1.25.0:/opt/fabric/lib/libfabric.so.1:ro",
    f"{nodes.FOLDER}/libcxi.so.1.5.0:/opt/fabric/lib/libcxi.so.1:ro",
]

# A shell would act on each of these if it were not quoted.
HOSTILE = [
    "two words", "it's", 'a "quoted" one', "$(touch TRAP)", "`touch TRAP`", "a;touch TRAP", "a|touch TRAP", "$HOME",
    "a&touch TRAP", "*", "~", "-o", "#", "back\\slash", "new\nline", "a>TRAP", "!!", "ünïcode",
]  # fmt: skip


def settings(plan: FabricPlan, num_nodes: int = 2, **env: str) -> Mapping[str, str]:
    return stage.settings(plan, env, Need(num_nodes, uses_nccl=True)).variables


def printed(plan: FabricPlan, engine: str) -> str:
    return stage.engine_options(plan, settings(plan), engine)


def words(text: str, folder: Path) -> list[str]:
    """The words that a real shell makes of `text` in `eval "COMMAND $(...)"`; asserts that it leaves `folder` empty."""
    folder.mkdir(exist_ok=True)
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    script = "eval \"python3 -c '$PROGRAM' $(cat)\""
    done = subprocess.run(
        ["sh", "-c", script], input=text, env={"PATH": "/usr/bin:/bin", "PROGRAM": program}, cwd=folder,
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def options(found: list[str], name: str) -> list[str]:
    """The values of an option, in order."""
    return [value for option, value in pairwise(found) if option == name]


def test_apptainer_gets_files_one_by_one_and_variables(tmp_path: Path) -> None:
    found = words(printed(nodes.planned(tmp_path), "apptainer"), tmp_path / "empty")
    assert options(found, "--bind") == LIBRARIES
    assert set(options(found, "--env")) == {
        "FI_CXI_RX_MATCH_MODE=hybrid",
        "LD_LIBRARY_PATH=/opt/fabric/lib",
        "MUSTER_FABRIC=slingshot",
        "NCCL_NET=Libfabric",
        "NCCL_NET_PLUGIN=/opt/fabric/lib/libnccl-net.so",
        "NCCL_SOCKET_IFNAME=hsn",
    }
    assert len(found) == 2 * (3 + 6)


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_docker_and_podman_get_devices_and_limits_too(tmp_path: Path, engine: str) -> None:
    plan = nodes.planned(tmp_path, devices=("/dev/cxi0", "/dev/xpmem"))
    found = words(printed(plan, engine), tmp_path / "empty")
    assert options(found, "--volume") == LIBRARIES
    assert options(found, "--device") == ["/dev/cxi0", "/dev/xpmem"]
    assert (options(found, "--ulimit"), options(found, "--cap-add")) == (["memlock=-1"], ["IPC_LOCK"])
    assert {"--ipc=host", "--network=host"} <= set(found)
    assert "NCCL_NET=Libfabric" in options(found, "--env")
    tcp = nodes.planned(tmp_path, finding=Finding(tmp_path, "tcp", "it was asked for"))
    assert "--ulimit" not in words(printed(tcp, engine), tmp_path / "empty")


@pytest.mark.parametrize("name", HOSTILE)
def test_names_come_back_intact_and_nothing_runs(tmp_path: Path, name: str) -> None:
    path = f"/opt/{name}/lib.so"
    injected = (Injected("lib.so", path, "x"),)
    plan = nodes.planned(
        tmp_path, injected=injected, plugin=None, variables={"MINE": name}, devices=(f"/dev/{name}",), files=(path,)
    )
    found = words(printed(plan, "docker"), tmp_path / "empty")
    assert options(found, "--volume") == [f"{path}:/opt/fabric/lib/lib.so:ro", f"{path}:{path}:ro"]
    assert options(found, "--device") == [f"/dev/{name}"]
    assert f"MINE={name}" in options(found, "--env")
    if set("\\\n") & set(name):
        with pytest.raises(MusterError, match="can't be passed"):
            printed(plan, "apptainer")
        return
    plain = replace(plan, variables={})
    assert options(words(printed(plain, "apptainer"), tmp_path / "empty"), "--bind")[0].startswith(path)


@pytest.mark.parametrize(
    ("engine", "name"), [("docker", "a:b"), ("podman", "a:b"), ("apptainer", "a:b"), ("apptainer", "a,b")]
)
def test_names_that_an_engine_can_not_take_are_refused(tmp_path: Path, engine: str, name: str) -> None:
    plan = nodes.planned(tmp_path, injected=(Injected("lib.so", f"/opt/{name}/lib.so", "x"),), plugin=None)
    with pytest.raises(MusterError) as refused:
        printed(plan, engine)
    assert name in refused.value.seen
    assert "/:/host:ro" in refused.value.fix


@pytest.mark.parametrize("value", ["$(id)", "`id`", "a\\b", "a\nb"])
def test_apptainer_would_evaluate_such_a_value(tmp_path: Path, value: str) -> None:
    with pytest.raises(MusterError, match="evaluate"):
        printed(nodes.planned(tmp_path, variables={"MINE": value}), "apptainer")


def test_the_images_own_library_path_stays_before_the_hosts(tmp_path: Path) -> None:
    found = settings(nodes.planned(tmp_path), LD_LIBRARY_PATH="/usr/local/nvidia/lib64")
    assert found["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64:/opt/fabric/lib"


def test_one_node_is_not_held_to_the_network(tmp_path: Path) -> None:
    assert "NCCL_NET" not in settings(nodes.planned(tmp_path), 1)
