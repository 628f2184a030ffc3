"""Fixtures that run the commands as users do: as processes, from any folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

RECORDINGS = Path(__file__).resolve().parent.parent / "recordings"
COMMANDS = Path(sys.executable).parent

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Prefixes of variables that a scheduler, a launcher or torchrun may have left in the test runner's own environment.
FOREIGN = ("SLURM_", "PBS_", "PMI", "OMPI_", "PET_", "TORCHELASTIC_", "MUSTER_", "MASTER_", "CUDA_VISIBLE", "OMP_NUM")


def clean_environment() -> dict[str, str]:
    """This process's variables, without those that describe a job, and with this machine's GPUs hidden."""
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PYTHONPATH", "PYTHONSAFEPATH"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in ranks}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def command() -> Run:
    """Runs `train` or `muster` with arguments, to its end or the deadline."""

    def run(
        name: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 240
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(COMMANDS / name), *arguments],
            env={**clean_environment(), **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def recordings() -> Path:
    """The folder of recorded environments."""
    return RECORDINGS
