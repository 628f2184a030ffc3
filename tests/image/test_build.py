"""The arguments and settings of this machine that `make image` and `make sif` give to an engine, here a stand-in."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.image.conftest import ROOT

# Records the arguments and the secrets of a build.
ENGINE = """#!/bin/sh
case $1 in
info) ;;
inspect) [ ! -e {folder}/no-image ] ;;
pull) echo first >&2; echo 'no such host' >&2; exit 125 ;;
build)
    printf '%s\\n' "DOCKER_BUILDKIT=$DOCKER_BUILDKIT" "$@" > {folder}/words
    for word; do
        case $word in id=*) cp "${{word#*,src=}}" {folder}/secrets/ ;; esac
    done ;;
esac
"""
APT_CONFIG = """#!/bin/sh
cat << 'END'
Acquire::http::Proxy "http://proxy:3142";
Acquire::http::Proxy::own.example "DIRECT";
Acquire::http::Proxy-Auto-Detect "/own/script";
Acquire::Check-Valid-Until "false";
APT::Update::Post-Invoke:: "rm -rf /";
Acquire::Languages "none";
END
"""


class Machine:
    """A machine with pip's settings, an index and a folder of wheels, and a stand-in for an engine.

    Attributes:
        home: the user's home, with the folders `index` and `wheels`, and a pip.conf that names the index.
        folder: has what the engine was given.
    """

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine, self.home, self.folder = engine, folder / "home", folder / "given"
        self.programs = folder / "programs"
        for made in (self.home / ".config/pip", self.home / "index/simple", self.home / "wheels", self.programs):
            made.mkdir(parents=True)
        (self.folder / "secrets").mkdir(parents=True)
        self.program(engine, ENGINE.format(folder=self.folder))
        self.program("apt-config", APT_CONFIG)
        (self.home / ".config/pip/pip.conf").write_text(
            "[global]\nindex-url = https://mirror.example/simple\n"
            f"[install]\nextra-index-url =\n    file://{self.home}/index/simple\n    https://other.example/simple\n"
        )

    def program(self, name: str, text: str) -> None:
        """Makes a program of that name."""
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def run(self, script: str = "build.sh", **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of image/ to its end, in an environment with as few variables as possible."""
        path = f"{self.programs}:{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"HOME": str(self.home), "PATH": path, "ENGINE": self.engine, "TMPDIR": str(self.home), **variables}
        argv = [ROOT / "image" / script]
        return subprocess.run(argv, env=env, cwd=self.home, capture_output=True, text=True, timeout=600, check=False)

    def words(self) -> list[str]:
        """The arguments of the engine's build command, after DOCKER_BUILDKIT."""
        return (self.folder / "words").read_text().splitlines()

    def secret(self, name: str) -> list[str]:
        """The lines of a secret of the build."""
        return (self.folder / "secrets" / name).read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "podman")


