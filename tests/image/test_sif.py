"""The SIF under Apptainer, on one machine."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.entrypoint import standins
from tests.image.conftest import FIRST_TEST_S
from tests.image.sif import Sif

pytestmark = [pytest.mark.image, pytest.mark.timeout(FIRST_TEST_S)]

TRAIN = ("train", "ddp", "--epochs=1", "--max-steps=2", "--name=try")
SHOW = """
import ctypes, os
version = ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libcuda.so" in line}
print("loaded", version.value, *mapped)
"""


@pytest.mark.parametrize("verb", ["run", pytest.param("file", marks=pytest.mark.long)])
def test_trains(image_sif: Sif, verb: str, tmp_path: Path) -> None:
    """By `apptainer run` and as a program; the tests below do so by `apptainer exec`."""
    argv = [str(image_sif.path), *TRAIN] if verb == "file" else image_sif.argv(*TRAIN, verb=verb)
    path = f"{Path(image_sif.apptainer).parent}:/usr/bin:/bin"
    done = subprocess.run(argv, cwd=tmp_path, env=image_sif.env(PATH=path), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "1 node x 2 = 2 ranks" in done.stderr
    assert json.loads((tmp_path / "runs/try/summary.json").read_text())["world_size"] == 2


@pytest.mark.long  # building the SIF has run it
def test_the_images_own_test_passes(image_sif: Sif) -> None:
    done = image_sif.run(verb="test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "works here" in done.stdout


def test_help_and_labels(image_sif: Sif) -> None:
    told = subprocess.run(
        [image_sif.apptainer, "run-help", image_sif.path], capture_output=True, text=True, env=image_sif.env()
    )
    assert "apptainer exec --nv IMAGE train ddp" in told.stdout, told.stderr
    labels = subprocess.run(
        [image_sif.apptainer, "inspect", "--json", image_sif.path], capture_output=True, text=True, env=image_sif.env()
    )
    found = json.loads(labels.stdout)["data"]["attributes"]["labels"]
    inside = json.loads(image_sif.run("muster", "version", "--json").stdout)["image"]
    assert found["org.opencontainers.image.version"] == inside["version"]
    assert found["org.opencontainers.image.revision"] == inside["revision"]
    assert found["io.muster.lock.sha256"] == inside["lock_sha256"]


def test_exit_codes_pass_through(image_sif: Sif) -> None:
    assert image_sif.run("train", "ddp", "--model=nonesuch").returncode == 2
    assert image_sif.run("muster", "run", "--no-python", "--nproc-per-node=1", "false").returncode == 1


@pytest.mark.parametrize("option", [pytest.param("--cleanenv", marks=pytest.mark.long), "--containall"])
def test_trains_outside_of_a_job_without_the_hosts_environment(image_sif: Sif, tmp_path: Path, option: str) -> None:
    """Outside of a job these options lose nothing."""
    done = image_sif.run(*TRAIN, options=[option, "--bind", tmp_path, "--pwd", tmp_path], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/try/summary.json").exists()


def test_trains_as_nobody(image_sif: Sif, somebody: Path) -> None:
    """If the system does not let a user mount a SIF, Apptainer unpacks it, which takes most of this test's time."""
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    done = subprocess.run(
        [*argv, *image_sif.argv(*TRAIN, options=["--bind", somebody, "--pwd", somebody])],
        cwd=somebody,
        env=image_sif.env(HOME="/nonexistent", USER="nobody"),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert (somebody / "runs/try/summary.json").stat().st_uid == 65534


def test_the_hosts_python_does_not_leak_in(image_sif: Sif, tmp_path: Path) -> None:
    """Apptainer passes the host's environment to a container, a module system's PYTHONHOME too, and mounts ~/.local."""
    packages = tmp_path / ".local/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "torch.py").write_text("raise SystemExit('the wrong torch')")
    done = image_sif.run(
        "muster", "version", options=["--home", tmp_path], env={"PYTHONHOME": "/opt/python"}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "/opt/muster/venv" in done.stdout


class Node:
    """A host with a stand-in for the driver, which `--nv` finds as it does the real one: by the loader's cache."""

    def __init__(self, sif: Sif, folder: Path, cuda: int) -> None:
        self.sif, self.folder = sif, folder
        standins.libcuda(folder / "driver", cuda, name=f"libcuda.so.{cuda}")
        (folder / "driver/libcuda.so.1").symlink_to(f"libcuda.so.{cuda}")
        smi = folder / "driver/nvidia-smi"
        smi.write_text("#!/bin/sh\necho stand-in\n")
        smi.chmod(0o755)
        (folder / "conf").write_text(f"{folder}/driver\n/usr/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n")
        subprocess.run(["ldconfig", "-X", "-f", folder / "conf", "-C", folder / "cache"], check=True)
        (folder / "show.py").write_text(SHOW)

    def run(self, *words: object, options: tuple[object, ...] = ()) -> subprocess.CompletedProcess[str]:
        """Runs `apptainer exec --nv OPTIONS SIF WORDS...` on this host to its end."""
        command = shlex.join(self.sif.argv(*words, options=["--nv", *options]))
        script = f"mount --make-rprivate / && mount --bind {shlex.quote(str(self.folder / 'cache'))} /etc/ld.so.cache"
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{script} && exec {command}"],
            cwd=self.folder,
            env=self.sif.env(
                PATH=f"{self.folder}/driver:/usr/sbin:/usr/bin:/sbin:/bin", CUDA_VISIBLE_DEVICES="0", MUSTER_DEBUG=""
            ),
            capture_output=True,
            text=True,
            timeout=600,
        )


@pytest.fixture
def show() -> tuple[str, ...]:
    return ("muster", "run", "--nproc-per-node=1", "show.py")


def test_a_new_driver_is_the_hosts(image_sif: Sif, tmp_path: Path, show: tuple[str, ...]) -> None:
    done = Node(image_sif, tmp_path, 13020).run(*show)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["loaded", "13020", "/.singularity.d/libs/libcuda.so.1"]


def test_an_old_driver_is_bridged_by_the_images_forward_compatibility(
    image_sif: Sif, tmp_path: Path, show: tuple[str, ...]
) -> None:
    """The base made of Debian's packages has no cuda-compat: its stand-in is bound where NVIDIA's package puts it."""
    node = Node(image_sif, tmp_path, 12040)
    standins.libcuda(tmp_path / "compat", 13020)
    bind = ("--bind", f"{tmp_path}/compat:/usr/local/cuda/compat")
    done = node.run(*show, options=bind)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["loaded", "13020", "/usr/local/cuda/compat/libcuda.so.1"]
    assert "12.4" in done.stderr
    assert "/usr/local/cuda/compat" in done.stderr


@pytest.mark.parametrize("code", [803, 804])
def test_a_gpu_that_forward_compatibility_does_not_serve(
    image_sif: Sif, tmp_path: Path, show: tuple[str, ...], code: int
) -> None:
    node = Node(image_sif, tmp_path, 12040)
    standins.libcuda(tmp_path / "compat", 13020, code)
    done = node.run(*show, options=("--bind", f"{tmp_path}/compat:/usr/local/cuda/compat"))
    assert done.returncode == 2
    assert str(code) in done.stderr
    assert "VARIANT=cuda12" in done.stderr
    assert done.stdout == ""


def test_an_old_driver_without_forward_compatibility(image_sif: Sif, tmp_path: Path) -> None:
    done = Node(image_sif, tmp_path, 12040).run("train", "ddp", "--max-steps=1")
    assert done.returncode == 2
    assert "12.4" in done.stderr
    assert "VARIANT=cuda12" in done.stderr
    assert not (tmp_path / "runs").exists()
