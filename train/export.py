"""`python -m muster.train.export RUN`: a run's weights as one plain file, for torch.load and torchvision."""

from muster import interruption

if __name__ == "__main__":
    interruption.start("train export")

import argparse
import os
from pathlib import Path

import torch

from muster.errors import ExitCode, MusterError, explaining, notify, one_line
from muster.train.checkpoint import manager
from muster.train.checkpoint.storage import write_atomically


def export(source: Path, file: Path | None) -> tuple[Path, Path]:
    """Writes the weights of a run's newest undamaged checkpoint, or of one checkpoint, to a file; returns both paths.

    Args:
        source: the run's folder, its folder checkpoints/, or a checkpoint.
        file: the file to write; by default `weights.pt` in the run's folder, or beside the checkpoint.

    Raises:
        MusterError: there is no checkpoint, it is damaged or can't be read, or `file` exists or can't be written.
    """
    if not os.path.exists(source):  # Path.exists raises where this user lacks permission
        raise MusterError("there is no such run, or no access to it", seen=str(source), fix="train export runs/NAME")
    if source.name in ("", ".."):  # `train export .`: the real name shows what the folder is
        source = Path(os.path.realpath(source))
    with explaining("the run can't be read", seen=source, fix="its owner can give access: chmod -R go+rX FOLDER"):
        if manager.names_checkpoint(source):
            path, state, home = source, manager.load(source), source.parent
        else:
            home = source if source.name != "checkpoints" or manager.saved(source) else source.parent
            path, state, notes = manager.load_newest(home)
            for note in notes:
                notify(f"note: {one_line(note)}")
    file = file or home / "weights.pt"
    if os.path.lexists(file):
        raise MusterError("the file exists already", seen=str(file), fix="train export RUN --to ANOTHER.pt")
    try:
        write_atomically(file, lambda out: torch.save(state["model"], out))
    except (OSError, RuntimeError) as error:
        # On a full disk torch's writer raises a RuntimeError of its own, whose context is the OSError.
        cause = error if isinstance(error, OSError) else error.__context__
        raise MusterError(
            f"the weights could not be written: {cause}",
            seen=str(file),
            fix="make room, or train export RUN --to FILE, in a folder that exists",
            code=ExitCode.FAILED,
        ) from error
    return path, file


def main() -> None:
    parser = argparse.ArgumentParser(prog="train export")
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path)
    asked = parser.parse_args()
    with interruption.command(parser.prog):
        path, file = export(asked.run, asked.to)
        print(one_line(f"{file}: the weights of {path}"))


if __name__ == "__main__":
    main()
