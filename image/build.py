"""`make image`: builds the Containerfile with the engine that is there, as it is committed."""

import argparse
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from image import base, engines, settings
from image.errors import Parser, command, output, run
from train.errors import MusterError

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Variant:
    """An image for a generation of CUDA.

    Attributes:
        lock: its Python packages.
        base_image: the CUDA base that matches its torch.
        suffix: what its tags end in.
    """

    lock: str
    base_image: str
    suffix: str


VARIANTS = {
    "cuda13": Variant("requirements.lock", "docker.io/nvidia/cuda:13.2.1-base-ubuntu24.04", ""),
    # For drivers from 525 on: torch 2.10.0 is the last on PyPI that was built for CUDA 12.
    "cuda12": Variant("requirements-cuda12.lock", "docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04", "cuda12"),
}


def main(argv: Sequence[str]) -> None:
    """Builds the image that `argv` asks for, and says what it is called.

    Raises:
        MusterError: it can't be built.
    """
    arguments = _parse(argv)
    variant = VARIANTS[arguments.variant]
    if arguments.variant == "cuda12" and platform.machine() != "x86_64":
        raise MusterError(
            "the variant for CUDA 12 is for x86_64 only: elsewhere its torch has no CUDA",
            seen=f"VARIANT=cuda12 on {platform.machine()}",
            fix="make image, which needs a driver of 580 or newer",
        )
    engine = _engine(arguments.engine)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or commit_time()
    tags = [arguments.tag] if arguments.tag else names(variant)
    with tempfile.TemporaryDirectory(prefix="muster-build-") as folder:
        shown = settings.collect(Path(folder), os.environ, arguments.apt_sources, engine.can_bind)
        base_image = arguments.base_image or _base(engine, variant, shown, epoch)
        print(f"Building {tags[0]} with {engine.name} from {base_image}, {variant.lock}", flush=True)
        make(engine, variant, base_image, tags, shown, epoch)
    print(f"\n{tags[0]} is ready: {engine.name} run --rm {tags[0]} train ddp")


def make(
    engine: engines.Engine,
    variant: Variant,
    base_image: str,
    tags: Sequence[str],
    shown: settings.Settings,
    epoch: str,
    *options: str,
) -> None:
    """Builds the Containerfile.

    Args:
        engine: by which.
        variant: its lock.
        base_image: what it starts from.
        tags: its names.
        shown: how the build reaches its packages.
        epoch: the time that the image and its files carry, in seconds.
        options: more words for the engine's build command.

    Raises:
        MusterError: it failed.
    """
    arguments = {
        "BASE_IMAGE": base_image,
        "LOCK": variant.lock,
        "LOCK_SHA256": digest(variant.lock),
        "VERSION": version(),
        "REVISION": revision(),
        "SOURCE_DATE_EPOCH": epoch,
    }
    engine.build(ROOT, tags, arguments, shown, options)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="make image", description=__doc__)
    parser.add_argument("--engine", default="", help=f"{', '.join(engines.NAMES)}; the first that works")
    parser.add_argument("--variant", default="cuda13", choices=VARIANTS)
    parser.add_argument("--base-image", default="", help="the image to start from: an Ubuntu or Debian")
    parser.add_argument("--tag", default="", help="the image's name; muster:VERSION and muster:latest")
    parser.add_argument("--apt-sources", default="", help="a file of apt sources in place of the base image's own")
    arguments = parser.parse_args(argv)
    if arguments.apt_sources and not Path(arguments.apt_sources).is_file():
        raise MusterError("there is no such file", seen=f"APT_SOURCES={arguments.apt_sources}", fix="APT_SOURCES=FILE")
    return arguments


def _engine(wanted: str) -> engines.Engine:
    """The engine; on a Debian or Ubuntu without any, podman is installed where that may be done."""
    try:
        return engines.find(wanted)
    except MusterError:
        if wanted or shutil.which("apt-get") is None:
            raise
    run([ROOT / "scripts" / "install-packages.sh", ROOT / "tests" / "image" / "packages.txt"])
    return engines.find()


def _base(engine: engines.Engine, variant: Variant, shown: settings.Settings, epoch: str) -> str:
    """The CUDA base, or one of Debian's packages where no registry hands it out."""
    if engine.has(variant.base_image):
        return variant.base_image
    print(f"Pulling {variant.base_image}", flush=True)
    refusal = engine.pull(variant.base_image)
    if refusal is None:
        return variant.base_image
    print(
        f"note: {variant.base_image} can't be had: {refusal}\n"
        f"note: the image starts from Debian's own packages instead ({base.IMAGE}), without CUDA's forward "
        "compatibility:\n      it asks for a driver that knows the CUDA of its torch. BASE_IMAGE=... names another.",
        file=sys.stderr,
        flush=True,
    )
    if not engine.has(base.IMAGE):
        base.make(engine, base.IMAGE, shown, epoch)
    return base.IMAGE


def names(variant: Variant) -> list[str]:
    """The tags of an image, the one to use first: `muster` alone, then with its version."""
    suffix = variant.suffix
    return [f"muster:{suffix or 'latest'}", f"muster:{version()}{suffix and '-'}{suffix}"]


def version() -> str:
    """The project's version."""
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise MusterError("pyproject.toml names no version", seen=str(ROOT / "pyproject.toml"), fix="git checkout it")
    return found[1]


def digest(lock: str) -> str:
    """The SHA-256 of a lock, in hexadecimal digits."""
    return hashlib.sha256((ROOT / lock).read_bytes()).hexdigest()


def revision() -> str:
    """The commit, with `-dirty` where files of it were changed; `unknown` outside of a clone."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = output([*git, "rev-parse", "HEAD"])
        changed = output([*git, "status", "--porcelain", "--untracked-files=no"])
    except MusterError:
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def commit_time() -> str:
    """The time of the commit, in seconds; 0 outside of a clone."""
    try:
        return output(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]) or "0"
    except MusterError:
        return "0"


if __name__ == "__main__":
    command(main)
