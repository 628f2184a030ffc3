"""Shows which files of ours a reader has to follow: those whose functions run, in the order of their first call.

    python -m tests.tour [--write]

It follows a launch in a Slurm job (a dry run of a recording), a run of two ranks (its rank 0), one step of that (a call
of `Trainer.train_step`), one save (a call of `CheckpointManager.save`), `muster doctor` and `muster bench`. `--write`
puts the lists of the launch and of the run into docs/architecture.md.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/architecture.md"


LIMIT_S = 300
STEP = 3
"""The step that is followed: the first ones also do work that is done only once."""

RECORDING = "tests/recordings/slurm/b_srun_N2_1per.node02.1.env"
TRAINING = ["--model=gpt-tiny", "--data=synthetic", "--max-steps=6", "--epochs=1", "--blocking-save", "--name=tour"]

CO_OPTIMIZED = 0x1
"""A flag that code of functions has, and that of modules and classes lacks.

Source: https://docs.python.org/3/library/inspect.html#code-objects-bit-flags
"""


@dataclass
class Visited:
    """The functions of one file that ran: their number, and their lines."""

    functions: int = 0
    lines: int = 0


@dataclass
class Stage:
    """One part of the tour.

    Attributes:
        command: what is started; None for a part of the stage before.
        module: the module of the process that is followed, as after `python -m`, or the name of the program.
        within: only what runs in this window of that process: "step" or "save".
        most: the largest number of files that is wanted.
        own: the folder whose files count for `most`; empty for all files.
    """

    title: str
    module: str
    most: int
    command: list[str] | None = None
    within: str = ""
    own: str = ""
    files: dict[str, Visited] = field(default_factory=dict)


def stages() -> list[Stage]:
    train, muster = (str(Path(sys.executable).parent / name) for name in ("train", "muster"))
    two = "--nproc-per-node=2"
    return [
        Stage("launch", "train", 25, [train, "ddp", "--dry-run", f"--env-file={ROOT / RECORDING}"]),
        Stage("run of two ranks", "muster.train", 35, [train, "ddp", two, *TRAINING]),
        Stage("one step", "muster.train", 8, within="step"),
        Stage("one save", "muster.train", 4, within="save"),
        Stage("doctor", "muster.check", 16, [muster, "doctor", two], own="muster/check/"),
        Stage("bench", "muster.check", 12, [muster, "bench", two, "--max-size=64K"], own="muster/check/"),
    ]


def trace(folder: Path) -> None:
    """Writes a line for the first call of each function of ours, in this process, from now on.

    sitecustomize calls it before anything else is loaded. An exec ends it. Each line is written at once, so that an
    exec or a signal loses none.
    """
    ours = tuple(str(ROOT / name) + os.sep for name in ("entrypoint", "train", "muster"))
    name = _module_of(sys.orig_argv)
    out = (folder / f"{name}.{os.environ.get('RANK', '0')}.{os.getpid()}").open("a", buffering=1)
    windows = Windows()
    seen: set[tuple[str, Any]] = set()

    def called(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(ours):
            return
        windows.look(frame, event)
        if event == "return" or not code.co_flags & CO_OPTIMIZED or code.co_name.startswith("<"):
            return
        # Threads that work in the background belong to no part.
        is_aside = threading.current_thread().name in ("claim", "guard", "heartbeat", "heartbeat watch", "watch")
        for window in ("", *(() if is_aside else windows.open)):
            if (window, code) not in seen:
                seen.add((window, code))
                last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
                path = os.path.realpath(code.co_filename)
                out.write(f"{window}\t{path}\t{code.co_qualname}\t{last - code.co_firstlineno + 1}\n")

    sys.setprofile(called)
    threading.setprofile(called)


PARTS = {"Trainer.train_step": ("step", STEP), "CheckpointManager.save": ("save", 1)}
"""Parts of a run, each the call of a method: the method's name, the part's, and which call it is."""


class Windows:
    """The parts of a run that are under way: the step of number STEP, and the first save.

    Attributes:
        open: the names of those parts.
    """

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.frames: dict[FrameType, str] = {}

    def look(self, frame: FrameType, event: str) -> None:
        """Opens and closes parts with the calls of their methods."""
        name = frame.f_code.co_qualname
        if event == "call" and name in PARTS:
            part, number = PARTS[name]
            self.calls[name] += 1
            if self.calls[name] == number:
                self.open.add(part)
                self.frames[frame] = part
        elif event == "return" and frame in self.frames:
            self.open.remove(self.frames.pop(frame))


def _module_of(argv: list[str]) -> str:
    """What `python ...` runs: the module after -m, or the program's name."""
    words = iter(argv[1:])
    for word in words:
        if word == "-m":
            return next(words, "python")
        if not word.startswith("-"):
            return Path(word).name
    return "python"


