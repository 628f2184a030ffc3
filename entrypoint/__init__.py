"""From the scheduler's variables to an exec: pure functions over a mapping, without torch."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _claim_train() -> None:
    # PYTHONPATH comes before the installed packages, and a user's folder on it often holds a train.py: found first,
    # it would be imported in place of our package. Loading ours by its path settles the name for this process.
    if "train" in sys.modules:
        return
    folder = ROOT / "train"
    spec = importlib.util.spec_from_file_location("train", folder / "__init__.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"no package at {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train"] = module
    spec.loader.exec_module(module)


_claim_train()
