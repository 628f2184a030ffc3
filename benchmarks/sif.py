"""The sizes of the image and its SIF, and how much longer a command takes to start inside the SIF than on the host.

The start is also timed with the host's root at /host, without a fabric, and with a fabric of stand-in libraries. Image
and SIF have to exist: `make image sif`.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from results import ROOT, interleaved, parser, publish, seconds, spread, table

sys.path.insert(0, str(ROOT))
from muster.errors import MusterError
from tests.fabric import nodes

BIN = Path(sys.executable).parent


def inspect(engine: str, image: str, what: str) -> str:
    """The value of an image that its engine shows for the template expression `what`.

    Raises:
        MusterError: the engine or the image is not there.
    """
    argv = [engine, "inspect", "--type=image", f"--format={{{{{what}}}}}", image]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise MusterError(
            f"{engine} has no such image", seen=image, fix="make image sif, or --engine, --image"
        ) from None


def sizes(engine: str, image: str, file: Path) -> list[str]:
    """The lines of the first table."""
    uncompressed = int(inspect(engine, image, ".Size"))
    rows = [
        [f"the image, uncompressed, as {engine} counts it", f"{uncompressed / 1e9:.2f}"],
        ["the SIF: squashfs with zstd", f"{file.stat().st_size / 1e9:.2f}"],
    ]
    return table(["what", "GB"], rows)


def start_up(apptainer: str, file: Path, rounds: int, slingshot: Path) -> list[str]:
    """The lines of the second table."""
    env = dict(os.environ)
    inside = [apptainer, "exec", str(file)]
    # Execs `true`, so its duration is the time from the command to the exec.
    launch = [str(file), "muster", "run", "--nproc-per-node=1", "--no-python", "true"]
    figures = interleaved(
        {
            "muster --help on the host": partial(seconds, [str(BIN / "muster"), "--help"], env),
            "muster --help in the SIF": partial(seconds, [*inside, "muster", "--help"], env),
            "true in the SIF": partial(seconds, [*inside, "true"], env),
            "muster run true in the SIF": partial(seconds, [apptainer, "exec", *launch], env),
            "the same with /:/host:ro, no fabric": partial(
                seconds, [apptainer, "exec", "--bind=/:/host:ro", *launch], env
            ),
            "the same with Slingshot of stand-ins": partial(
                seconds, [apptainer, "exec", f"--bind={slingshot}:/host:ro", *launch], env
            ),
        },
        rounds,
    )
    host, inner = figures["muster --help on the host"], figures["muster --help in the SIF"]
    more = [b - a for a, b in zip(host, inner, strict=True)]
    rows = [[name, spread(times)] for name, times in figures.items()]
    return [
        *table(["start-up", "seconds, median (least to most)"], rows),
        "",
        f"The SIF against the host: {statistics.median(more):.3f} s more ({min(more):.3f} to {max(more):.3f}).",
    ]


def main() -> None:
    """Measures, prints the tables, and with --record adds them to RESULTS.md."""
    options = parser(__doc__ or "")
    options.add_argument("--sif", default=str(ROOT / "muster.sif"), help="the SIF (default: muster.sif)")
    options.add_argument("--image", default="muster:latest", help="the image (default: %(default)s)")
    options.add_argument("--engine", default="podman", help="docker or podman (default: %(default)s)")
    arguments = options.parse_args()
    file = Path(arguments.sif)
    if not file.is_file():
        raise MusterError("the SIF is measured, and is not here", seen=str(file), fix="make image sif")
    apptainer = shutil.which("apptainer") or str(ROOT / ".apptainer" / "bin" / "apptainer")
    version = subprocess.run([apptainer, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    base = inspect(arguments.engine, arguments.image, 'index .Config.Labels "org.opencontainers.image.base.name"')
    lines = [
        f"{arguments.engine}, {version}; requirements.lock on {base}.",
        "",
        *sizes(arguments.engine, arguments.image, file),
    ]
    with tempfile.TemporaryDirectory() as folder:
        lines += ["", *start_up(apptainer, file, arguments.rounds, nodes.host(Path(folder)))]
    publish("Image", lines, record=arguments.record)


if __name__ == "__main__":
    try:
        main()
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