def follow(stage: Stage, folder: Path) -> None:
    """Runs the stage's command, and traces its processes into `folder`.

    Raises:
        SystemExit: the command failed.
    """
    assert stage.command is not None
    hook = folder / "hook"
    hook.mkdir(parents=True)
    (hook / "sitecustomize.py").write_text(
        f"import sys\nfrom pathlib import Path\nsys.path.append({str(ROOT)!r})\n"
        f"from tests.tour import trace\nsys.path.remove({str(ROOT)!r})\ntrace(Path({str(folder)!r}))\n"
    )
    work = folder / "work"
    work.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    ended = subprocess.run(
        stage.command,
        cwd=work,
        env={**kept, "PYTHONPATH": str(hook)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(stage.command)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")


def read(stage: Stage, folder: Path) -> None:
    """Reads the stage's files from the traces of its processes."""
    traces = sorted(folder.glob(f"{stage.module}.0.*"))
    if not traces:
        raise SystemExit(f"no process of {stage.module} was seen: {sorted(path.name for path in folder.iterdir())}")
    for line in traces[0].read_text().splitlines():
        window, path, _, lines = line.split("\t")
        if window == stage.within:
            visited = stage.files.setdefault(str(Path(path).relative_to(ROOT)), Visited())
            visited.functions += 1
            visited.lines += int(lines)
    if not stage.files:
        raise SystemExit(f"nothing ran in {stage.title}: see the names of functions in {Windows.__name__}")


def text_of(stage: Stage) -> str:
    """A table for the terminal."""
    functions = sum(visited.functions for visited in stage.files.values())
    lines = sum(visited.lines for visited in stage.files.values())
    num_own = sum(path.startswith(stage.own) for path in stage.files)
    wanted = f"{num_own} in {stage.own}, at most" if stage.own else "at most"
    rows = [
        f"{stage.title}: {len(stage.files)} files ({wanted} {stage.most} wanted), {functions} functions, {lines} lines"
    ]
    for path, visited in stage.files.items():
        rows.append(f"  {path:<44}{visited.functions:>4} functions {visited.lines:>5} lines")
    return "\n".join(rows)


def write(page: Path, done: Mapping[str, Stage]) -> None:
    """Puts the lists of files between the page's marks, `<!-- tour: TITLE -->` and `<!-- end -->`.

    Raises:
        SystemExit: the page has no such marks.
    """
    text = page.read_text()
    for title in ("launch", "run of two ranks"):
        rows = ["| file | functions | lines |", "|---|---|---|"]
        for path, visited in done[title].files.items():
            rows.append(f"| [{path}](../{path}) | {visited.functions} | {visited.lines} |")
        begin, end = f"<!-- tour: {title} -->\n", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        found = pattern.search(text)
        if not found:
            raise SystemExit(f"{page} has no {begin.strip()} ... {end}")
        text = text[: found.start()] + begin + "\n".join(rows) + "\n" + end + text[found.end() :]
    page.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tour", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the lists into docs/architecture.md")
    options = parser.parse_args()
    done: dict[str, Stage] = {}
    with tempfile.TemporaryDirectory(prefix="muster-tour-") as scratch:
        folder = Path(scratch)
        for number, stage in enumerate(stages()):
            if stage.command:
                folder = Path(scratch) / str(number)
                follow(stage, folder)
            read(stage, folder)
            done[stage.title] = stage
            print(text_of(stage), end="\n\n", flush=True)
    if options.write:
        write(PAGE, done)


if __name__ == "__main__":
    main()
