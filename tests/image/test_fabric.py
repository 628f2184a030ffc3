"""The host's fabric in the real containers: stand-ins for Slingshot's libraries, which the image's own Python loads."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.fabric import nodes
from tests.image.conftest import FIRST_TEST_S
from tests.image.podman import Podman
from tests.image.sif import Sif

pytestmark = [pytest.mark.image, pytest.mark.timeout(FIRST_TEST_S)]

TRAIN = ("--data=synthetic", "--image-size=32", "--epochs=1", "--max-steps=2", "--name=try")
LINE = "fabric: slingshot (cxi0): libnccl-net.so, libfabric.so.1, libcxi.so.1 from the host"
SONAMES = {"libnccl-net.so", "libfabric.so.1", "libcxi.so.1"}
FILES = ["libcxi.so.1.5.0", "libfabric.so.1.25.0", "libnccl-net.so"]
SHOW = """
import ctypes, os
ctypes.CDLL(os.environ["NCCL_NET_PLUGIN"])
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/opt/fabric/" in line}
print(os.environ["NCCL_NET"], os.environ["MUSTER_FABRIC_FOUND"], *sorted(mapped))
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return nodes.host(tmp_path / "host")


def test_plan_and_check(image_sif: Sif, host: Path, tmp_path: Path) -> None:
    options = ("--bind", f"{host}:/host:ro")
    plan = json.loads(image_sif.run("muster", "fabric", "plan", "--json", options=options).stdout)
    assert plan["finding"]["fabric"] == "slingshot"
    assert {each["soname"] for each in plan["injected"]} == SONAMES
    done = image_sif.run(
        "muster", "fabric", "check", "--json", options=options, env={"LOADED": str(tmp_path / "loaded")}
    )
    rows = {row["about"]: row for row in json.loads(done.stdout)}
    assert rows["plugin"]["says"].startswith(f"/host{nodes.FOLDER}/libnccl-net.so is Libfabric")
    assert rows["nccl"]["values"][1].startswith("/opt/muster/venv/")
    assert sorted(set(nodes.loaded(tmp_path / "loaded"))) == FILES