def assert_refused(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: ", " seen: ", "  fix: "]
    assert [text for text in texts if text not in done.stderr] == []


def test_pips_settings_are_those_that_pip_finds(machine: Machine) -> None:
    assert machine.run(PIP_FIND_LINKS=str(machine.home / "wheels"), PIP_CERT="/x", PIP_TIMEOUT="9").returncode == 0
    lines = machine.secret("pip.conf")
    assert lines[:3] == [
        "[global]",
        "index-url = https://mirror.example/simple",
        # The pages of an index link to files beside them: so the folder above is mounted.
        "extra-index-url = file:///run/packages/0/simple https://other.example/simple",
    ]
    assert "find-links = file:///run/packages/1" in lines
    assert [line for line in lines if line.startswith(("cert", "timeout"))] == [], "the build has its own"
    words = machine.words()
    assert f"{machine.home}/index:/run/packages/0:ro" in words
    assert f"{machine.home}/wheels:/run/packages/1:ro" in words


def test_a_variable_wins_over_the_files(machine: Machine) -> None:
    assert machine.run(PIP_INDEX_URL="https://won.example/simple").returncode == 0
    assert "index-url = https://won.example/simple" in machine.secret("pip.conf")


def test_docker_does_without_folders(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "docker")
    done = machine.run(PIP_FIND_LINKS=str(machine.home / "wheels"))
    assert done.returncode == 0, done.stderr
    assert "docker can't mount folders in a build" in done.stderr
    lines = machine.secret("pip.conf")
    assert "extra-index-url = https://other.example/simple" in lines
    assert not [line for line in lines if "find-links" in line or "/run/packages" in line]
    assert "--volume" not in machine.words()


def test_only_apts_settings_for_mirrors_are_passed(machine: Machine) -> None:
    assert machine.run().returncode == 0
    assert machine.secret("apt.conf") == [
        'Acquire::http::Proxy "http://proxy:3142";',
        'Acquire::http::Proxy::own.example "DIRECT";',
        'Acquire::Check-Valid-Until "false";',
    ]


def test_certificates_and_sources_are_shown_and_no_secret_stays(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "bundle.pem").write_text("certificates\n")
    (tmp_path / "mirror.list").write_text("deb http://mirror.example/debian bookworm main\n")
    variables = {"PIP_CERT": str(tmp_path / "bundle.pem"), "APT_SOURCES": str(tmp_path / "mirror.list")}
    assert machine.run(**variables).returncode == 0
    assert machine.secret("ca.pem") == ["certificates"]
    assert machine.secret("apt.sources") == ["deb http://mirror.example/debian bookworm main"]
    recipe = (ROOT / "Containerfile").read_text()
    shown = {path.name for path in (machine.folder / "secrets").iterdir()}
    assert {name for name in shown if f"type=secret,id={name} " not in recipe} == set()
    assert sorted(path.name for path in machine.home.iterdir()) == [".config", "index", "wheels"]


def test_the_words_of_a_build_by_docker(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "docker")
    done = machine.run(VARIANT="cuda12", SOURCE_DATE_EPOCH="1700000000", https_proxy="http://proxy:3128")
    assert done.returncode == 0, done.stderr
    words = machine.words()
    assert words[:2] == ["DOCKER_BUILDKIT=1", "build"]
    assert words[-1] == str(ROOT)
    version = next(word for word in words if word.startswith("VERSION=")).removeprefix("VERSION=")
    assert {"LOCK=requirements-cuda12.lock", "SOURCE_DATE_EPOCH=1700000000", "https_proxy"} <= set(words)
    assert "BASE_IMAGE=docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04" in words
    assert {"muster:cuda12", f"muster:{version}-cuda12"} <= set(words)
    assert "docker run --rm muster:cuda12 train ddp" in done.stdout


def test_a_base_image_and_a_tag_of_the_users_own(machine: Machine) -> None:
    assert machine.run(BASE_IMAGE="base:1", TAG="mine").returncode == 0
    words = machine.words()
    assert "BASE_IMAGE=base:1" in words
    assert [after for word, after in pairwise(words) if word == "--tag"] == ["mine"]


@pytest.mark.parametrize("variables", [{}, {"BASE_IMAGE": "base:1"}], ids=["cuda", "own"])
def test_a_base_image_that_cannot_be_pulled_is_an_error(machine: Machine, variables: dict[str, str]) -> None:
    (machine.folder / "no-image").touch()
    done = machine.run(**variables)
    assert_refused(done, variables.get("BASE_IMAGE", "nvidia/cuda:13"), "no such host", "BASE_IMAGE=")
    assert not (machine.folder / "words").exists()


def test_make_hands_its_settings_on_and_installs_nothing_on_this_machine(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "mirror.list").write_text("deb http://mirror.example/debian bookworm main\n")
    for program in ("apt", "apt-get", "dnf", "dpkg", "sudo", "yum"):
        machine.program(program, f'#!/bin/sh\necho "$0 $*" >> {machine.folder}/installed\n')
    settings = [f"APT_SOURCES={tmp_path / 'mirror.list'}", "TAG=mine"]
    env = {"HOME": str(machine.home), "PATH": f"{machine.programs}:/usr/bin:/bin", "ENGINE": machine.engine}
    argv = ["make", f"--directory={ROOT}", "image", *settings]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert machine.secret("apt.sources") == ["deb http://mirror.example/debian bookworm main"]
    assert "mine" in machine.words()
    assert not (machine.folder / "installed").exists()


def test_a_build_that_fails(machine: Machine) -> None:
    machine.program("podman", "#!/bin/sh\n[ $1 != build ] || exit 7\n")
    assert_refused(machine.run(), "podman build ended with code 7")


@pytest.mark.parametrize(
    ("script", "variables", "seen"),
    [
        ("build.sh", {"APT_SOURCES": "/none"}, "/none"),
        ("build.sh", {"VARIANT": "rocm"}, "rocm"),
        ("build.sh", {"ENGINE": "lxc"}, "lxc"),
        ("build.sh", {"ENGINE": "\x1b[31m"}, "?[31m"),
        ("sif.sh", {"SIF": "/none/such/x.sif"}, "/none/such"),
        ("sif.sh", {"VARIANT": "rocm"}, "rocm"),
    ],
)
def test_bad_variables(machine: Machine, script: str, variables: dict[str, str], seen: str) -> None:
    machine.program("apptainer", "#!/bin/sh\n")
    assert_refused(machine.run(script, **variables), seen)


def test_a_sif_of_an_image_that_was_not_built(machine: Machine) -> None:
    machine.program("apptainer", "#!/bin/sh\n")
    (machine.folder / "no-image").touch()
    assert_refused(machine.run("sif.sh"), "muster:latest", "make image first")


def only(folder: Path, names: Sequence[str]) -> str:
    """A PATH with these programs and no others."""
    for name in names:
        (folder / name).symlink_to(shutil.which(name) or os.devnull)
    return str(folder)


def test_an_engine_that_is_not_there_or_does_not_answer(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    path = only(tmp_path / "path", ("bash", "dirname", "sed", "timeout", "uname"))
    assert_refused(machine.run(PATH=path, ENGINE=""), "docker, podman or buildah on PATH")
    docker = tmp_path / "path" / "docker"
    docker.write_text("#!/bin/bash\nexit 1\n")
    docker.chmod(0o755)
    assert_refused(machine.run(PATH=path, ENGINE=""), "`docker info` fails")
