"""Runs the checks that need a GPU: `make gpu`, or `python benchmarks/gpu/runner.py`.

Runs a table of cases, each in a process group of its own and with a time limit of its own. A case passes if the figures
that it reports are within their bounds in the table; exit code 0 alone proves nothing. Each part takes less than nine
minutes on a GPU: if no time is left in its part, a case is a FAIL. After every case results.json in the folder --out is
written again as a whole; logs/ there has the output of each case.

Without a GPU every case is a SKIP, unless --device=cpu is given: then the cases that make sense on a CPU run there,
over gloo and in small sizes, with five times the time.

Exit codes: 0, 1 if a case failed, 2 if an option is wrong.
"""

# ruff: noqa: E402

import argparse
import ctypes
import datetime
import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(ROOT)]  # in place of this script's folder: its files are imported as benchmarks.gpu.NAME

from benchmarks.gpu.casework import DEVICE, PARTS, RESULT, SCRATCH, SHARED, TABLE, Case

FILES = ("correctness", "faults", "data", "checks", "speed")
"""The files with cases, in the order of the table."""

EPILOG = """\
Where our packages are missing and no index can be reached, carry wheels for that machine's Python:
  python -m pip download --no-deps --only-binary=:all: --python-version 3.12 \\
      --platform manylinux_2_17_x86_64 --dest wheels msgspec pyelftools
  python benchmarks/gpu/runner.py --wheels wheels
They are installed by 'pip install --no-index --no-deps --target' into a folder below --out, which is first on the
PYTHONPATH of every case. A case that imports what is still missing is a SKIP that names it.
"""

PROBE = """\
import json, torch
there = torch.cuda.is_available()
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
for number in range(torch.cuda.device_count() if there else 0):
    card = torch.cuda.get_device_properties(number)
    torch.zeros(1, device=f"cuda:{number}").item()
    found["gpus"].append({"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1),
                          "capability": f"{card.major}.{card.minor}", "multiprocessors": card.multi_processor_count})
print(json.dumps(found))
"""
PROBE_TIMEOUT_S = 40.0
TERM_GRACE_S = 5.0
PART_S = 525.0
"""Seconds for all cases of a part on a GPU: nine minutes with the probe and the time to end a last case that hangs."""
MIN_S = 5.0
"""A case is not started with less time left than this."""
CPU_PATIENCE = 5
"""How many times longer a case may take on a CPU."""

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
PR_SET_CHILD_SUBREAPER = 36
"""Source: https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html"""


@dataclass(kw_only=True)
class Outcome:
    """The result of a case."""

    name: str
    part: str
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    timeout_s: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, str] = field(default_factory=dict)
    log: str | None = None
    last_lines: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Machine:
    """The result of the probe.

    Attributes:
        problem: why there is no GPU to be used; None if there is one.
    """

    gpus: list[dict[str, Any]] = field(default_factory=list)
    torch: str | None = None
    cuda: str | None = None
    problem: str | None = None


def read_table() -> list[Case]:
    """All cases. A file that is not there is left out."""
    for name in FILES:
        if (ROOT / "benchmarks" / "gpu" / f"{name}.py").exists():
            importlib.import_module(f"benchmarks.gpu.{name}")
    return TABLE


def probe(env: Mapping[str, str]) -> Machine:
    """Looks for GPUs, in a child with a time limit: a process that asks a faulty driver can hang."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Machine(problem=f"torch did not say within {PROBE_TIMEOUT_S:.0f} s whether there is a GPU")
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        how = f"by {signal.Signals(-asked.returncode).name}" if asked.returncode < 0 else f"code {asked.returncode}"
        return Machine(problem=f"torch can't be asked for a GPU: {said[-1] if said else how}")
    found = json.loads(asked.stdout.splitlines()[-1])
    machine = Machine(gpus=found["gpus"], torch=found["torch"], cuda=found["cuda"])
    if not machine.gpus:
        machine.problem = "no GPU can be seen"
    return machine


def missing(modules: Sequence[str], env: Mapping[str, str]) -> set[str]:
    """Those of `modules` that a Python with `env` does not find."""
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])"
    words = [sys.executable, "-c", code, *modules]
    return set(subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.split())


def install_wheels(wheels: Path, target: Path) -> None:
    """Installs the wheels in the folder `wheels` into `target`, without an index.

    Raises:
        SystemExit: with code 2: there are none, or pip refuses them.
    """
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        raise SystemExit(usage_error(f"no .whl file in {wheels}"))
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    done = subprocess.run([*words, "--target", str(target), *files], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(usage_error(f"pip can't install {wheels}: {done.stderr.strip().splitlines()[-1:]}"))


def why_not(case: Case, device: str, machine: Machine, absent: set[str]) -> str | None:
    """Why `case` can't be tried here; None if it can."""
    if device == "cpu" and not case.on_cpu:
        return "it needs a GPU"
    if device != "cpu" and (machine.problem or len(machine.gpus) < case.num_gpus):
        has = "1 GPU is" if len(machine.gpus) == 1 else f"{len(machine.gpus)} GPUs are"
        return machine.problem or f"it needs {case.num_gpus} GPUs, and {has} there"
    lacking = sorted(absent.intersection(case.needs))
    return f"not installed: {', '.join(lacking)} (see --wheels in --help)" if lacking else None


