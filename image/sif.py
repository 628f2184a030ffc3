"""`make sif`: makes the Apptainer image from the one that `make image` built."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from image import build, engines
from image.errors import Parser, command, output, run
from train.errors import MusterError

# zstd at its third level squashes 5.5 GB in 8 s on two cores, gzip in 169 s, to the same size.
SQUASH = "-comp zstd -Xcompression-level 3"
OWN_APPTAINER = build.ROOT / ".apptainer"


def main(argv: Sequence[str]) -> None:
    """Makes the SIF that `argv` asks for, and says where it is.

    Raises:
        MusterError: it can't be made.
    """
    arguments = _parse(argv)
    source = arguments.source
    target = Path(arguments.output).resolve()
    if not target.parent.is_dir():
        raise MusterError("there is no such folder", seen=str(target.parent), fix="mkdir it, or SIF=OTHER.sif")
    apptainer = find_apptainer()
    # Beside its target, as /tmp may be too small for it.
    with tempfile.TemporaryDirectory(prefix=".muster-sif-", dir=target.parent) as folder:
        if not source:
            engine = engines.find(arguments.engine)
            image = arguments.image or build.names(build.VARIANTS[arguments.variant])[0]
            if not engine.has(image):
                raise MusterError(f"{engine.name} has no image of that name", seen=image, fix="make image first")
            print(f"Saving {image} from {engine.name}", flush=True)
            source = engine.save(image, Path(folder))
        print(f"Building {target.name}", flush=True)
        make(apptainer, source, target, Path(folder))
    size = target.stat().st_size / 1e9
    shown = Path(apptainer).name if shutil.which("apptainer") else os.path.relpath(apptainer)
    print(f"\n{target.name} is ready, {size:.2f} GB: {shown} exec --nv {arguments.output} train ddp")


def make(apptainer: str, source: str, target: Path, scratch: Path) -> None:
    """Builds apptainer.def.

    Args:
        apptainer: the command.
        source: where the image is, in Apptainer's words: `oci:FOLDER`.
        target: the SIF; replaced if it is there.
        scratch: a folder for what is left over.
    """
    bootstrap, _, place = source.partition(":")
    words = {"BOOTSTRAP": bootstrap, "FROM": place.removeprefix("//")}
    argv = [apptainer, "--quiet", "build", "--force", "--disable-cache", "--mksquashfs-args", SQUASH]
    for name, value in words.items():
        argv += ["--build-arg", f"{name}={value}"]
    run([*argv, target, build.ROOT / "apptainer.def"], env=environment(os.environ, scratch))


def environment(env: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The variables for a build by Apptainer."""
    wanted = dict(env)
    wanted.setdefault("APPTAINER_TMPDIR", str(scratch))
    wanted.setdefault("SOURCE_DATE_EPOCH", build.commit_time())
    bounding = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "CapBnd" in line]
    # Root without CAP_SYS_RESOURCE (24), as in a sandbox, could not take it on.
    if os.geteuid() == 0 and bounding and not int(bounding[0], 16) >> 24 & 1:
        wanted.setdefault("APPTAINER_DROP_CAPS", "CAP_SYS_RESOURCE")
    return wanted


def find_apptainer() -> str:
    """The command that makes and runs a SIF; on a Debian without one, one of this clone's own.

    Raises:
        MusterError: there is none, and none can be had.
    """
    for name in ("apptainer", "singularity"):
        found = shutil.which(name)
        if found:
            return found
    own = OWN_APPTAINER / "bin" / "apptainer"
    if not own.exists():
        print(f"Installing Apptainer in {OWN_APPTAINER.name}/, as there is none on PATH", flush=True)
        try:
            output([build.ROOT / "scripts" / "install-apptainer.sh", OWN_APPTAINER])
        except MusterError as error:
            raise MusterError(
                "there is no Apptainer on PATH, and none could be installed for this clone",
                seen=str(error).replace("\n", " ")[:400],
                fix="https://apptainer.org/docs/admin/latest/installation.html, then make sif again",
            ) from None
    return str(own)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="make sif", description=__doc__)
    parser.add_argument("--engine", default="", help=f"where the image is: {', '.join(engines.NAMES)}")
    parser.add_argument("--variant", default="cuda13", choices=build.VARIANTS)
    parser.add_argument("--image", default="", help="the image's name, if not what make image called it")
    parser.add_argument("--source", default="", help="another place: oci:FOLDER, docker-archive:FILE, docker://NAME")
    parser.add_argument("--output", default="muster.sif", help="the file to make")
    return parser.parse_args(argv)


if __name__ == "__main__":
    command(main)
