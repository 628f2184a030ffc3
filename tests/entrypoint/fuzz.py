"""A fuzz test: recordings with random faults go through all of `muster detect` and a dry run, 20,000 in minutes.

    python -m tests.entrypoint.fuzz --count 20000 --seed 1

One to three variables or files of a recording are left out, doubled or emptied, or get an enormous value, a hostile one
or another recording's. The answer has to be the right place in the right world, or a refusal of three lines: no
traceback, at most MAX_SECONDS each, MAX_MIB of memory, no control character on the terminal, nothing a shell would run.

tests/entrypoint/detect/test_recordings_mutated.py runs a small sample.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from muster.entrypoint import container, show
from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.launch.program import Program
from muster.entrypoint.options import LaunchOptions
from muster.errors import MusterError
from tests.entrypoint import recorded
from tests.entrypoint.detect import test_recordings_mutated as mutated
from tests.entrypoint.recorded import Recording

MAX_SECONDS = 2.0
MAX_MIB = 300

CANARY = "muster-fuzz-canary"
ENORMOUS = (
    "9" * 5000, "1" + "0" * 12, "999999", "1000000", "99999999999999999999", "-" + "9" * 40, "٣", "𝟛",
    "n[0-199999,0-199999,0-199999,0-199999]", ",".join(["n[0-199999]"] * 50), "n[0-99]x[0-99]x[0-99]",
    "1(x200000)", "1(x" + "9" * 30 + ")", "a," * 60_000 + "a", "x" * 130_000, "1," * 60_000 + "1", "[" * 60_000,
    " x\n" * 200_000,
)  # fmt: skip
HOSTILE = (
    f"$(touch {CANARY})", f"`touch {CANARY}`", f"'; touch {CANARY}; '", f'"; touch {CANARY}; "', f"x\ntouch {CANARY}\n",
    "\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\r", "\x7f", "\u2028", "\u202e", "\udcff\udcfe", "a\tb", "\\", "node01\x00x",
    "../../etc/passwd", "-n1", "--help", "%s%n", "ƒ", "🙂", "::1", "fe80::1%eth0", "10.0.0.1",
)  # fmt: skip
NAMES = (f"PET_$(touch {CANARY})", f"PET_X;touch {CANARY};", "BASH_FUNC_module%%", "a.b", "PET_Ü", "MUSTER_\x1b[2J")

# Variables that users set, or that other programs leave behind.
ADDED = (
    "MASTER_ADDR", "MASTER_PORT", "MUSTER_HOSTS", "MUSTER_NODE_RANK", "MUSTER_ATTEMPT", "MUSTER_SITE", "PET_X",
    "PET_NPROC_PER_NODE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOME",
    "SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TMPDIR",
    "PMIX_NAMESPACE",
)  # fmt: skip

TRAINER = Program("module", ("muster.train", "ddp"), is_ours=True)


@dataclass(frozen=True)
class Case:
    """A changed recording, and its changes in words."""

    recording: Recording
    environment: Environment
    changes: tuple[str, ...]
    is_believed: bool
    """Whether another world than the recording's may be right."""


def cases(count: int, seed: int) -> Iterator[Case]:
    """`count` cases; the same for the same seed."""
    rng = random.Random(seed)
    donors = [{**recording.environment} for recording in recorded.ALL]
    for _ in range(count):
        recording = rng.choice(recorded.ALL)
        env = recording.environment
        variables, files = dict(env), dict(env.files)
        own = sorted(name for name in env if name in container.names()) or ["RANK"]
        changes: list[str] = []
        believed = False
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            what = rng.choice(rng.choice((own, own, [f"file {name}" for name in files] or own, ADDED, ("name",))))
            kind = rng.choice(("missing", "doubled", "emptied", "enormous", "foreign", "hostile"))
            # A user's setting is obeyed; and where two variables were changed, none may be left that contradicts them.
            believed |= what in (*ADDED, *mutated.SOLE_WITNESSES.get(recording.scenario, ())) or bool(changes)
            changes.append(f"{what} {kind}")
            if what == "name":
                variables[rng.choice(NAMES)] = rng.choice(HOSTILE)
                continue
            table, name = (files, what.removeprefix("file ")) if what.startswith("file ") else (variables, what)
            value = table.get(name, "")
            if kind == "missing":
                table.pop(name, None)
            elif kind == "foreign":
                table[name] = rng.choice([donor[name] for donor in donors if name in donor] or ["x"])
                believed = True
            else:
                table[name] = {
                    "doubled": value * 2,
                    "emptied": "",
                    "enormous": rng.choice(ENORMOUS),
                    "hostile": rng.choice(("", value)) + rng.choice(HOSTILE),
                }[kind]
        yield Case(recording, replace(env, variables=variables, files=files), tuple(changes), believed)


