"""The contents of the image, and what it must not contain."""

import hashlib
import json
import mmap
import os
import re
import stat
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.image.conftest import BASE, FIRST_TEST_S, ROOT, SENTINEL, commit_time, revision
from tests.image.podman import Podman
from tests.image.sif import Sif

pytestmark = [pytest.mark.image, pytest.mark.timeout(FIRST_TEST_S)]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
LOCK = (ROOT / "requirements.lock").read_bytes()

# Files whose content is not compared: the engine makes them for each container.
MADE_BY_THE_ENGINE = {"etc/hosts", "etc/hostname", "etc/resolv.conf"}

FABRIC = re.compile(r"^(NCCL|GLOO|FI|UCX|OMPI|MPICH|IBV|RDMAV|PSM|HSA|NVSHMEM|UCC)_|^LD_|^CUDA_VISIBLE")


def listing(root: Path) -> dict[str, str]:
    """Each file below `root` with its kind, mode, owner and content."""
    found: dict[str, str] = {}
    for folder, names, files in os.walk(root):
        for name in [*names, *files]:
            path = Path(folder, name)
            state = path.lstat()
            content = ""
            if stat.S_ISLNK(state.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(state.st_mode) and str(path.relative_to(root)) not in MADE_BY_THE_ENGINE:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            found[str(path.relative_to(root))] = f"{stat.filemode(state.st_mode)} {state.st_uid} {content}"
    return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@cache
def config(podman: Podman, image: str) -> dict[str, Any]:
    """The image's configuration, as the engine reports it."""
    return json.loads(podman("inspect", image).stdout)[0]


@pytest.mark.long
def test_two_builds_have_the_same_packages_and_files(podman: Podman, image: str, image_again: str) -> None:
    packages = ["sh", "-c", "dpkg-query --show; pip list --format=freeze"]
    first, second = podman.run(image, *packages), podman.run(image_again, *packages)
    assert len(first.stdout.splitlines()) > 100
    assert first.stdout == second.stdout
    with podman.mounted(image) as one, podman.mounted(image_again) as other:
        ours, theirs = listing(one), listing(other)
    assert len(ours) > 20_000
    assert {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)} == set()


def test_the_image_has_the_time_of_its_commit(podman: Podman, image: str) -> None:
    with podman.mounted(image) as root:
        made = json.loads((root / "opt/muster/image.json").read_text())["created"]
        times = {int(path.lstat().st_mtime) for path in (root / "opt/muster").rglob("*.json")}
    assert config(podman, image)["Created"] == made
    assert {commit_time()} == {str(time) for time in times if time > 1_500_000_000}


def test_no_layer_holds_anything_of_the_machine_that_built_it(
    podman: Podman, image: str, build_env: dict[str, str]
) -> None:
    """Its settings for package indexes and its certificates were marked; no file of any layer has the mark."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], env=build_env, capture_output=True, text=True, check=True
    ).stdout
    folders = {place for place in re.findall(r"(/[^ '\\]+)", settings) if Path(place).is_dir()}
    needles = [SENTINEL.encode(), *(folder.encode() for folder in folders)]
    found: list[str] = []
    for layer in podman.layers(image):
        for folder, names, files in os.walk(layer):
            found += [str(Path(folder, name)) for name in [*names, *files] if SENTINEL in name]
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink() and path.is_file() and path.stat().st_size:
                    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        # The folders' names are short: a big library may hold one by chance, but not a small text file.
                        wanted = needles if path.stat().st_size < 100_000 else needles[:1]
                        found += [f"{path}: {needle!r}" for needle in wanted if content.find(needle) >= 0]
    assert found == []
    assert SENTINEL not in json.dumps(config(podman, image))


def test_nothing_of_the_build_is_left(podman: Podman, image: str) -> None:
    with podman.mounted(image) as root:
        left = [
            str(path.relative_to(root))
            for folder in ("run", "tmp", "root/.cache", "root/.config", "var/cache/apt", "var/lib/apt/lists", "var/tmp")
            for path in sorted((root / folder).rglob("*"))
            if not path.is_dir()
        ]
        static = list((root / "opt/muster").rglob("*.a"))
        development = [path for path in (root / "usr/local").rglob("*") if path.name in ("nvcc", "cuda_runtime_api.h")]
        unused = [
            path for path in (root / "usr").rglob("*") if re.match(r"lto1$|lib[at]san\.|libpython3.*\.a$", path.name)
        ]
        users = (root / "etc/passwd").read_text()
    assert left == []
    assert static == []
    assert not development, "a -devel base"
    assert unused == [], "of the compiler, what nobody here asks for"
    assert "muster" not in users


def test_labels_and_the_files_inside_say_the_same(podman: Podman, image: str) -> None:
    labels = config(podman, image)["Config"]["Labels"]
    with podman.mounted(image) as root:
        inside = json.loads((root / "opt/muster/image.json").read_text())
        lock = (root / "opt/muster/requirements.lock").read_bytes()
    assert lock == LOCK
    assert inside["lock_sha256"] == labels["io.muster.lock.sha256"] == sha256(LOCK)
    assert inside["revision"] == labels["org.opencontainers.image.revision"] == revision()
    assert inside["version"] == labels["org.opencontainers.image.version"] == VERSION
    assert inside["base"] == labels["org.opencontainers.image.base.name"] == BASE


def test_no_fabric_is_chosen_in_the_image(podman: Podman, image: str) -> None:
    variables = dict(pair.split("=", 1) for pair in config(podman, image)["Config"]["Env"])
    assert [name for name in variables if FABRIC.match(name)] == []
    assert variables["PYTHONNOUSERSITE"] == "1"
    # The shell that Kubernetes or a job script starts in place of the entrypoint finds the commands too.
    assert variables["PATH"].startswith("/opt/muster/venv/bin:")


def test_libraries_of_fabrics_and_of_cuda_are_found_by_their_bare_names(podman: Podman, image: str) -> None:
    """The CUDA runtime too, as NCCL's plugins look for it."""
    names = ("libibverbs.so.1", "librdmacm.so.1", "libfabric.so.1", "libnuma.so.1", "libcudart.so")
    loads = f"import ctypes; *_, cuda = map(ctypes.CDLL, {names}); cuda.cudaRuntimeGetVersion(None)"
    done = podman.run(image, "python", "-c", loads)
    assert done.returncode == 0, done.stderr


def test_versions(podman: Podman, image: str) -> None:
    done = podman.run(image, "muster", "version", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["image"]["revision"] == found["revision"] == revision()
    assert found["image"]["lock_sha256"] == found["lock_sha256"] == sha256(LOCK)
    assert found["cuda"].startswith("13.")
    assert found["nccl"]["path"].startswith("/opt/muster/venv/")
    locked = re.search(r"^nvidia-nccl-cu13==([0-9.]+)", LOCK.decode(), re.MULTILINE)
    assert locked
    assert locked[1].startswith(found["nccl"]["version"])


def test_sizes(podman: Podman, image: str, image_sif: Sif, record_property: Any) -> None:
    """At most 6.2 GB uncompressed, and 3.3 GB compressed, which is what is pulled or copied to a cluster."""
    uncompressed = config(podman, image)["Size"]
    compressed = image_sif.path.stat().st_size
    print(f"\nimage {uncompressed / 1e9:.2f} GB, SIF {compressed / 1e9:.2f} GB")
    record_property("image_gb", uncompressed / 1e9)
    assert uncompressed <= 6.2e9
    assert compressed <= 3.3e9
