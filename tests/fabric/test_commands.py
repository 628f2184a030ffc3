"""`muster fabric find, plan, binds, check`, and a launch with a host mounted, as processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from muster.paths import ROOT
from tests.entrypoint.conftest import clean_environment
from tests.entrypoint.test_cli import three_lines
from tests.fabric import nodes
from tests.fabric.test_stage_binds import LIBRARIES, options, words

pytestmark = pytest.mark.process

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# The whole command, with other mount points: a test must not change /host and /opt.
COMMAND = """
import functools, sys
from pathlib import Path
from muster.entrypoint import cli
from muster.entrypoint.fabric import launch
mounts = launch.Mounts(Path({host!r}), Path({nothing!r}), Path({nothing!r}))
launch.inject = functools.partial(launch.inject, mounts=mounts)
sys.argv = {argv!r}
getattr(cli, sys.argv[0])()
"""


@pytest.fixture
def run(slingshot: Path, tmp_path: Path) -> Run:
    """Runs a command where `host` is mounted, to its end or the deadline."""
    (tmp_path / "tmp").mkdir()

    def start(
        *argv: str, host: Path = slingshot, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        code = COMMAND.format(host=str(host), nothing=str(tmp_path / "nothing"), argv=list(argv))
        own = {
            "TMPDIR": str(tmp_path / "tmp"),
            "LOADED": str(tmp_path / "loaded"),
            "MUSTER_SITE": "off",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**clean_environment(), **own, **(env or {})},
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    return start


def fabric(run: Run, slingshot: Path, *words: str, **changes: object) -> "subprocess.CompletedProcess[str]":
    return run("muster", "fabric", words[0], f"--root={slingshot}", *words[1:], **changes)


def test_find_shows_what_there_is(run: Run, slingshot: Path) -> None:
    done = fabric(run, slingshot, "find")
    assert done.returncode == 0, done.stderr
    for word in ("slingshot", "cxi0", "hsn0"):
        assert word in done.stdout
    found = json.loads(fabric(run, slingshot, "find", "--json").stdout)
    assert found["devices"] == [{"name": "cxi0", "kind": "slingshot", "path": "/dev/cxi0", "state": ""}]


def test_control_characters_in_names_of_the_host_are_escaped(run: Run, tmp_path: Path) -> None:
    name = "mlx5\x1b[31m_0"
    (tmp_path / "host/etc").mkdir(parents=True)
    (tmp_path / f"host/sys/class/infiniband/{name}").mkdir(parents=True)
    (tmp_path / f"host/sys/class/net/{name}").mkdir(parents=True)
    done = fabric(run, tmp_path / "host", "find")
    assert "\x1b" not in done.stdout
    assert r"mlx5\x1b[31m_0" in done.stdout


def test_plan_shows_what_the_container_gets(run: Run, slingshot: Path) -> None:
    done = fabric(run, slingshot, "plan")
    assert done.returncode == 0, done.stderr
    for word in ("slingshot", "cxi0", "hsn0", "libfabric.so.1", "libnccl-net.so", "libcxi.so.1"):
        assert word in done.stdout
    found = json.loads(fabric(run, slingshot, "plan", "--json", "--nodes=1").stdout)
    assert [each["soname"] for each in found["injected"]] == ["libnccl-net.so", "libfabric.so.1", "libcxi.so.1"]
    assert found["plugin"] == "libnccl-net.so"
    assert found["finding"]["devices"] == [{"name": "cxi0", "kind": "slingshot", "path": "/dev/cxi0", "state": ""}]
    assert "FI_CXI_RX_MATCH_MODE" not in found["variables"]
    assert found["refusals"] == []


def test_a_refusal_has_three_lines_and_code_2(run: Run, tmp_path: Path) -> None:
    root = nodes.host(tmp_path / "host")
    Path(f"{root}{nodes.FOLDER}/libcxi.so.1.5.0").unlink()
    for command in ("plan", "binds"):
        done = fabric(run, root, command)
        assert done.returncode == 2, done.stderr
        # `plan` shows the devices; neither command prints options.
        assert ("cxi0" in done.stdout, "--bind" in done.stdout) == (command == "plan", False)
        assert "libcxi.so.1" in three_lines(done.stderr)[1]
    as_json = fabric(run, root, "plan", "--json")
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["refusals"]


def test_binds_prints_for_an_engine(run: Run, slingshot: Path, tmp_path: Path) -> None:
    done = fabric(run, slingshot, "binds", "--format=apptainer", "--nodes=2")
    assert done.returncode == 0, done.stderr
    found = words(done.stdout, tmp_path / "empty")
    assert options(found, "--bind") == LIBRARIES
    assert "NCCL_NET=Libfabric" in options(found, "--env")
    one = words(fabric(run, slingshot, "binds", "--nodes=1").stdout, tmp_path / "empty")
    assert "NCCL_NET=Libfabric" not in options(one, "--env")
    wrong = fabric(run, slingshot, "binds", "--format=lxc")
    assert wrong.returncode == 2
    assert "apptainer" in three_lines(wrong.stderr)[2]


def test_a_host_without_a_fabric_needs_no_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain/etc").mkdir(parents=True)
    done = fabric(run, tmp_path / "plain", "binds")
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert "no fabric: no device of a fabric" in done.stderr
    named = fabric(run, tmp_path / "plain", "binds", "--fabric=tcp")
    assert named.stdout.split() == ["--env", "MUSTER_FABRIC=tcp", "--env", "NCCL_NET=Socket"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("plan",), "--bind /:/host:ro"),
        (("binds",), "--bind /:/host:ro"),
        # An error that does not depend on a host comes first.
        (("plan", "--fabric=foo"), "--fabric off|auto|efa"),
    ],
)
def test_a_host_that_is_not_mounted(run: Run, tmp_path: Path, words: tuple[str, ...], fix: str) -> None:
    done = fabric(run, tmp_path / "nothing", *words)
    assert done.returncode == 2
    assert fix in three_lines(done.stderr)[2]


def test_check_opens_the_plugin(run: Run, slingshot: Path) -> None:
    done = fabric(run, slingshot, "check", "--json")
    assert done.returncode == 0, done.stderr
    found = {row["about"]: row for row in json.loads(done.stdout)}
    assert found["plugin"]["is_good"] is True
    assert found["plugin"]["values"] == ["Libfabric", f"{slingshot}{nodes.FOLDER}/libnccl-net.so"]
    assert set(found) == {"plugin", "libfabric", "verbs", "devices", "memory", "nccl"}
    text = fabric(run, slingshot, "check")
    assert f"{slingshot}{nodes.FOLDER}/libnccl-net.so is Libfabric (ncclNetPlugin_v8)" in text.stdout


OF_TCP = """
struct info { struct info *next; } only;
unsigned fi_version(void) { return 65561; }
int fi_getinfo(unsigned v, void *a, void *b, unsigned long f, void *h, struct info **all) { *all = &only; return 0; }
char *fi_tostr(void *each, int kind) { return "    prov_name: tcp\\n"; }
"""


def test_a_libfabric_without_the_fabrics_provider_has_failed(tmp_path: Path) -> None:
    nodes.library(tmp_path / "libfabric.so.1", OF_TCP)
    code = "from muster.check import fabric; print(fabric.providers().is_good)"

    def is_good(found: str) -> str:
        env = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(tmp_path), "MUSTER_FABRIC_FOUND": found}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=env, text=True, check=True, stdout=subprocess.PIPE).stdout.strip()

    assert [is_good(found) for found in ("slingshot", "efa", "infiniband", "")] == ["False", "False", "True", "True"]


@pytest.mark.parametrize(
    ("name", "net", "is_good"),
    [
        ("mine", "", True),
        ("libnccl-net-mine.so", "", True),
        ("other", "", False),
        ("other,mine", "", True),
        ("other,mine", "Mine", True),
        ("mine,other", "Else", False),
        ("None", "", None),
        ("none", "Socket", None),
        ("none", "Libfabric", False),
    ],
)
def test_a_plugin_is_named_as_nccl_takes_it(tmp_path: Path, name: str, net: str, is_good: bool | None) -> None:
    """By its file's name, or by NAME in libnccl-net-NAME.so; of several names the first that fits; or `none`."""
    source = "int fi_version(void) { return 0; }" + nodes.PLUGIN.format(net="Mine")
    nodes.library(tmp_path / "libnccl-net-mine.so", source)
    code = "from muster.check import fabric; print(fabric.plugin().is_good)"
    env = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(tmp_path), "NCCL_NET_PLUGIN": name, "NCCL_NET": net}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, check=True, stdout=subprocess.PIPE)
    assert done.stdout.strip() == str(is_good)


