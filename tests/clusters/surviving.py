"""A training that a test disturbs after its first checkpoint, and the same training undisturbed."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from muster.train.checkpoint import manager as checkpoint
from tests.clusters.deadline import wait_for
from tests.clusters.processes import Process
from tests.clusters.weights import BIN, ONE_THREAD, TRAIN, distance, parameters, summary

# Ten steps per epoch, so that a disturbance after the first epoch's checkpoint comes in a later epoch. No data workers,
# and a model that takes milliseconds per step: most of the time is start-up.
TRAINING = ["--model=gpt-tiny", "--data=synthetic", "--seq-len=32", "--num-samples=80", "--batch-size=4"]
TRAINING += ["--no-bf16", "--seed=5", "--keep-checkpoints=1", "--nproc-per-node=1"]
STEPS_OF_EPOCH = 10
LONG = [*TRAINING, "--epochs=6"]

STOPPED = re.compile(r"stopped by a warning after step (\d+)")


class Cluster(Protocol):
    """The members that the clusters of both schedulers have."""

    nodes: list[str]

    def processes(self, node: str) -> list[Process]: ...

    def idle(self, timeout: float = ...) -> None: ...


def train_undisturbed(folder: Path, argv: Sequence[str]) -> dict[str, torch.Tensor]:
    """Runs the training `argv` in `folder`, with two ranks on this machine; returns the parameters."""
    # No variable of a job or launcher in which the tests may run.
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), **ONE_THREAD}
    command = [TRAIN, "ddp", *argv, "--nproc-per-node=2", "--name=straight"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return parameters(folder / "runs" / "straight")


def ranks(cluster: Cluster) -> list[int]:
    """The ids of all training processes on all nodes: ranks and data workers, without the agents."""
    found = [process for node in cluster.nodes for process in cluster.processes(node)]
    return [process.pid for process in found if process.argv[1:4] == ["-u", "-m", "muster.train"]]


def kill_ranks(cluster: Cluster) -> None:
    """Kills all training processes, those of deleted jobs and stopped ones too."""
    for rank in ranks(cluster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def hold(cluster: Cluster, run: Path, num_ranks: int = 2) -> list[int]:
    """Stops the training in `run` after its first checkpoint, for a disturbance in mid-training; returns its ranks."""
    wait_for(f"a checkpoint of {run.name}", lambda: checkpoint.saved(run), 200, interval_s=0.01)
    held = ranks(cluster)
    for rank in held:
        os.kill(rank, signal.SIGSTOP)
    assert len(held) == num_ranks, held
    assert not (run / "summary.json").exists(), "the training was over before anything could happen to it"
    return held


def release(held: Sequence[int], heard: signal.Signals, timeout_s: float) -> None:
    """Waits until each rank has got that signal, then lets the ranks go on, as some schedulers do by themselves."""
    for rank in held:
        wait_for(f"{heard.name} at process {rank}", lambda rank=rank: not waits_without(rank, heard), timeout_s)
    for rank in held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)


def waits_without(pid: int, heard: signal.Signals) -> bool:
    """Whether a process is still stopped, and that signal is not pending."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(re.findall(r"^(\w+):\s*(\w+)", status, re.MULTILINE))
    waiting = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return fields["State"] == "T" and not waiting >> (heard - 1) & 1


def assert_nothing_lost(run: Path, output: str) -> None:
    """Asserts that `output` has one stop by a warning, and that `run` resumed from the checkpoint of that step."""
    stopped = [int(step) for step in STOPPED.findall(output)]
    assert len(stopped) == 1, output
    assert stopped[0] > STEPS_OF_EPOCH, output
    assert resumed_step(run) == stopped[0]


def resumed_step(run: Path) -> int:
    """The step of the checkpoint from which the run was last resumed."""
    return checkpoint.step_of(Path(summary(run)["resumed_from"]))


def assert_undisturbed(run: Path, straight: dict[str, torch.Tensor]) -> None:
    """Asserts that `run` ended on two nodes, with exactly the parameters of the undisturbed run."""
    found = summary(run)
    assert (found["world_size"], found["num_nodes"]) == (2, 2)
    assert distance(parameters(run), straight) == 0


def assert_nothing_left(cluster: Cluster, timeout_s: float = 60) -> None:
    """Waits until no job is left, and no process of a job on any node."""
    cluster.idle(timeout_s)
    for node in cluster.nodes:
        wait_for(f"no process on {node}", lambda node=node: not cluster.processes(node), timeout_s)
