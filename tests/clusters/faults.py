"""Trainings on fake hosts that are stopped at a chosen place, for a test to kill something there.

A rank tells by a file that it has come to the place, and waits there. It is to be killed, or to go on when told.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from muster.train.checkpoint import manager as checkpoint
from tests.clusters.deadline import wait_for
from tests.clusters.hosts import Hosts
from tests.clusters.processes import HostProcess, Process
from tests.clusters.weights import ONE_THREAD, TRAIN

START_S = 150
"""Seconds in which a training gets from its start to a place, on a slow and busy machine."""

END_S = 150
"""Seconds in which all ranks have ended after a fault. A minute is promised; the machine may be slow."""

WHOLE_S = 400
"""Seconds in which an undisturbed training has ended there."""

EPOCH, EPOCHS = 5, 6
"""Steps of an epoch of two ranks, after each of which comes a checkpoint; epochs."""

LONG = ["--model=shufflenet_v2_x0_5", "--data=synthetic", "--num-classes=10", f"--num-samples={2 * 8 * EPOCH}"]
LONG += ["--image-size=16", "--batch-size=8", f"--epochs={EPOCHS}", "--lr=0.01", "--no-bf16", "--seed=5"]

# Found by every Python of the training; only the ranks have RANK. What it waits in can't outlive a broken test.
HOOK = """
import os, time
from pathlib import Path

def stop():
    gate = Path(os.environ["STOP_GATE"])
    (gate / "reached").touch()
    end = time.monotonic() + 600
    while not (gate / "go").exists() and time.monotonic() < end:
        time.sleep(0.02)

def before(owner, name, when):
    function = getattr(owner, name)
    def stops(*args, **kwargs):
        if when(*args):
            stop()
        return function(*args, **kwargs)
    setattr(owner, name, stops)

if "RANK" in os.environ and "PACE_S" in os.environ:
    from muster.train import trainer
    before(trainer.Trainer, "train_step", lambda *args: time.sleep(float(os.environ["PACE_S"])))

if os.environ.get("RANK") == os.environ.get("STOP_RANK", "none"):
    place, _, step = os.environ["STOP_PLACE"].partition(" ")
    if place == "import":
        stop()
    from muster.train import process
    from muster.train import trainer
    if place == "meet":
        before(process, "meet", lambda *args: True)
    if place == "step":
        before(trainer.Trainer, "train_step", lambda self, *args: self.progress.step == int(step))
    if place == "file":
        partial = f"/checkpoints/.step-{int(step):08d}.partial/rank-"
        before(os, "fsync", lambda number: partial in os.readlink(f"/proc/self/fd/{number}"))
"""


@dataclass(frozen=True)
class Place:
    """Where a rank stops.

    Attributes:
        name: `import` (before it has joined the others), `meet` (when it has, before there is a model), `step 15`
            (before that step's successor), `file 20` (its part of that step's checkpoint is written, and not yet safe).
    """

    rank: int
    name: str


@dataclass
class Running:
    """A training that runs: one agent a host.

    Attributes:
        outputs: what came from each host.
        gate: the folder of the files by which a rank tells that it has stopped, and is told to go on.
        dead: the hosts that were killed.
    """

    hosts: Hosts
    agents: Mapping[str, HostProcess]
    outputs: Mapping[str, Path]
    gate: Path
    dead: set[str]

    def await_place(self) -> None:
        """Returns when the rank has come to its place.

        Raises:
            AssertionError: the training ended before.
        """

        def reached() -> bool:
            assert all(agent.poll() is None for agent in self.agents.values()), self.said()
            return (self.gate / "reached").exists()

        wait_for(f"a rank to come to its place; {self.gate}", reached, START_S)

    def go_on(self) -> None:
        """Lets the stopped rank go on."""
        (self.gate / "go").touch()

    def agent(self, host: str) -> Process:
        """torchrun's process on a host."""
        (found,) = [process for process in self.hosts.processes(host) if any(map(is_agent, process.argv))]
        return found

    def worker(self, host: str, local_rank: int = 0) -> Process:
        """A rank's own process on a host, and none of its data workers."""
        agent = self.agent(host).pid
        ranks = [process for process in self.hosts.processes(host) if parent_of(process.pid) == agent]
        (found,) = [rank for rank in ranks if f"LOCAL_RANK={local_rank}" in environment_of(rank.pid)]
        return found

    def signal(self, process: Process, number: signal.Signals) -> None:
        """Sends a signal to one process."""
        os.kill(process.pid, number)

    def kill_host(self, host: str) -> None:
        """Ends a host at once, as a power cut does."""
        self.dead.add(host)
        self.hosts.kill(host)

    def codes(self, limit_s: float = END_S) -> dict[str, int]:
        """The exit codes of all agents, once all have ended and no process of theirs is left.

        Args:
            limit_s: seconds within which the last agent ends.

        Raises:
            TimeoutError: an agent lives, or any process on a host that does.
        """
        what = "all agents to end"
        try:
            wait_for(what, lambda: all(agent.poll() is not None for agent in self.agents.values()), limit_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.left()}\n{self.said()}") from None
        for host in self.agents.keys() - self.dead:
            wait_for(f"{host} to be empty", lambda host=host: not self.hosts.processes(host), 30)
        return {host: agent.returncode for host, agent in self.agents.items()}

    def left(self) -> str:
        """The processes that live on hosts that do."""
        alive = self.agents.keys() - self.dead
        return "\n".join(f"{host}: {process}" for host in alive for process in self.hosts.processes(host))

    def said(self) -> str:
        """What came from all hosts."""
        return "\n".join(f"--- {host}\n{path.read_text()}" for host, path in self.outputs.items())