def as_file(env: Environment) -> bytes:
    """`env` as a recording: its host, its variables as the command `env` prints them, and its files."""
    lines = [f"# host: {env.host or ''}", *(f"{name}={value}" for name, value in env.items())]
    for name, content in env.files.items():
        lines += [f"--- file {name}", content.removesuffix("\n")]
    return "\n".join(lines).encode("utf-8", "surrogateescape") + b"\n"


def answer(path: Path, form: str) -> tuple[str, Allocation | None]:
    """The text that the terminal gets for the recording at `path`, and its allocation; None where it is refused."""
    options = LaunchOptions(env_file=str(path))
    try:
        env = start.environment_of(options)
        here = start.find(env, options, ["train", "ddp"])
        planned = start.plan(here, TRAINER, ["train", "ddp"])
    except MusterError as refusal:
        return str(refusal), None
    if form == "script":
        return show.script(planned), here.allocation
    return (show.as_json if form == "json" else show.as_table)(here, planned), here.allocation


def problems(case: Case, folder: Path, form: str, ends: Counter[str]) -> Iterator[str]:
    """The faults of the answer to `case`; `ends` counts whether it was answered or refused."""
    path = folder / "job.env"
    path.write_bytes(as_file(case.environment))
    # The caches are meant for a process that detects only once.
    hostlist.expand.cache_clear()
    hostlist.index_of.cache_clear()
    started = time.process_time()
    try:
        text, found = answer(path, form)
    except Exception as error:  # only a MusterError may come out
        yield f"{type(error).__name__}: {str(error)[:200]}"
        return
    took_s = time.process_time() - started
    ends["refused" if found is None else "answered"] += 1
    if took_s > MAX_SECONDS:
        yield f"{took_s:.1f} s"
    if not all(character.isprintable() or character == "\n" for character in text):
        yield "a control character on the terminal"
    if found is None:
        if text.count("\n") != 2:
            yield f"a refusal of {text.count(chr(10)) + 1} lines"
        return
    truth = recorded.find(case.recording.environment)
    if not case.is_believed and (truth is None or not mutated.same_world(found, truth)):
        yield f"another world: {found.world_size} ranks, rank {found.rank}"
    if form == "script" and CANARY in text:
        script = "\n".join(text.splitlines()[:-1])
        subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, check=False, timeout=240)
        if (folder / CANARY).exists():
            (folder / CANARY).unlink()
            yield "a shell ran what is in it"


def run(count: int, seed: int) -> tuple[list[str], Counter[str], float]:
    """The faults, each with its case; how many cases were answered and refused; the longest time, in seconds."""
    wrong: list[str] = []
    ends: Counter[str] = Counter()
    longest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases(count, seed)):
            form = ("script", "json", "script", "table")[number % 4]
            started = time.process_time()
            found = list(problems(case, Path(folder), form, ends))
            longest_s = max(longest_s, time.process_time() - started)
            wrong += [f"{number}: {case.recording} ({', '.join(case.changes)}): {what}" for what in found]
    return wrong, ends, longest_s


def main() -> int:
    """Prints the faults and figures; returns 1 if there were faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    recorded.find(recorded.ALL[0].environment)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + (MAX_MIB << 20), resource.RLIM_INFINITY))
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    wrong, ends, longest_s = run(arguments.count, arguments.seed)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before_mib
    print(*wrong, sep="\n")
    print(f"{dict(ends)}; the longest took {longest_s:.2f} s; memory grew by {grown_mib} MiB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
