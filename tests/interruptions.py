"""Interrupts commands by Ctrl-C at random moments: `python -m tests.interruptions --each 20`.

Each must end with 130 and the one line that says so, or have ended with a code of its own; without a traceback, and
without a process left. Exit code 1 where one did otherwise.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
MARK = "MUSTER_TEST_MARK"
"""A variable by which the processes of a command are found, whatever session and process group they are in."""

RUNS = Path(__file__).parent / "report" / "recordings"
"""The runs that `muster report` reads."""

FIRST_S = 0.05
END_S = 60.0
GONE_S = 15.0

# It ends silently, as a script that saves its work at Ctrl-C. It is not in Python, whose start ends with a traceback.
SCRIPT = """#!/bin/sh
trap 'exit 130' INT
sleep 120 &
wait
"""

COMMANDS: dict[str, tuple[float, list[str]]] = {
    "train": (12.0, ["train", "ddp", "--nproc-per-node=2", "--device=cpu", "--epochs=1000"]),
    "train single": (8.0, ["train", "single", "--device=cpu", "--epochs=1000", "--train-num-workers=1"]),
    "muster run": (8.0, ["muster", "run", "--nproc-per-node=2", "--no-python", "./script.sh"]),
    "doctor": (8.0, ["muster", "doctor", "--nproc-per-node=2", "--device=cpu"]),
    "bench": (8.0, ["muster", "bench", "--nproc-per-node=2", "--device=cpu"]),
    "selftest": (15.0, ["train", "selftest"]),
    "report": (1.5, ["muster", "report", "runs"]),
    "env": (0.8, ["muster", "env"]),
    "detect": (0.8, ["muster", "detect"]),
    "job": (0.8, ["muster", "job", "slurm"]),
}
"""By name: the latest time of the interruption, in seconds on an idle machine, and the command's words."""


@dataclass(frozen=True)
class Ended:
    """How an interrupted command has ended.

    Attributes:
        code: the exit code; None where it did not end within END_S.
        said: its output, from both streams.
        left: the command lines of processes that it left behind.
    """

    code: int | None
    said: str
    left: tuple[str, ...]

    def fault(self, *, is_group: bool = True) -> str:
        """What is wrong; empty where nothing is."""
        if self.code is None:
            return f"not over after {END_S:g} s"
        if self.left:
            return f"left {len(self.left)} processes: {self.left[0]}"
        if "Traceback" in self.said or "KeyboardInterrupt" in self.said:
            return "a traceback"
        if self.code == 130 and len(re.findall(r"^muster: .* was interrupted: ", self.said, re.MULTILINE)) != 1:
            return "not one line that says what was interrupted"
        return "" if self.code in (130, 0, 1, 2) else f"code {self.code}"


def interrupt(argv: Sequence[str], after_s: float, folder: Path, *, to_group: bool = True) -> Ended:
    """Runs `argv`, and interrupts it after `after_s`: the process group, as a terminal does, or the one process."""
    mark = uuid.uuid4().hex
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "SLURM_", "PET_"))}
    env |= {MARK: mark, "OMP_NUM_THREADS": "1"}
    # A shell that starts the tests in the background may make them ignore SIGINT.
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler), "start_new_session": True}
    with (folder / "said").open("w+b") as said:
        command = [str(BIN / argv[0]), *argv[1:]]
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=said, stderr=said, **hears)
        code = None
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            (os.killpg if to_group else os.kill)(process.pid, signal.SIGINT)
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return Ended(code, (folder / "said").read_text(errors="replace"), find_left(mark))


def find_left(mark: str) -> tuple[str, ...]:
    """The command lines of processes with `mark` that are still there after GONE_S; they are ended."""
    end = time.monotonic() + GONE_S
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    lines = tuple(" ".join(process.info["cmdline"] or ["?"])[:150] for process in left)
    for process in left:
        process.kill()
    return lines


def marked(mark: str) -> list[psutil.Process]:
    """The processes whose environment has `mark`, without those that have ended and wait for their parent."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline", "status"]):
        of_it = (process.info["environ"] or {}).get(MARK) == mark
        if of_it and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def prepare(folder: Path) -> None:
    """Makes the files that the commands read."""
    script = folder / "script.sh"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    shutil.copytree(RUNS, folder / "runs")


def measure_start_s() -> float:
    """Seconds that Python takes to the first line of a program, which can't handle an earlier Ctrl-C."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import re"], check=True)
    return time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"of {', '.join(COMMANDS)}; default: all")
    parser.add_argument("--each", type=int, default=20, help="how often each is interrupted")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--one", action="store_true", help="interrupt the one process, not its process group")
    asked = parser.parse_args()
    drawn, num_faults = random.Random(asked.seed), 0
    for name in asked.commands or COMMANDS:
        last_s, argv = COMMANDS[name]
        codes: list[int | None] = []
        for _ in range(asked.each):
            # Most come near the start, where most can go wrong.
            share = drawn.random() ** 2
            slow = max(1.0, measure_start_s() / 0.03)
            after_s = slow * (FIRST_S + share * (last_s - FIRST_S))
            with tempfile.TemporaryDirectory(prefix="interruptions-", ignore_cleanup_errors=True) as folder:
                prepare(Path(folder))
                ended = interrupt(argv, after_s, Path(folder), to_group=not asked.one)
            codes.append(ended.code)
            if fault := ended.fault():
                num_faults += 1
                print(f"{name} after {after_s:.3f} s: {fault}\n{ended.said[-3000:]}", flush=True)
        counts = ", ".join(f"{codes.count(code)} x {code}" for code in sorted(set(codes), key=str))
        print(f"{name}: {counts}", flush=True)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
