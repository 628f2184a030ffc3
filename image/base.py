"""A base image made from Debian's packages, where no registry can be reached."""

import os
import shutil
import tempfile
from pathlib import Path

from image.engines import Engine
from image.errors import run
from image.settings import Settings, apt_options
from train.errors import MusterError

SUITE = "bookworm"
# In the image of those who built it from a mirror of their own.
PUBLIC = f"deb http://deb.debian.org/debian {SUITE} main"
IMAGE = f"localhost/muster-base:{SUITE}"


def make(engine: Engine, image: str, settings: Settings, epoch: str) -> None:
    """Makes `image` of the least that Debian needs.

    Args:
        engine: where it goes.
        image: its name.
        settings: how to reach the packages.
        epoch: the time of every file, in seconds.

    Raises:
        MusterError: mmdebstrap is missing, or failed.
    """
    if shutil.which("mmdebstrap") is None:
        raise MusterError(
            "a base image made from Debian's packages needs mmdebstrap",
            seen="no mmdebstrap on PATH",
            fix="sudo apt-get install --no-install-recommends mmdebstrap, or make image BASE_IMAGE=REGISTRY/IMAGE",
        )
    with tempfile.TemporaryDirectory(prefix="muster-base-") as folder:
        tar = Path(folder) / "root.tar"
        argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates"]
        options = Path(folder) / "apt.conf"
        options.write_text("".join(f"{line}\n" for line in apt_options()))
        argv += ["--aptopt", str(options)]
        # What mmdebstrap was told of this machine, it would leave in the image.
        left = ("etc/apt/apt.conf.d/99mmdebstrap", "etc/resolv.conf", "etc/hostname")
        argv += ["--customize-hook", "rm -f " + " ".join(f'"$1/{path}"' for path in left)]
        argv += [SUITE, str(tar)]
        if "apt.sources" in settings.secrets:
            argv[-2:-2] = ["--customize-hook", f"echo '{PUBLIC}' > \"$1/etc/apt/sources.list\""]
            argv.append(str(settings.secrets["apt.sources"]))
        run(argv, env={**os.environ, "SOURCE_DATE_EPOCH": epoch})
        engine.import_root(tar, image)