def run_case(case: Case, device: str, out: Path, env: Mapping[str, str], spent_s: float) -> Outcome:
    """Runs `case` to its end, or to its time limit, and judges it.

    Args:
        spent_s: the seconds that the earlier cases of its part took.
    """
    patience = CPU_PATIENCE if device == "cpu" else 1
    limit_s = min(case.timeout_s * patience, max(0.0, round(PART_S * patience - spent_s, 1)))
    outcome = Outcome(name=case.name, part=case.part, verdict=FAIL, timeout_s=limit_s)
    outcome.bounds = {name: str(bound) for name, bound in case.bounds(device).items()}
    if limit_s < min(MIN_S, case.timeout_s):
        outcome.reason = f"the time of part {case.part} is used up: try it with --only={case.name}"
        return outcome
    log, shared = out / "logs" / f"{case.name}.log", out / "shared"
    for folder in (log.parent, shared):
        folder.mkdir(parents=True, exist_ok=True)
    outcome.log = str(log.relative_to(out))
    with tempfile.TemporaryDirectory(prefix=f"gpu-{case.name}-", ignore_cleanup_errors=True) as scratch:
        result = Path(scratch, "result.json")
        (work := Path(scratch, "work")).mkdir()
        told = {DEVICE: device, RESULT: str(result), SCRATCH: str(work), SHARED: str(shared)}
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                case.command, cwd=ROOT, env={**env, **told}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process, TERM_GRACE_S)
        outcome.seconds = round(time.monotonic() - started, 2)
        outcome.last_lines = log.read_text(errors="replace").splitlines()[-25:]
        judge(outcome, case, device, code, result)
    if outcome.verdict != FAIL:
        outcome.last_lines = []
    return outcome


def judge(outcome: Outcome, case: Case, device: str, code: int | None, result: Path) -> None:
    """Settles the verdict, by how the process ended and what it left in the file `result`."""
    if code is None:
        outcome.reason = f"it took longer than {outcome.timeout_s:g} s, and was ended"
        return
    if code:
        last = next((line.strip() for line in reversed(outcome.last_lines) if line.strip()), "nothing in its log")
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        outcome.reason = f"{how}: {last[:200]}"
        return
    try:
        found = json.loads(result.read_text())
        if "skip" in found:
            outcome.verdict, outcome.reason = SKIP, str(found["skip"])
            return
        outcome.figures = dict(found["figures"])
    except (OSError, ValueError, KeyError, TypeError):
        outcome.reason = "exit code 0, but it reported no figures"
        return
    problems = [(name, bound.problem(outcome.figures.get(name))) for name, bound in case.bounds(device).items()]
    outcome.reason = "; ".join(f"{name} {problem}" for name, problem in problems if problem)
    outcome.verdict = FAIL if outcome.reason else PASS


