"""Runs a page's commands, one after the other, in one bash and one folder."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.docs.pages import Command, Page, PageError
from tests.docs.shown import missing

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
IN_THE_FOLDER = ("docs", "examples", "jobs")
"""Folders of the repository to which a page's folder has links: commands read them, and write beside them."""

DEADLINE_S = 480
"""Seconds for all commands of a page, which take 20 s if nothing else runs."""

LAUNCHING = re.compile(r"(train) (single|dp|ddp|fsdp|tp|pipeline)\b|(muster) (run|doctor|bench)\b")

Execute = Callable[[Path, Path], str]
"""Runs a bash script, given by its path, in a folder; returns all its output, stderr included."""


def check(page: Page, folder: Path, kind: str = "", execute: Execute | None = None) -> list[str]:
    """The faults of `page`: a text for each command of that kind that does not do what the page shows.

    Args:
        folder: the page's folder; it has to exist, and its commands leave their files in it.
        execute: runs the script with all commands; `locally` where None.
    """
    commands = page.commands(kind)
    prepare(page, folder)
    if kind == "dry":
        commands = [Command(text, None, one.line) for one in commands for text in dry(one.text)]
    done = run(commands, folder, execute or locally)
    wrong: list[str] = []
    for command, (code, wrote) in zip(commands, done, strict=True):
        said: str | None
        if code is None:
            said = "it did not end, or ended the shell"
        elif code != command.code:
            said = f"it ended with {code}, and not with {command.code}"
        elif command.shown is None or (said := missing(command.shown, wrote)) is None:
            continue
        wrong.append(f"{page.path.name}, line {command.line}: $ {command.text}\n  {said}\n{indented(wrote)}")
        if code is None:
            break  # nor did the commands after it
    return wrong


def prepare(page: Page, folder: Path) -> None:
    """Puts the files into `folder` that the page's commands need.

    Raises:
        PageError: a block shows lines of a file of the repository, and they are not in it.
    """
    for name in IN_THE_FOLDER:
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for name, text in page.files().items():
        there = ROOT / name
        if there.exists():
            if text not in there.read_text():
                raise PageError(f"{page.path.name} shows lines that {name} does not have")
        elif not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def run(commands: Sequence[Command], folder: Path, execute: Execute) -> list[tuple[int | None, str]]:
    """The exit code and the output of each command; the code of one that did not end is None."""
    if not commands:
        return []
    path = folder / f".commands-{os.urandom(4).hex()}.sh"
    # An eval for each: a syntax error in one does not stop the next. `echo $?` prints the code of the one before.
    steps = [
        f"eval {shlex.quote(command.text)} < /dev/null; code=$?; printf '\\n\\036%s\\036\\n' $code; (exit $code)\n"
        for command in commands
    ]
    path.write_text("exec 2>&1\n" + "".join(steps) + "exit 0\n")
    parts = re.split(r"\n\x1e(\d+)\x1e\n", execute(path, folder))
    path.unlink()
    done: list[tuple[int | None, str]] = [
        (int(code), wrote) for wrote, code in zip(parts[:-1:2], parts[1::2], strict=True)
    ]
    return [*done, *((None, parts[-1]) for _ in commands[len(done) :])]


def locally(script: Path, folder: Path, timeout_s: float = DEADLINE_S, env: Mapping[str, str] = {}) -> str:
    """Runs `script`, and kills it after `timeout_s` seconds; returns its output."""
    process = subprocess.Popen(
        ["bash", str(script)],
        cwd=folder,
        env=environment(folder) | dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        # Its processes in other sessions end by themselves after it, and keep the pipe open until then.
        return process.communicate(timeout=60)[0] + f"\n(ended after {timeout_s:g} s)\n"


def environment(folder: Path) -> dict[str, str]:
    """The variables of a new user's shell that has the virtual environment first on PATH."""
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    ours = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8", "COLUMNS": "80"}
    return {**kept, **ours, **paths()}


@cache
def paths() -> dict[str, str]:
    """The variables by which commands run this repository's code, if that of another clone is installed."""
    ask = [sys.executable, "-P", "-c", "import muster; print(muster.__file__)"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(ask, capture_output=True, text=True, timeout=240, env=env, cwd="/").stdout
    return {} if Path(found.strip()).parent == ROOT / "muster" else {"PYTHONPATH": str(ROOT)}


def dry(text: str) -> list[str]:
    """Commands that check a command without running it: bash parses it, and --dry-run plans each launch in it.

    Raises:
        PageError: it starts a command of ours that has no --dry-run.
    """
    planned = [f"bash -n -c {shlex.quote(text)}"]
    for line in text.replace("\\\n", " ").splitlines():
        if found := LAUNCHING.search(line):
            words = line[found.end() :].partition("#")[0].strip()
            planned.append(f"{found[0]} --dry-run {words} > /dev/null")
        elif re.search(r"(^|\s)(train|muster) [a-z]", line):
            raise PageError(f"this can't be planned by --dry-run: {line}")
    return planned


def indented(text: str) -> str:
    """The end of a command's output, indented for an error."""
    return "\n".join(f"    | {line}" for line in text.strip().splitlines()[-40:])
