"""`python -m train.export RUN`: a run's weights as one plain file, for torch.load and torchvision."""

import argparse
import sys
from pathlib import Path

import torch

from train import checkpoint
from train.errors import FAILED, MusterError
from train.files import write_atomically


def export(source: Path, file: Path | None, *, last: bool = False) -> tuple[Path, Path]:
    """Writes the weights of a run's newest whole checkpoint, or of one checkpoint; returns both paths.

    Those are the moving averages, which have validated, where the run has made such.

    Args:
        source: the run's folder, or a checkpoint.
        file: where they go; by default `weights.pt` in the run's folder, or beside the checkpoint.
        last: the weights of the last step, averages or not.

    Raises:
        MusterError: there is no checkpoint, it is damaged, or `file` exists or can't be written.
    """
    if not source.exists():
        raise MusterError("there is no such run", seen=str(source), fix="train export runs/NAME")
    if checkpoint.step_of(source) >= 0:
        path, state = source, checkpoint.load(source)
    else:
        path, state, notes = checkpoint.load_newest(source)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    file = file or (source.parent if path == source else source) / "weights.pt"
    if file.exists():
        raise MusterError("there is such a file already", seen=str(file), fix="train export RUN --to ANOTHER.pt")
    weights = state["model"] if last else {**state["model"], **state.get("ema", {})}
    try:
        write_atomically(file, lambda out: torch.save(weights, out))
    except (OSError, RuntimeError) as error:
        # torch's writer makes a RuntimeError of its own of a full disk.
        cause = error if isinstance(error, OSError) else error.__context__
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error).partition("\n")[0]
        fix = "make room, or train export RUN --to FILE"
        raise MusterError(
            f"the weights could not be written: {reason}", seen=str(file), fix=fix, code=FAILED
        ) from error
    return path, file


def main() -> None:
    parser = argparse.ArgumentParser(prog="train export")
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--last", action="store_true")
    asked = parser.parse_args()
    try:
        path, file = export(asked.run, asked.to, last=asked.last)
    except MusterError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
    print(f"{file}: the weights of {path}")


if __name__ == "__main__":
    main()
