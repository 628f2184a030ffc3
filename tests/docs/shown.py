"""Compares the output that a page shows with the output of a command.

The output has to have the lines that are shown, in that order, and no others, with these exceptions:

- a line of `...` stands for any number of lines, also none; `...` within a line stands for any text;
- every number matches every number: 1,438 or 0.83 or 2.15.0; and the units of times (ms, s, min), of sizes (MiB, GiB)
  and of rates of operations match each other, as they depend on the machine's speed and memory;
- an absolute path matches every absolute path; `laptop` matches this host's own name;
- `muster: loading PyTorch ...` may be there or not, as it depends on the machine's speed;
- blanks and lines of tables may be longer or shorter; empty lines and colours don't count.
"""

import re
import socket
from collections.abc import Sequence

LAPTOP = "laptop"
ANY = "..."
SLOW = "muster: loading PyTorch ..."


def missing(shown: Sequence[str], wrote: str) -> str | None:
    """The difference between `shown` and the output `wrote`, in words; None where they agree."""
    real = [line for line in map(rough, wrote.replace("\r\n", "\n").split("\n")) if line and line != SLOW]
    wanted = [line if line.strip() == ANY else rough(line) for line in shown if line.strip()]
    whole = "".join(r"(?:[^\n]*\n)*?" if line.strip() == ANY else _pattern(line) + r"\n" for line in wanted)
    if re.fullmatch(whole, "".join(f"{line}\n" for line in real)):
        return None
    for said, line in zip((line for line in shown if line.strip()), wanted, strict=True):
        if line.strip() != ANY and not any(re.fullmatch(_pattern(line), other) for other in real):
            return f"this line is not in the output: {said}"
    return "all lines are in the output, but in another order, or with lines between them that the page does not show"


def rough(line: str) -> str:
    """`line` without what differs from run to run and from machine to machine."""
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
    line = line.rpartition("\r")[2] if line.rstrip("\r") else ""
    # Before numbers, as a host's name and a path may contain some.
    for host in {socket.gethostname(), LAPTOP}:
        line = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "HOST", line)
    line = re.sub(r"(?<![\w.\"'])/[\w.+@%-]+(/[\w.+@%-]*)+", "PATH", line)
    line = re.sub(r"[-+]?\d+(,\d+)*(\.\d+)*([eE][-+]?\d+)?", "0", line)
    line = re.sub(r"\b0 ?(ns|us|µs|ms|s|min|h)\b", "0 s", line)
    line = re.sub(r"\b0 ?[kKMGT]i?B\b", "0 B", line)
    line = re.sub(r"\b0 ?[kMGT]?FLOP", "0 FLOP", line)
    line = re.sub(r"[─━═-]{2,}", "--", line)
    return " ".join(line.split())


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split(ANY))