def test_check_shows_the_loaders_own_words(run: Run, slingshot: Path) -> None:
    bad = {"NCCL_NET_PLUGIN": "/nonexistent/libnccl-net.so"}
    done = fabric(run, slingshot, "check", "--fabric=off", env=bad)
    assert done.returncode == 1, done.stderr
    assert "/nonexistent/libnccl-net.so: cannot open shared object file: No such file" in done.stdout
    unshown = {"NCCL_NET_PLUGIN": "größe", "PYTHONIOENCODING": "ascii"}
    done = fabric(run, slingshot, "check", "--fabric=off", env=unshown)
    assert "libnccl-net-gr\\xf6\\xdfe.so: cannot open" in done.stdout
    other = fabric(run, slingshot, "check", "--json", env={"NCCL_NET": "AWS Libfabric"})
    assert other.returncode == 1
    assert "but NCCL_NET=AWS Libfabric" in other.stdout


def test_check_survives_a_library_that_ends_its_process(run: Run, tmp_path: Path) -> None:
    root = nodes.host(tmp_path / "host")
    end = "__attribute__((constructor)) static void end(void) { abort(); }"
    folder = Path(f"{root}{nodes.FOLDER}")
    needs = (folder / "libfabric.so.1", folder / "libcxi.so.1")
    nodes.library(folder / "libnccl-net.so", end + nodes.PLUGIN.format(net="Libfabric"), *needs)
    done = fabric(run, root, "check")
    assert done.returncode == 1
    assert "crashed the process that used it" in done.stderr


