"""Runs the tests in lanes, several at once, and shows how far each is.

    python -m tests.lanes quick|all|long [--jobs N]

A lane is one pytest process, or another command. Each failure is shown when it happens, with its output and the command
that runs the test alone; a table of all lanes comes last. Exit code 0: all passed, 1: not all, 130: interrupted.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
REPORT_VARIABLE = "MUSTER_TEST_REPORT"
"""Names the file into which tests/conftest.py writes a line for each test."""

LANE_LIMIT_S = 80 * 60

LONGEST = ("trainer", "image")
NICENESS = 5
"""Of all lanes but the LONGEST: these would otherwise run alone at the end, with most cores idle."""

END_LIMIT_S = 60
"""Seconds in which an interrupted lane may end the processes that it started."""

EVERY_S = 60
"""Seconds between two reports on the lanes' state, where the output is no terminal."""

QUICK = "(not full and not cluster and not image and not long) or quick"
MARKS = {"quick": QUICK, "all": "not long"}
"""The pytest marks that select the tests of each tier but the long one."""


@dataclass
class Lane:
    """Tests that run one after the other, and their results so far.

    Attributes:
        argv: the command; a lane of pytest reports each test, another one only its end.
        num_tests: the number of collected tests; 0 until it is known.
    """

    name: str
    argv: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float | None = None
    num_tests: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    test: str = ""
    read: int = 0

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.seconds is None

    def state(self) -> str:
        if self.process is None:
            return "waits"
        if self.is_running:
            return self.test.rpartition("/")[2] or ("runs" if self.argv[0] == "make" else "collects tests")
        return "failed" if self.failed else "ok"

    @property
    def failed(self) -> bool:
        """True for a lane that has ended badly. pytest's exit code 5: no test was selected."""
        return self.process is not None and self.process.returncode not in (None, 0, 5)


FAULTS = (
    "tests/train/health",
    *(
        f"tests/train/{name}.py"
        for name in ("checkpoint/test_restart", "checkpoint/test_resume", "reporting/test_console")
    ),
)
"""Tests of the trainer: faults that end it, and how it continues afterwards."""

STRATEGIES = "tests/train/parallel"
"""Tests of the trainer: the strategies that split its work over ranks."""

CLUSTER_FAULTS = (
    *("kills", "survive", "survive_grid_engine", "file_systems", "train_elastic"),
    *("doctor", "doctor_network"),
)
"""Files of tests/clusters that mostly wait: for deadlines, and until killed processes are noticed."""


def lanes_of(tier: str) -> list[Lane]:
    """The lanes of a tier in the order of their starts: those that take long come first."""

    if tier == "long":
        return [lane("long", "long", "tests"), make("torch 2.10", "test-cuda12")]
    marks = MARKS[tier]
    cluster_faults = [f"tests/clusters/test_{name}.py" for name in CLUSTER_FAULTS]
    trainer = lane("trainer", marks, "tests/train", *(f"--ignore={path}" for path in (*FAULTS, STRATEGIES)))
    strategies = lane("strategies", marks, STRATEGIES)
    faults = lane("faults", marks, *FAULTS)
    launcher = lane("launcher", marks, "tests/entrypoint", "tests/fabric")
    checks = lane("checks", marks, "tests/check", "tests/report")
    others = lane("others", marks, "tests/sites", "tests/jobs", "tests/docs", *top_level())
    static = make("static checks", "check")
    if tier == "quick":
        return [trainer, faults, launcher, checks, strategies, others, lane("slurm", marks, "tests/clusters"), static]
    return [
        trainer,
        lane("cluster faults", marks, *cluster_faults),
        lane("clusters", marks, "tests/clusters", *(f"--ignore={path}" for path in cluster_faults)),
        faults,
        # Long, but not the first: it writes 30 GB, and while the memory of a virtual machine is full of such files, all
        # other tests may be slow.
        lane("image", marks, "tests/image"),
        strategies,
        launcher,
        checks,
        others,
        static,
    ]


def lane(name: str, marks: str, *words: str) -> Lane:
    """A lane of pytest, of the tests with these marks."""
    return Lane(name, [sys.executable, "-m", "pytest", "-q", "-m", marks, *words])


def make(name: str, target: str) -> Lane:
    """A lane of a target of the Makefile."""
    return Lane(name, ["make", "--no-print-directory", target])


def top_level() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))


def run_lanes(lanes: list[Lane], num_jobs: int, folder: Path, console: Console) -> int:
    """Runs all lanes, `num_jobs` at once, with their output in files in `folder`; returns the exit code."""
    stop = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal stop
        stop = True

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, interrupt))
        show = stack.enter_context(progress(lanes, console))
        waiting = list(lanes)
        while (waiting or any(lane.is_running for lane in lanes)) and not stop:
            while waiting and sum(lane.is_running for lane in lanes) < num_jobs:
                following = waiting.pop(0)
                start(following, folder, niceness=0 if following.name in LONGEST else NICENESS)
            for lane in lanes:
                if lane.is_running:
                    look(lane, folder, console)
            show()
            time.sleep(0.2)
        for lane in lanes:
            end(lane)
    console.print(table(lanes, ended=True))
    for line in advice(lanes):
        console.print(Text(line))
    if stop:
        return 130
    return 1 if any(lane.failed or lane.outcomes["failed"] for lane in lanes) else 0


