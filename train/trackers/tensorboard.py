"""TensorBoard: event files in the run's folder. `tensorboard --logdir runs` shows all runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Events:
    """Writes event files.

    Args:
        step: where the run goes on; what was written of later steps is taken out of the curves.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self.writer.close()


def open_target(folder: Path, step: int, settings: Mapping[str, Any]) -> Events:
    """The event files of the run in `folder`, with its settings as a text."""
    events = Events(folder, step)
    if not step:
        events.writer.add_text("settings", f"```json\n{json.dumps(settings, indent=2)}\n```")
    return events