def end_group(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Ends all processes of a case: its process group, then those in sessions of their own."""
    if process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(100):
        # A launcher's ranks have sessions of their own. As the subreaper, this process is their parent now.
        left = descendants(os.getpid())
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap()
        if not left:
            return
        time.sleep(0.05)


def signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def reap() -> None:
    """Reaps all children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def descendants(ancestor: int) -> list[int]:
    """The processes that `ancestor` has started, and those that these have started; without zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it has ended
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, queue = [], [ancestor]
    while queue:
        queue += (own := children.get(queue.pop(), []))
        found += own
    return found


def adopt_orphans() -> None:
    """Makes this process the parent of all processes below it whose own parent ends."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux


def write_whole(path: Path, record: Mapping[str, Any]) -> None:
    """Replaces the file at `path` atomically: a reader sees all of the old one or all of the new one."""
    partly = path.with_suffix(".part")
    with partly.open("w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partly.replace(path)


def usage_error(wrong: str) -> int:
    """Says what is wrong with an option; returns the exit code."""
    print(f"gpu: {wrong}\n  fix: see --help and --list", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("--part", choices=PARTS, action="append", help="only this part; may be given more than once")
    add("--only", metavar="NAME", action="append", help="only this case; may be given more than once")
    add("--list", action="store_true", help="show the cases, and run none")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a stand-in, where no GPU is at hand")
    add("--out", type=Path, help="where results.json and the logs go (default: runs/gpu-DATE)")
    add("--wheels", type=Path, metavar="DIR", help="wheels of packages that are missing here")
    return options


def chosen(cases: Sequence[Case], asked: argparse.Namespace) -> list[Case]:
    """The cases that the options name.

    Raises:
        SystemExit: with code 2: one of them is not there.
    """
    unknown = set(asked.only or ()) - {case.name for case in cases}
    if unknown:
        raise SystemExit(usage_error(f"there is no case {', '.join(sorted(unknown))}"))
    return [
        case for case in cases
        if (not asked.part or case.part in asked.part) and (not asked.only or case.name in asked.only)
    ]  # fmt: skip


def show_list(cases: Sequence[Case]) -> None:
    for part, title in PARTS.items():
        own = [case for case in cases if case.part == part]
        if own:
            limit_s = min(PART_S, sum(case.timeout_s for case in own))
            print(f"\n{part}  {title}: {len(own)} cases, {limit_s:g} s at most")
        for case in own:
            where = f"{case.num_gpus} GPU" + (", or CPU" if case.on_cpu else "")
            print(f"  {case.name:26} {case.timeout_s:4g} s  {where:13}  {case.shows}")
            print(f"  {'':26} {'; '.join(f'{name}: {bound}' for name, bound in case.expect.items())}")


def show(outcomes: Sequence[Outcome]) -> None:
    """The closing table."""
    print(f"\n{'':4}  {'case':26} {'s':>6}  figures, or the reason")
    for outcome in outcomes:
        numbers = {name: value for name, value in outcome.figures.items() if name in outcome.bounds}
        words = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, int | float))
        print(f"{outcome.verdict:4}  {outcome.name:26} {outcome.seconds:6.1f}  {outcome.reason or words}")
    counts = [f"{sum(one.verdict == verdict for one in outcomes)} {verdict}" for verdict in (PASS, FAIL, SKIP)]
    print(f"{len(outcomes)} cases: {', '.join(counts)}")


def main(argv: Sequence[str] | None = None, cases: Sequence[Case] | None = None) -> int:
    """Runs the cases that `argv` asks for, of the table or of `cases`; returns the exit code."""
    asked = parser().parse_args(argv)
    wanted = chosen(read_table() if cases is None else cases, asked)
    if asked.list:
        show_list(wanted)
        return 0
    now = datetime.datetime.now(datetime.UTC)
    out: Path = (asked.out or ROOT / "runs" / f"gpu-{now:%Y%m%d-%H%M%S}").absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return usage_error(f"--out={out}: {error.strerror}")
    site = out / "site"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if asked.wheels:
        install_wheels(asked.wheels, site)
        paths.insert(0, str(site))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    adopt_orphans()
    machine = probe(env) if asked.device == "cuda" else Machine()
    absent = missing(sorted({name for case in wanted for name in case.needs}), env) if wanted else set[str]()
    record: dict[str, Any] = {
        "started": now.isoformat(timespec="seconds"),
        "command": ["python", *sys.argv],
        "device": asked.device,
        "python": platform.python_version(),
        "machine": asdict(machine) | {"host": platform.node(), "cpus": len(os.sched_getaffinity(0))},
        "complete": False,
    }
    outcomes: list[Outcome] = []
    spent_s = dict.fromkeys(PARTS, 0.0)

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        for number, case in enumerate(wanted, 1):
            reason = why_not(case, asked.device, machine, absent)
            if reason is None:
                print(f"[{number}/{len(wanted)}] {case.name} ...", flush=True)
                outcome = run_case(case, asked.device, out, env, spent_s[case.part])
                spent_s[case.part] += outcome.seconds
            else:
                outcome = Outcome(name=case.name, part=case.part, verdict=SKIP, reason=reason)
            outcomes.append(outcome)
            write_whole(out / "results.json", record | {"cases": [asdict(one) for one in outcomes]})
            print(f"{outcome.verdict}  {case.name}  {outcome.seconds:.1f} s  {outcome.reason}", flush=True)
        record["complete"] = True
    except KeyboardInterrupt:
        return 130
    finally:
        write_whole(out / "results.json", record | {"cases": [asdict(one) for one in outcomes]})
        shutil.rmtree(out / "shared", ignore_errors=True)
        shutil.rmtree(site, ignore_errors=True)
        show(outcomes)
        print(f"results: {out / 'results.json'}")
    return 1 if any(outcome.verdict == FAIL for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
