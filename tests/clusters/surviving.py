"""A training that something happens to, while it is known where it is; and the same one that nobody disturbs."""

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

# Ten steps an epoch: what comes after the first one's checkpoint comes in one of the next. No data workers, and a model
# that takes milliseconds a step: the rest is start-up.
TRAINING = ["--model=gpt-tiny", "--data=synthetic", "--seq-len=32", "--num-samples=80", "--batch-size=4"]
TRAINING += ["--no-bf16", "--seed=5", "--keep-checkpoints=1", "--nproc-per-node=1"]
STEPS_OF_EPOCH = 10
LONG = [*TRAINING, "--epochs=6"]

STOPPED = re.compile(r"stopped by a warning after step (\d+)")


class Cluster(Protocol):
    """What both schedulers' clusters have."""

    nodes: list[str]

    def processes(self, node: str) -> list[Process]: ...

    def idle(self, timeout: float = ...) -> None: ...


def train_undisturbed(folder: Path, argv: Sequence[str]) -> dict[str, torch.Tensor]:
    """The parameters after the training `argv` by two ranks of this machine, in `folder`."""
    # Nothing of a job or launcher that the tests may run in.
    env = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), **ONE_THREAD}
    command = [TRAIN, "ddp", *argv, "--nproc-per-node=2", "--name=straight"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return parameters(folder / "runs" / "straight")


def ranks(cluster: Cluster) -> list[int]:
    """The processes of the trainings on all nodes, their data workers among them, without their agents."""
    found = [process for node in cluster.nodes for process in cluster.processes(node)]
    return [process.pid for process in found if process.argv[1:4] == ["-u", "-m", "muster.train"]]


def kill_ranks(cluster: Cluster) -> None:
    """Ends all trainings, those of deleted jobs and those that are stopped too."""
    for rank in ranks(cluster):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def hold(cluster: Cluster, run: Path, num_ranks: int = 2) -> list[int]:
    """The ranks of the training in `run`, stopped after its first checkpoint: what comes now comes in mid-training."""
    wait_for(f"a checkpoint of {run.name}", lambda: checkpoint.saved(run), 200, interval_s=0.01)
    held = ranks(cluster)
    for rank in held:
        os.kill(rank, signal.SIGSTOP)
    assert len(held) == num_ranks, held
    assert not (run / "summary.json").exists(), "the training was over before anything could happen to it"
    return held


def release(held: Sequence[int], heard: signal.Signals, timeout_s: float) -> None:
    """Lets the ranks go on, once each of them has been sent that signal; some schedulers let them go on themselves."""
    for rank in held:
        wait_for(f"{heard.name} at process {rank}", lambda rank=rank: not waits_without(rank, heard), timeout_s)
    for rank in held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGCONT)


def waits_without(pid: int, heard: signal.Signals) -> bool:
    """Whether a process is still stopped, and that signal does not wait for it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(re.findall(r"^(\w+):\s*(\w+)", status, re.MULTILINE))
    waiting = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return fields["State"] == "T" and not waiting >> (heard - 1) & 1


def assert_nothing_lost(run: Path, output: str) -> None:
    """Holds if the one warning in `output` left a checkpoint of the very step, and `run` went on from there."""
    stopped = [int(step) for step in STOPPED.findall(output)]
    assert len(stopped) == 1, output
    assert stopped[0] > STEPS_OF_EPOCH, output
    assert resumed_step(run) == stopped[0]


def resumed_step(run: Path) -> int:
    """The step of the checkpoint that the last attempt of the run began with."""
    return checkpoint.step_of(Path(summary(run)["resumed_from"]))


def assert_undisturbed(run: Path, straight: dict[str, torch.Tensor]) -> None:
    """Holds if `run` is complete, and has the bits of the undisturbed one."""
    found = summary(run)
    assert (found["world_size"], found["num_nodes"]) == (2, 2)
    assert distance(parameters(run), straight) == 0


def assert_nothing_left(cluster: Cluster, timeout_s: float = 60) -> None:
    """Holds if no process of a job is left on any host."""
    cluster.idle(timeout_s)
    for node in cluster.nodes:
        wait_for(f"no process on {node}", lambda node=node: not cluster.processes(node), timeout_s)
