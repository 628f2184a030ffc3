"""What a run leaves to go on from.

manager.py writes the checkpoints of a run, finds and loads them; storage.py has their files, for
torch.distributed.checkpoint; run_directory.py the folder of a run: whose it is, and where an earlier attempt stopped.
"""

from muster.train.checkpoint.manager import (
    CheckpointManager,
    Progress,
    State,
    Statistics,
    TrainState,
    folder_of,
    head,
    is_complete,
    is_damage,
    load,
    load_into,
    load_newest,
    misfit,
    passed_over,
    put_back,
    saved,
    split,
    step_of,
)

__all__ = [
    "CheckpointManager",
    "Progress",
    "State",
    "Statistics",
    "TrainState",
    "folder_of",
    "head",
    "is_complete",
    "is_damage",
    "load",
    "load_into",
    "load_newest",
    "misfit",
    "passed_over",
    "put_back",
    "saved",
    "split",
    "step_of",
]