class Training:
    """One training over all of `hosts`, by hand and without a scheduler; started again it resumes.

    Args:
        folder: an existing one, where the training works; its run is `runs/run` there.
    """

    def __init__(self, hosts: Hosts, folder: Path, ranks_a_host: int = 1) -> None:
        self.hosts = hosts
        self.folder = folder
        self.run = folder / "runs" / "run"
        self.ranks_a_host = ranks_a_host
        self.num_starts = 0
        self.killed: set[str] = set()
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)

    def start(self, place: Place | None = None, options: Sequence[str] = LONG, pace_s: float = 0) -> Running:
        """Starts it on all hosts; hosts that were killed are started anew before.

        Args:
            pace_s: seconds that each rank rests before each step, so that there is time to harm it.
        """
        self.num_starts += 1
        gate = self.folder / f"start-{self.num_starts}"
        gate.mkdir()
        env = {**ONE_THREAD, "PYTHONPATH": str(self.folder / "hook")}
        if pace_s:
            env |= {"PACE_S": str(pace_s)}
        if place is not None:
            env |= {"STOP_RANK": str(place.rank), "STOP_PLACE": place.name, "STOP_GATE": str(gate)}
        agents, outputs = {}, {}
        names = list(self.hosts.addresses)
        for host in self.killed:
            self.hosts.start(host)
        self.killed.clear()
        for number, host in enumerate(names):
            argv = [TRAIN, "ddp", *options, "--name=run", "--resume=auto", f"--nnodes={len(names)}"]
            argv += [f"--node-rank={number}", f"--master-addr={names[0]}", f"--nproc-per-node={self.ranks_a_host}"]
            outputs[host] = gate / f"{host}.log"
            with outputs[host].open("w") as output:
                agents[host] = self.hosts.popen(host, argv, env=env, cwd=self.folder, stdout=output, stderr=output)
        return Running(self.hosts, agents, outputs, gate, self.killed)


def runs_through(training: Training, options: Sequence[str]) -> Path:
    """The run that nobody disturbs, with all its checkpoints."""
    running = training.start(options=[*options, "--keep-checkpoints=1000"])
    assert set(running.codes(WHOLE_S).values()) == {0}, running.said()
    return training.run


def newest_of(run: Path) -> int:
    """The step of the run's newest checkpoint; 0 without one."""
    found = checkpoint.saved(run)
    return checkpoint.step_of(found[0]) if found else 0


def assert_same_bits(run: Path, straight: Path) -> None:
    """Holds if the newest checkpoint of `run` is whole, and says what that of `straight` does after the same step."""
    path, state, notes = checkpoint.load_newest(run)
    assert (checkpoint.step_of(path), notes) == (newest_of(run), [])
    _, own = checkpoint.split(state)
    _, other = checkpoint.split(checkpoint.load(straight / "checkpoints" / path.name))
    assert own.keys() == other.keys()
    assert [name for name in own if not torch.equal(own[name], other[name])] == []


def is_agent(word: str) -> bool:
    return word == "muster.entrypoint.agent"


def parent_of(pid: int) -> int:
    """The id of a process's parent, as the machine sees it; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def environment_of(pid: int) -> list[str]:
    """The variables with which a process was started, `NAME=VALUE`."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