SHOW = """
import ctypes, os
if os.environ["RANK"] == "0":
    ctypes.CDLL(os.environ["NCCL_NET_PLUGIN"])
    mapped = sorted({line.split()[-1] for line in open("/proc/self/maps") if "/opt/cray/" in line})
    print(os.environ["MUSTER_FABRIC_FOUND"], *mapped)
"""


def test_a_program_gets_the_hosts_libraries(run: Run, slingshot: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SHOW)
    done = run("muster", "run", "--nproc-per-node=2", "mine.py")
    assert done.returncode == 0, done.stderr
    files = ("libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so")
    assert done.stdout.split() == ["slingshot", *(f"{slingshot}{nodes.FOLDER}/{name}" for name in files)]
    lines = [line for line in done.stderr.splitlines() if "fabric: slingshot" in line]
    assert len(lines) == 1
    assert len(list((tmp_path / "tmp").glob("muster-fabric-*"))) == 1


def test_a_dry_run_prints_what_would_be_set(run: Run, tmp_path: Path) -> None:
    done = run("train", "ddp", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "export NCCL_NET_PLUGIN=" in done.stdout
    assert os.listdir(tmp_path / "tmp") == []
    off = run("train", "ddp", "--dry-run", "--fabric=off")
    assert "NCCL_NET_PLUGIN" not in off.stdout


def test_a_launch_without_a_host_loads_one_file_of_this_package(tmp_path: Path) -> None:
    tell = (
        "import atexit; atexit.register(lambda: print(*(name for name in sys.modules if 'entrypoint.fabric.' in name)))"
    )
    nothing = str(tmp_path / "nothing")
    code = COMMAND.format(host=nothing, nothing=nothing, argv=["train", "ddp", "--dry-run"])
    env = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    done = nodes.run(sys.executable, "-c", f"import sys\n{tell}\n{code}", env=env, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "muster.entrypoint.fabric.launch", done.stderr


def test_only_rank_0_prints_the_fabric(run: Run, tmp_path: Path) -> None:
    words = ["--framework=jax", "--nnodes=2", "--master-addr=localhost"]
    for rank, told in ((0, 1), (1, 0)):
        done = run("muster", "run", *words, f"--node-rank={rank}", "true")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("fabric: slingshot") == told


def test_a_named_fabric_that_does_not_fit_ends_with_2(run: Run, tmp_path: Path) -> None:
    root = nodes.host(tmp_path / "host")
    Path(f"{root}{nodes.FOLDER}/libcxi.so.1.5.0").unlink()
    done = run("train", "ddp", "--fabric=slingshot", host=root)
    assert done.returncode == 2
    assert "libcxi.so.1" in three_lines(done.stderr)[1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["plan", "binds"])
def test_a_root_that_can_not_be_looked_at(run: Run, tmp_path: Path, command: str) -> None:
    done = run("muster", "fabric", command, f"--root={tmp_path}/{'x' * 300}")
    assert done.returncode == 2
    assert "not mounted here" in three_lines(done.stderr)[0]