def start(lane: Lane, folder: Path, *, niceness: int) -> None:
    """Starts a lane as a process group of its own, its output in a file."""
    lane.started = time.monotonic()
    env = {**os.environ, REPORT_VARIABLE: str(folder / f"{lane.name}.jsonl")}
    with (folder / f"{lane.name}.out").open("wb") as out:
        lane.process = subprocess.Popen(
            ["nice", "-n", str(niceness), *lane.argv],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def look(lane: Lane, folder: Path, console: Console) -> None:
    """Reads a lane's new records, and whether it has ended."""
    assert lane.process is not None
    code = lane.process.poll()
    for record in news(lane, folder / f"{lane.name}.jsonl"):
        if "collected" in record:
            lane.num_tests += record["collected"]
        elif "starts" in record:
            lane.test = record["starts"]
        else:
            lane.outcomes[record["outcome"]] += 1
            if record["outcome"] == "skipped":
                lane.skipped[record["text"]] += 1
            if record["outcome"] == "failed":
                show_failure(lane, record, console)
    if code is None and time.monotonic() - lane.started > LANE_LIMIT_S:
        console.print(Text(f"{lane.name}: not over after {LANE_LIMIT_S // 60} minutes, in {lane.test}: ended"))
        end(lane)
        code = lane.process.returncode
    if code is not None:
        lane.seconds = time.monotonic() - lane.started
        if lane.failed and not lane.outcomes["failed"]:
            output = (folder / f"{lane.name}.out").read_text(errors="replace")
            console.print(Text(f"\n{lane.name} ended with {code}: {' '.join(lane.argv)}\n{output[-20_000:]}"))


def news(lane: Lane, report: Path) -> Iterator[dict[str, Any]]:
    """The complete records that were added since the last call."""
    if not report.exists():
        return
    with report.open("rb") as file:
        file.seek(lane.read)
        for line in file:
            if not line.endswith(b"\n"):
                return
            lane.read += len(line)
            yield json.loads(line)


def show_failure(lane: Lane, record: dict[str, Any], console: Console) -> None:
    test = record["test"]
    console.print(Text(f"\nFAILED {test} ({lane.name}, {record['seconds']:.1f} s)\n{record['text']}"))
    console.print(Text(f"alone: make test TESTS='{test}'\n"), soft_wrap=True)  # one line, to be copied


def end(lane: Lane) -> None:
    """Ends a lane that still runs: by SIGINT, so that fixtures end what they started, and then by SIGKILL."""
    if lane.process is None or lane.process.poll() is not None:
        return
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(lane.process.pid, number)
        try:
            lane.process.wait(END_LIMIT_S)
            break
        except subprocess.TimeoutExpired:
            continue
    lane.seconds = time.monotonic() - lane.started


@contextmanager
def progress(lanes: list[Lane], console: Console) -> Iterator[Any]:
    """A function that shows the state of all lanes: in place on a terminal, else in a line for each, now and then."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda: live.update(table(lanes))
        return
    shown = time.monotonic()
    over: set[str] = set()

    def show() -> None:
        nonlocal shown
        ended = {lane.name for lane in lanes if lane.seconds is not None} - over
        due = time.monotonic() - shown > EVERY_S
        for lane in lanes:
            if lane.name in ended or (due and lane.is_running):
                seconds = lane.seconds or time.monotonic() - lane.started
                of = f" of {lane.num_tests}" if lane.num_tests else ""
                counts = f"{sum(lane.outcomes.values())}{of} tests, {lane.outcomes['failed']} failed"
                print(f"{lane.name}: {counts}, {seconds:.0f} s: {lane.state()}", flush=True)
        over.update(ended)
        if due:
            shown = time.monotonic()

    yield show


def table(lanes: Iterable[Lane], *, ended: bool = False) -> Table:
    """The table of all lanes' results so far."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("lane", no_wrap=True, min_width=13)
    for name, width in (("passed", 6 if ended else 12), ("failed", 6), ("skipped", 7), ("seconds", 7)):
        shown.add_column(name, justify="right", no_wrap=True, min_width=width)
    shown.add_column("" if ended else "now", no_wrap=True, overflow="ellipsis")
    for lane in lanes:
        seconds = lane.seconds if lane.seconds is not None else time.monotonic() - lane.started
        counts = [str(lane.outcomes[name]) if lane.outcomes else "" for name in ("passed", "failed", "skipped")]
        if lane.num_tests and not ended:
            counts[0] += f" of {lane.num_tests}"
        shown.add_row(lane.name, *counts, f"{seconds:.0f}" if lane.process else "", Text(lane.state()))
    return shown


def advice(lanes: Iterable[Lane]) -> list[str]:
    """The reasons for which tests were skipped, and the command that installs missing programs."""
    reasons: Counter[str] = Counter()
    for lane in lanes:
        reasons.update(lane.skipped)
    lines = [f"skipped {count}: {reason}" for reason, count in reasons.most_common()]
    if any("missing" in reason for reason in reasons):
        lines.append("`make test-setup` installs what is missing, by apt-get, as root.")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tier", choices=[*MARKS, "long"])
    # Tests wait for processes and deadlines: four lanes kept two cores busy for 71 % of the time. Five did so too.
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 2) + 2, help="lanes at once")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave each lane's output, and its tests' times")
    options = parser.parse_args()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-lanes-")))
        folder.mkdir(parents=True, exist_ok=True)
        return run_lanes(lanes_of(options.tier), options.jobs, folder, console)


if __name__ == "__main__":
    sys.exit(main())
