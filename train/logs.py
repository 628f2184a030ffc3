"""Where a run's logs lie: one file a rank, below the attempt and the host."""

import faulthandler
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from train import console
from train.errors import one_line
from train.world import World

LAST_WORDS = "MUSTER_LAST_WORDS"
"""The variable with the folder where the agent of this node looks for word of its ranks (entrypoint/agent.py)."""

TOLD = "told"


def attempt(environ: Mapping[str, str]) -> str:
    """Which start of the run this is, counted from 0: the scheduler's count, then torchrun's restarts in it, if any.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html (TORCHELASTIC_RESTART_COUNT)
    """
    started = environ.get("MUSTER_ATTEMPT") or "0"
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    words = [word for word in (started, restarts) if word.isdecimal()]
    return ".".join(words if words[1:] and words[1] != "0" else words[:1]) or "0"


def folder(run: Path, host: str, environ: Mapping[str, str]) -> Path:
    """The folder of this host's logs in the run's folder `run`; it need not exist."""
    return run / "logs" / attempt(environ) / (re.sub(r"[^A-Za-z0-9._-]+", "-", host).strip(".-") or "host")


def open_log(run: Path, world: World, command: str, *, all_ranks: bool) -> None:
    """From now on this rank's words go to its log file; rank 0's, or those of `all_ranks`, to the console too.

    Without a file, on a full disk for example, everything stays on the console: a log is no reason not to train.
    """
    path = folder(run, world.host, os.environ) / f"rank-{world.rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A character that has no place in a file name or in UTF-8 must not end the run either.
        log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        # Its words are this program's own: variables, which may hold secrets, are not among them.
        place = (
            f"rank {world.rank} of {world.world_size} on {one_line(world.host)}, {world.device}, process {os.getpid()}"
        )
        log.write(f"=== {now()} {place}: {one_line(command)}\n")
    except OSError as error:
        console.tell(f"note: rank {world.rank} on {world.host} has no log file: {error}")
        return
    prefix = f"[{one_line(world.host)} {world.rank}] "
    if all_ranks:
        console.show_lines(log, prefix)
    elif world.main:
        console.show_all(log)
    if not world.main:
        console.hide(log, prefix)
    if LAST_WORDS in os.environ:
        leave_word(str(path.absolute()))
        # What Python says when it crashes: the agent then shows the end of the log.
        faulthandler.enable(log, all_threads=True)


def leave_word(text: str) -> None:
    """Adds a line to what this rank leaves for its agent: the path of its log, TOLD when the user knows why it ends."""
    if LAST_WORDS not in os.environ:
        return
    try:
        path = Path(os.environ[LAST_WORDS], str(os.getpid()))
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{text}\n")
    except OSError as error:
        console.keep(f"the agent can't be told of the end: {error}")


def close(code: int) -> None:
    """Writes how this rank ends, and what is not written yet."""
    console.keep(f"=== {now()} ends with exit code {code}")
    console.flush()


def now() -> str:
    """The date and time here, to the second, with the distance from UTC."""
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
