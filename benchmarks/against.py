"""A comparison of this checkout with one of its commits, by whole runs of `train ddp`, in turns.

    python benchmarks/against.py COMMIT [--rounds 7] [--record]

Both run with this environment's Python and packages; the commit is unpacked into a temporary folder. Rates are those of
summary.json. The result is the ratio within a round, and more than 1 always means that this checkout is faster: its
rates are divided by the commit's, and the commit's seconds by those of this checkout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from results import ROOT, interleaved, middle, parser, publish, ratios, spread, start, table

TRAIN = Path(sys.executable).parent / "train"
EPOCH = "train loss"
"""Part of the line that the trainer prints after its last step here."""

FIRST_STEP, PROCESSORS = "seconds to the first step", "seconds of processors"
IMAGES = ("--model=resnet18", "--image-size=64", "--num-classes=10")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The arguments of a run, and the figures of it that count: keys of what `measure` returns."""

    arguments: tuple[str, ...]
    figures: tuple[str, ...]


MEASUREMENTS = {
    "resnet18, 64 px": Measurement(arguments=(*IMAGES, "--max-steps=40"), figures=("images_per_second",)),
    "gpt-tiny": Measurement(
        arguments=("--model=gpt-tiny", "--batch-size=8", "--max-steps=120"), figures=("tokens_per_second",)
    ),
    # A checkpoint about every two seconds, written while the steps go on.
    "resnet18, 64 px, saving": Measurement(
        arguments=(*IMAGES, "--max-steps=60", "--save-every=0.03"), figures=("images_per_second",)
    ),
    "start": Measurement(
        arguments=("--image-size=32", "--num-classes=10", "--num-samples=64", "--max-steps=1"),
        figures=(FIRST_STEP, PROCESSORS),
    ),
}


def unpack(commit: str, folder: Path) -> None:
    """Puts the files of a commit into `folder`.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=60)


def measure(checkout: str, arguments: Sequence[str]) -> dict[str, float]:
    """The figures of one run of a checkout: those of summary.json, and the seconds that it took."""
    env = dict(os.environ, PYTHONPATH=checkout)
    with tempfile.TemporaryDirectory() as folder:
        common = ("--nproc-per-node=2", "--data=synthetic", f"--runs-dir={folder}", "--name=run")
        taken = start([str(TRAIN), "ddp", *arguments, *common], env, EPOCH)
        summary = json.loads((Path(folder) / "run/summary.json").read_text())
    return {**summary, FIRST_STEP: taken.line_s, PROCESSORS: taken.cpu_s}


def main() -> None:
    """Measures and prints the table."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.set_defaults(rounds=7)
    options.add_argument("commit", help="any name that git knows: a hash, a tag, HEAD~1")
    options.add_argument("--only", choices=MEASUREMENTS, action="append", help="one of the measurements")
    asked = options.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        unpack(asked.commit, Path(folder))
        for name in asked.only or MEASUREMENTS:
            arguments = MEASUREMENTS[name].arguments
            runs = interleaved({path: partial(measure, path, arguments) for path in (str(ROOT), folder)}, asked.rounds)
            for figure in MEASUREMENTS[name].figures:
                own, before = ([run[figure] for run in runs[path]] for path in (str(ROOT), folder))
                gains = ratios(before, own) if figure in (FIRST_STEP, PROCESSORS) else ratios(own, before)
                words = f"{name}: {figure.replace('_', ' ')}"
                rows.append([words, spread(own, 2), spread(before, 2), middle(gains), spread(gains)])
    head = ["two gloo ranks on synthetic data", "this one", "the commit", "gain, middle half", "gain, range"]
    words = "Medians. A gain of more than 1 is for this checkout: of rates this by that, of seconds that by this."
    described = ["git", "describe", "--always", "--dirty"]
    own = subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    publish(f"{own} against {asked.commit}", [*table(head, rows), "", words], record=asked.record)


if __name__ == "__main__":
    main()
