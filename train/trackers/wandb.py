"""Weights & Biases: by default offline, in the run's folder; `wandb sync runs/NAME/wandb/offline-*` sends it later.

WANDB_MODE, WANDB_PROJECT and its other variables mean what they do elsewhere. Neither the code nor what git knows of it
is taken along.
"""

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class Run:
    """A run there.

    Args:
        id: by which a run that is resumed is the same one.
    """

    def __init__(self, folder: Path, id: str, settings: Mapping[str, Any]) -> None:
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "muster"),
            name=folder.name,
            id=id,
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        # By the step of the optimizer, which may go back where a run is resumed; wandb's own count may not.
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def open_target(folder: Path, step: int, settings: Mapping[str, Any]) -> Run:
    """The run in `folder`, the same as before where it is resumed."""
    known = folder / "wandb.id"
    if not known.exists():
        known.write_text(uuid.uuid4().hex[:8])
    return Run(folder, known.read_text().strip(), settings)