def test_the_trainer_takes_the_hosts_libraries(image_sif: Sif, host: Path, tmp_path: Path) -> None:
    options = ("--bind", f"{host}:/host:ro")
    env = {"LOADED": str(tmp_path / "loaded")}
    done = image_sif.run("train", "single", *TRAIN, options=options, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert LINE in done.stderr
    assert sorted(nodes.loaded(tmp_path / "loaded")) == FILES
    assert json.loads((tmp_path / "runs/try/summary.json").read_text())["fabric"] == "slingshot"


@pytest.mark.long
def test_the_trainer_uses_host_libraries_under_podman(podman: Podman, image: str, host: Path, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    options = [f"--volume={host}:/host:ro", f"--volume={tmp_path / 'log'}:/log", "--env=LOADED=/log/loaded"]
    done = podman.run(image, "train", "ddp", *TRAIN, options=[*options, "--read-only"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == 1
    assert sorted(nodes.loaded(tmp_path / "log/loaded")) == FILES


def test_a_plugin_that_needs_a_newer_c_library_is_refused(image_sif: Sif, host: Path, tmp_path: Path) -> None:
    folder = Path(f"{host}{nodes.FOLDER}")
    script = tmp_path / "script"
    script.write_text("GLIBC_9.99 { global: of_the_future; };\n")
    # A C library with a version that no image has. Only the plugin is linked against it: it is never taken from a host.
    libc = nodes.library(
        tmp_path / "libc.so.6",
        "int of_the_future(void) { return 1; }",
        f"-Wl,--version-script={script}",
        soname="libc.so.6",
    )
    use = "extern int of_the_future(void); int use(void) { return of_the_future(); }"
    needs = (folder / "libfabric.so.1", folder / "libcxi.so.1", libc)
    nodes.library(folder / "libnccl-net.so", use + nodes.PLUGIN.format(net="Libfabric"), *needs)
    options = ("--bind", f"{host}:/host:ro")
    for words in (("muster", "fabric", "plan"), ("train", "single", "--fabric=slingshot", *TRAIN)):
        done = image_sif.run(*words, options=options, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "GLIBC_9.99" in done.stderr
        assert "libnccl-net.so" in done.stderr
    assert not (tmp_path / "runs").exists()
    alone = image_sif.run("train", "single", *TRAIN, options=options, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "fabric: no library of the host is used" in alone.stderr


@pytest.fixture
def site(host: Path, tmp_path: Path) -> Path:
    """The folder with a site's profile, and a script that shows what it loads."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/site.toml").write_text(nodes.SITE.format(folder=f"{host}{nodes.FOLDER}"))
    (tmp_path / "mine/show.py").write_text(SHOW)
    return tmp_path / "mine"


def test_binds_for_apptainer(image_sif: Sif, site: Path) -> None:
    """The options are made with this machine's root mounted; with them, only single files of it are mounted."""
    ask = image_sif.argv(
        *("muster", "fabric", "binds", "--format=apptainer", "--fabric=slingshot", f"--site={site}/site.toml"),
        options=["--bind", "/:/host:ro", "--bind", site],
    )
    run = shlex.join(image_sif.argv("muster", "run", "--nproc-per-node=1", "show.py", options=["--pwd", site]))
    start, middle, end = run.partition(f" {image_sif.path} ")
    script = f'binds=$({shlex.join(ask)}) || exit; eval "{start} --bind {site} $binds{middle}{end}"'
    done = subprocess.run(
        ["sh", "-c", script], cwd=site, env=image_sif.env(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    libraries = sorted(f"/opt/fabric/lib/{name}" for name in SONAMES)
    assert done.stdout.split() == ["Libfabric", "slingshot", *libraries]


def test_binds_for_podman(podman: Podman, image: str, site: Path) -> None:
    mount = f"--volume={site}:/workspace"
    words = ("muster", "fabric", "binds", "--format=podman", "--fabric=slingshot", "--site=/workspace/site.toml")
    asked = podman.run(image, *words, options=["--volume=/:/host:ro", mount])
    assert asked.returncode == 0, asked.stderr
    options = shlex.split(asked.stdout)
    # A sandbox's root may lack CAP_SYS_RESOURCE, and with it the right to raise its own limits.
    limit = options.index("memlock=-1")
    del options[limit - 1 : limit + 1]
    done = podman.run(image, "muster", "run", "--nproc-per-node=1", "show.py", options=[*options, mount])
    assert done.returncode == 0, done.stderr
    libraries = sorted(f"/opt/fabric/lib/{name}" for name in SONAMES)
    assert done.stdout.split() == ["Libfabric", "slingshot", *libraries]


@pytest.mark.long
def test_a_plugin_that_links_the_cuda_runtime(image_sif: Sif, host: Path, tmp_path: Path) -> None:
    """As aws-ofi-nccl does: it needs the version that the image has, and gets the image's copy."""
    asked = image_sif.run("sh", "-c", "find /opt/muster/venv -name 'libcudart.so.*' -printf '%f\\n'")
    folder = Path(f"{host}{nodes.FOLDER}")
    cudart = nodes.library(tmp_path / asked.stdout.split()[0])
    needs = (folder / "libfabric.so.1", folder / "libcxi.so.1", cudart)
    nodes.library(folder / "libnccl-net.so", nodes.PLUGIN.format(net="Libfabric"), *needs)
    options = ("--bind", f"{host}:/host:ro")
    done = image_sif.run("train", "single", "--fabric=slingshot", *TRAIN, options=options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert LINE in done.stderr
    check = json.loads(image_sif.run("muster", "fabric", "check", "--json", options=options).stdout)
    assert "libnccl-net.so is Libfabric" in next(row["says"] for row in check if row["about"] == "plugin")
