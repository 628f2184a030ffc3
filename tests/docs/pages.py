"""Reads a page of documentation: its commands, and the output that it shows for them.

A page may have:

    ```console        `$ command` lines, and below each its output; if nothing is below, any output is right
    ```bash           commands alone
    <!-- test: KIND -->            before a block: it runs elsewhere, see MARKS; without it the block runs here
    <!-- test: none: REASON -->    no test can run the block
    <!-- file: NAME -->            the block has lines of that file of the repository; else the file is written

A command has to end with 0, or with the number that a following `$ echo $?` shows.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

MARKS = {
    "": "runs here, in the page's folder",
    "slurm": "runs on the login host of a Slurm cluster on fake hosts",
    "dry": "is read by bash, and what it launches is planned by --dry-run",
    "image": "runs in the image, by podman",
    "none": "does not run; says why",
}
RUNNABLE = ("bash", "console")


class PageError(Exception):
    """A page that can't be read: a mark does not exist, or a block does not end."""


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        text: the command, which may have several lines.
        shown: the output that the page shows, without empty lines; None where it shows none.
        line: the line of the page where it begins.
        code: the exit code that the page expects.
    """

    text: str
    shown: tuple[str, ...] | None
    line: int
    code: int = 0


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its marks, its lines, and the number of the first line."""

    language: str
    kind: str
    file: str | None
    lines: tuple[str, ...]
    line: int

    def commands(self) -> list[Command]:
        """The commands; none if the block has another language, or is a file.

        Raises:
            PageError: output stands before the first command, or a command does not end.
        """
        if self.language not in RUNNABLE or self.file:
            return []
        found: list[Command] = []
        place = 0
        while place < len(self.lines):
            line = self.lines[place]
            is_console = self.language == "console"
            if not line.strip() or (not is_console and line.lstrip().startswith("#")):
                place += 1
                continue
            if is_console and not line.startswith("$ "):
                raise PageError(f"line {self.line + place}: output without a command: {line}")
            first, end = place, place + 1
            text = line.removeprefix("$ ") if is_console else line
            while not is_complete(text):
                if end == len(self.lines):
                    raise PageError(f"line {self.line + first}: the command does not end: {text}")
                text += "\n" + self.lines[end]
                end += 1
            place = end
            while is_console and place < len(self.lines) and not self.lines[place].startswith("$ "):
                place += 1
            shown = tuple(line for line in self.lines[end:place] if line.strip())
            found.append(Command(text, shown or None, self.line + first))
        return _with_codes(found)


@dataclass(frozen=True)
class Page:
    """A Markdown file, as blocks."""

    path: Path
    blocks: tuple[Block, ...]

    def commands(self, kind: str = "") -> list[Command]:
        """The commands of all blocks of that kind, in order."""
        return [command for block in self.blocks if block.kind == kind for command in block.commands()]

    def files(self) -> dict[str, str]:
        """The texts of blocks that are files, by the file's name."""
        return {block.file: "\n".join(block.lines) + "\n" for block in self.blocks if block.file}


def read(path: Path) -> Page:
    """The page at `path`.

    Raises:
        PageError: a mark does not exist or stands before no block, or a block has no end.
    """
    return Page(path, tuple(_blocks(path.read_text(encoding="utf-8"))))


def _blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    kind, file, marked = "", None, 0
    opened: tuple[str, str, int] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*(```+|~~~+)\s*([\w-]*)", line)
        if opened is not None:
            if fence and fence[1].startswith(opened[0]) and not fence[2]:
                blocks.append(Block(opened[1], kind, file, tuple(inside), opened[2]))
                opened, kind, file, marked, inside = None, "", None, 0, []
            else:
                inside.append(line)
        elif fence:
            opened = (fence[1], fence[2], number + 1)
        elif comment := re.match(r"\s*<!--\s*(\w+):\s*(.*?)\s*-->", line):
            marked = number
            if comment[1] == "file":
                file = comment[2]
            elif comment[1] == "test":
                kind = _kind(comment[2], number)
        elif line.strip() and marked:
            raise PageError(f"line {marked}: a mark that stands before no block")
    if opened is not None:
        raise PageError(f"line {opened[2] - 1}: the block does not end")
    if marked:
        raise PageError(f"line {marked}: a mark that stands before no block")
    return blocks


def _kind(mark: str, number: int) -> str:
    kind, _, reason = mark.partition(":")
    if kind not in MARKS or not kind:
        raise PageError(f"line {number}: there is no mark {mark!r}, only {', '.join(filter(None, MARKS))}")
    if (kind == "none") != bool(reason.strip()):
        raise PageError(f"line {number}: `test: none` has a reason after a colon, and others have none: {mark!r}")
    return kind


def is_complete(text: str) -> bool:
    """Whether bash takes `text` as whole commands: no open quote, here-document or loop, no backslash at the end.

    A command with a syntax error is complete too: running it reports the error.
    """
    if text.endswith("\\"):
        return False
    said = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, timeout=240).stderr
    return not re.search(r"unexpected (EOF|end of file)|delimited by end-of-file", said)


def _with_codes(commands: list[Command]) -> list[Command]:
    """`commands` with the exit codes that `echo $?` shows for the command before it."""
    result: list[Command] = []
    for place, command in enumerate(commands):
        after = commands[place + 1] if place + 1 < len(commands) else None
        code = 0
        if after is not None and after.text.strip() == "echo $?" and after.shown and len(after.shown) == 1:
            code = int(after.shown[0])
        result.append(Command(command.text, command.shown, command.line, code))
    return result
