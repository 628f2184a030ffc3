"""Environments of real processes, written down in the format of tests/recordings.

    # source:  scheduler, version, how it was submitted [scenario]
    # process: which process of the job
    # host:    the host it really ran on
    NAME=VALUE
    --- file NAME      the content of the file that the variable NAME names, if the process could read it

A scenario's files are SCENARIO.HOST.RANK.env; RANK is `x` for a shell without one, or `task2` in an array job.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "recordings"

# Every process writes its environment, and a copy of PE_HOSTFILE if it can read that. The rank is the third argument
# if there is one, else the value of the variable that the second argument names.
DUMP = """#!/bin/sh
eval "rank=\\${3:-\\${$2:-x}}"
name="$1/$(hostname).$rank"
[ ! -r "$PE_HOSTFILE" ] || cp "$PE_HOSTFILE" "$name.PE_HOSTFILE"
env > "$name.seen"
"""

# Values that would let somebody into a running job, or only tell where one listened.
SECRET = re.compile(r"_URI\d*$|^(QRSH|PMI)_PORT$|COOKIE|PRECONDITION_TRANSPORTS|SECRET|TOKEN|PASSW", re.IGNORECASE)


@dataclass(frozen=True)
class Scenario:
    """One way to start processes.

    Attributes:
        name: The start of the files' names.
        title: How it was started, for the line `source`.
        script: Shell; DUMP in it stands for the program that is recorded, with the rank as an optional argument.
        rank: The variable that has the true rank.
        shell: What a process without a rank is, for the line `process`.
    """

    name: str
    title: str
    script: str
    rank: str = "SLURM_PROCID"
    shell: str = "the shell of the allocation"


def prepared(scenario: Scenario, workdir: Path) -> str:
    """The scenario's script, with the recording program in the place of DUMP; it writes to `workdir/seen/SCENARIO`."""
    (workdir / "seen" / scenario.name).mkdir(parents=True)
    dump = workdir / "dump.sh"
    dump.write_text(DUMP)
    dump.chmod(0o755)
    return re.sub(
        r"\bDUMP\b", shlex.join([str(dump), str(workdir / "seen" / scenario.name), scenario.rank]), scenario.script
    )


def write(folder: Path, scenario: Scenario, source: str, workdir: Path, kept: Sequence[str]) -> list[Path]:
    """Writes the recordings of a scenario that has run, into `folder`.

    Args:
        folder: Below tests/recordings.
        scenario: As given to `prepared`.
        source: Names and versions of the programs that started the processes.
        workdir: As given to `prepared`; the recordings call it /home/user.
        kept: Beginnings of the names of variables about the job; one with `$` at its end is a whole name.
    """
    names = re.compile("|".join(kept))
    written = []
    for path in sorted((workdir / "seen" / scenario.name).glob("*.seen")):
        host, rank = path.stem.split(".")
        pairs = [line.partition("=")[::2] for line in path.read_text().splitlines() if "=" in line]
        known = sorted((name, _public(name, value, workdir)) for name, value in pairs if names.match(name))
        process = {"x": scenario.shell}.get(rank, f"task {rank}" if rank.isdigit() else f"{scenario.shell}, {rank}")
        head = f"# source: {source}, {scenario.title} [{scenario.name}]\n# process: {process}\n# host: {host}\n"
        text = head + "".join(f"{name}={value}\n" for name, value in known)
        host_file = path.with_suffix(".PE_HOSTFILE")
        if host_file.exists():
            text += f"--- file PE_HOSTFILE\n{host_file.read_text()}"
        target = folder / f"{scenario.name}.{host}.{rank}.env"
        target.write_text(text)
        written.append(target)
    if not written:
        raise RuntimeError(f"no process of {scenario.name} wrote its environment")
    return written


def _public(name: str, value: str, workdir: Path) -> str:
    return "redacted" if SECRET.search(name) else value.replace(str(workdir), "/home/user")
