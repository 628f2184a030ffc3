"""Trainings on fake hosts, in which one rank stops at a chosen place, so that a test can kill something there.

At the place the rank makes the file `reached`, and waits until it is killed or the test makes the file `go`.
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
"""Deadline in seconds for a training to get from its start to a place, on a slow and busy machine."""

END_S = 150
"""Deadline in seconds for all ranks to end after a fault. A minute is promised; the machine may be slow."""

WHOLE_S = 400
"""Deadline in seconds for an undisturbed training on such a machine."""

EPOCH, EPOCHS = 5, 6
"""Steps of an epoch with two ranks, and number of epochs; a checkpoint follows each epoch."""

LONG = ["--model=shufflenet_v2_x0_5", "--data=synthetic", "--num-classes=10", f"--num-samples={2 * 8 * EPOCH}"]
LONG += ["--image-size=16", "--batch-size=8", f"--epochs={EPOCHS}", "--lr=0.01", "--no-bf16", "--seed=5"]

# Every Python process of the training runs this; only ranks have RANK. It waits 10 minutes at most if a test is broken.
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
        name: `import` (before it has joined the others), `meet` (after that, before there is a model), `step 15`
            (before step 16), `file 20` (its part of step 20's checkpoint is written, but fsync not yet called).
    """

    rank: int
    name: str


@dataclass
class Running:
    """A running training, with one agent on each host.

    Attributes:
        outputs: the files with the output of each host.
        gate: the folder for the files `reached` and `go`.
        dead: the hosts that were killed.
    """

    hosts: Hosts
    agents: Mapping[str, HostProcess]
    outputs: Mapping[str, Path]
    gate: Path
    dead: set[str]

    def await_place(self) -> None:
        """Waits until the rank is at its place.

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
        """The agent's process on a host."""
        (found,) = [process for process in self.hosts.processes(host) if any(map(is_agent, process.argv))]
        return found

    def worker(self, host: str, local_rank: int = 0) -> Process:
        """The process of a rank on a host, which is not one of its data workers."""
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
        """Waits until all agents have ended and have left no process; returns their exit codes.

        Args:
            limit_s: seconds within which the last agent ends.

        Raises:
            TimeoutError: an agent still runs, or any process on a host that was not killed.
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
        """The processes that still run, on all hosts that were not killed."""
        alive = self.agents.keys() - self.dead
        return "\n".join(f"{host}: {process}" for host in alive for process in self.hosts.processes(host))

    def said(self) -> str:
        """The output of all hosts."""
        return "\n".join(f"--- {host}\n{path.read_text()}" for host, path in self.outputs.items())


class Training:
    """One training on all of `hosts`, started by hand without a scheduler; a second start resumes it.

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
        """Starts the training on all hosts; starts killed hosts again before that.

        Args:
            pace_s: seconds for which each rank sleeps before each step, so that a test has time to harm it.
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
    """Trains without a disturbance and keeps all checkpoints; returns the run's folder."""
    running = training.start(options=[*options, "--keep-checkpoints=1000"])
    assert set(running.codes(WHOLE_S).values()) == {0}, running.said()
    return training.run


def newest_of(run: Path) -> int:
    """The step of the run's newest checkpoint; 0 without one."""
    found = checkpoint.saved(run)
    return checkpoint.step_of(found[0]) if found else 0


def assert_same_bits(run: Path, straight: Path) -> None:
    """Asserts that the newest checkpoint of `run` is complete, and equals that of `straight` at this step."""
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
