"""The image and the SIF, built once a session from this checkout, and the clusters in which they run."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from image import base, build, settings, sif
from tests.clusters.conftest import four_ranks, grid_engine2, slurm2, slurm3  # noqa: F401
from tests.clusters.requirements import refuse, require_programs
from tests.image.podman import Podman
from tests.image.sif import Sif
from train.errors import MusterError

PROGRAMS = ("buildah", "mksquashfs", "mmdebstrap", "patchelf", "podman", "runc")

# What no layer may hold: it stands in the settings that the build is shown.
SENTINEL = "sentinel-of-this-machine"

IMAGE, AGAIN = "localhost/muster:test", "localhost/muster:again"


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """podman with a storage that exists inside this session."""
    require_programs(*PROGRAMS)
    if os.geteuid() != 0:
        refuse(f"building and running images in a sandbox needs root; user id is {os.geteuid()}")
    podman = Podman(tmp_path_factory.mktemp("podman"))
    yield podman
    podman.close()


@pytest.fixture(scope="session")
def build_settings(tmp_path_factory: pytest.TempPathFactory) -> settings.Settings:
    """This machine's settings for package indexes, with a word in each that nobody else has."""
    shown = settings.collect(tmp_path_factory.mktemp("settings"), os.environ)
    marks = {
        "pip.conf": f"trusted-host = {SENTINEL}.invalid\n",
        "apt.conf": f'Acquire::http::Proxy::{SENTINEL}.invalid "DIRECT";\n',
        "ca.pem": f"# {SENTINEL}\n",
    }
    for name, mark in marks.items():
        with shown.secrets[name].open("a") as file:
            file.write(mark)
    return shown


@pytest.fixture(scope="session")
def image(podman: Podman, build_settings: settings.Settings) -> str:
    """The name of the image: the Containerfile with the locked wheels, CUDA's among them, on Debian's packages."""
    base.make(podman.engine, base.IMAGE, build_settings, build.commit_time())
    try:
        made(podman, IMAGE, build_settings)
    except MusterError as error:
        # Gigabytes come from the package indexes: one hiccup of theirs must not fail all that runs in the image. The
        # steps that were done are kept; what is wrong with the recipe is wrong again.
        print(f"the image is built a second time, as {error}", file=sys.stderr)
        made(podman, IMAGE, build_settings)
    return IMAGE


def made(podman: Podman, image: str, build_settings: settings.Settings, *options: str) -> None:
    """Builds the image; an error has the room that there is, of which this takes 20 GB."""
    try:
        variant = build.VARIANTS["cuda13"]
        build.make(podman.engine, variant, base.IMAGE, [image], build_settings, build.commit_time(), *options)
    except MusterError as error:
        rooms = {str(place): shutil.disk_usage(place).free / 1e9 for place in (podman.folder, "/var/tmp")}
        error.add_note("free: " + ", ".join(f"{free:.1f} GB at {place}" for place, free in rooms.items()))
        raise


@pytest.fixture(scope="session")
def image_again(podman: Podman, image: str, build_settings: settings.Settings) -> str:
    """The name of the same image, built anew from the first step on."""
    made(podman, AGAIN, build_settings, "--no-cache")
    return AGAIN


@pytest.fixture(scope="session")
def apptainer() -> str:
    """The command: the machine's own, or one that is installed for this clone."""
    require_programs(*PROGRAMS)
    return sif.find_apptainer()


@pytest.fixture(scope="session")
def image_sif(podman: Podman, image: str, apptainer: str) -> Iterator[Sif]:
    """The SIF that `make sif` makes of the image."""
    # Where anyone may read it: pytest's own folders are closed to others.
    folder = Path(tempfile.mkdtemp(prefix="muster-test-sif-"))
    folder.chmod(0o755)
    source = podman.engine.save(image, folder)
    try:
        sif.make(apptainer, source, folder / "muster.sif", folder)
        shutil.rmtree(folder / "oci", ignore_errors=True)
        yield Sif(apptainer, folder / "muster.sif")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def somebody(tmp_path: Path) -> Iterator[Path]:
    """A folder that uid 65534 owns and can reach, whoever the tests run as."""
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    os.chown(folder, 65534, 65534)
    yield folder
    shutil.rmtree(folder)
