"""The image and the SIF, built once per session from this checkout, and the clusters in which they run."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.conftest import four_ranks, grid_engine2, slurm2, slurm3  # noqa: F401
from tests.clusters.requirements import refuse, require_programs
from tests.image.podman import Podman
from tests.image.sif import Sif

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ("buildah", "mksquashfs", "mmdebstrap", "patchelf", "podman", "runc")

FIRST_TEST_S = 4000
"""The first test waits for the base, the image and the SIF: seven minutes alone, half an hour beside other lanes."""

# A mark in all settings that the build gets: no layer of the image may hold it.
SENTINEL = "sentinel-of-this-machine"

BASE, IMAGE, AGAIN = "localhost/muster-base:bookworm", "localhost/muster:test", "localhost/muster:again"

# The base has no package sources of its own: packages can be installed in it only by APT_SOURCES.
SOURCES = f"""# {SENTINEL}
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
"""
# Files that mmdebstrap leaves, with settings of this machine.
LEFT_BY_MMDEBSTRAP = (
    *("apt/apt.conf.d/99mmdebstrap", "apt/sources.list", "apt/sources.list.d/0000sources.list"),
    *("resolv.conf", "hostname"),
)


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """podman with a storage that exists only during this session."""
    require_programs(*PROGRAMS)
    if os.geteuid() != 0:
        refuse(f"building and running images in a sandbox needs root; user id is {os.geteuid()}")
    podman = Podman(tmp_path_factory.mktemp("podman"))
    yield podman
    podman.close()


@pytest.fixture(scope="session")
def build_env(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables for `make image`; each of the machine's settings for package indexes holds SENTINEL."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "apt.sources").write_text(SOURCES)
    (folder / "apt.conf").write_text(f'Acquire::http::Proxy::{SENTINEL}.invalid "DIRECT";\n')
    certificates = [os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"]
    bundle = next(Path(place) for place in certificates if place and Path(place).is_file())
    (folder / "ca.pem").write_bytes(bundle.read_bytes() + f"# {SENTINEL}\n".encode())
    return {
        **podman.env,
        "ENGINE": "podman",
        "BASE_IMAGE": BASE,
        "APT_SOURCES": str(folder / "apt.sources"),
        "APT_CONFIG": str(folder / "apt.conf"),
        "PIP_CERT": str(folder / "ca.pem"),
        "PIP_TRUSTED_HOST": f"{SENTINEL}.invalid",
    }


def make_base(podman: Podman, folder: Path) -> None:
    """Makes a minimal base image of Debian, as the tests can't reach registries.

    Args:
        podman: gets the image.
        folder: an existing folder, for files of the build.
    """
    (folder / "sources.list").write_text(SOURCES)
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True, timeout=60).stdout
    options = re.findall(r"^Acquire::(?:https?::|Check-|Retries).*;$", dump, re.MULTILINE)
    (folder / "apt.conf").write_text("\n".join([*options, ""]))
    hook = "rm -f " + " ".join(f'"$1/etc/{name}"' for name in LEFT_BY_MMDEBSTRAP)
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates"]
    argv += [f"--aptopt={folder}/apt.conf", f"--customize-hook={hook}", "bookworm", "root.tar", "sources.list"]
    subprocess.run(argv, cwd=folder, env={**os.environ, "SOURCE_DATE_EPOCH": commit_time()}, check=True, timeout=600)
    podman("import", folder / "root.tar", BASE, timeout=600)
    (folder / "root.tar").unlink()


def make_image(image: str, env: dict[str, str], *options: str) -> None:
    """Runs what `make image` runs; options go to the engine.

    Raises:
        RuntimeError: it failed; the message has the free disk space, of which a build takes 20 GB.
    """
    done = subprocess.run([ROOT / "image" / "build.sh", *options], env={**env, "TAG": image}, timeout=1700, check=False)
    if done.returncode:
        free = {place: shutil.disk_usage(place).free / 1e9 for place in ("/var/tmp", tempfile.gettempdir())}
        rooms = ", ".join(f"{room:.1f} GB at {place}" for place, room in free.items())
        raise RuntimeError(f"image/build.sh ended with {done.returncode}; free: {rooms}")


@pytest.fixture(scope="session")
def image(podman: Podman, build_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the image, built from the Containerfile with the locked wheels, CUDA's among them, on Debian."""
    make_base(podman, tmp_path_factory.mktemp("base"))
    try:
        make_image(IMAGE, build_env)
    except RuntimeError as error:
        # Gigabytes come from the package indexes: one failed download must not fail all tests of the image. The engine
        # keeps the steps that succeeded; an error in the recipe fails again.
        print(f"the image is built a second time, as {error}", file=sys.stderr)
        make_image(IMAGE, build_env)
    return IMAGE


@pytest.fixture(scope="session")
def image_again(image: str, build_env: dict[str, str]) -> str:
    """The name of the same image, built again from the first step on."""
    make_image(AGAIN, build_env, "--no-cache")
    return AGAIN


@pytest.fixture(scope="session")
def image_sif(podman: Podman, image: str) -> Iterator[Sif]:
    """The SIF that `make sif` makes of the image."""
    # Where anyone may read it: pytest's own folders are closed to others.
    folder = Path(tempfile.mkdtemp(prefix="muster-test-sif-"))
    folder.chmod(0o755)
    env = {**podman.env, "ENGINE": "podman", "IMAGE": image, "SIF": str(folder / "muster.sif")}
    try:
        subprocess.run([ROOT / "image" / "sif.sh"], env=env, timeout=1700, check=True)
        apptainer = shutil.which("apptainer") or shutil.which("singularity") or f"{ROOT}/.apptainer/bin/apptainer"
        yield Sif(apptainer, folder / "muster.sif")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def somebody() -> Iterator[Path]:
    """A folder that uid 65534 owns and can reach, whatever user runs the tests."""
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, 65534, 65534)
    yield folder
    shutil.rmtree(folder)


def commit_time() -> str:
    """The time of this checkout's commit, in seconds."""
    return git("log", "-1", "--format=%ct")


def revision() -> str:
    """The commit as the image names it."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "")


def git(*words: str) -> str:
    """The output of a git command in this checkout."""
    argv = ["git", "-C", str(ROOT), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
