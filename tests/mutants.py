"""Changes the code in small ways, one at a time, and tells which changes no test of `make test` notices.

    python -m tests.mutants [--number 120] [--seed 1] [--jobs 2] [--area NAME]... [--only PATH]

A mutant is one changed place: a comparison, a condition, a constant, a sign. Only the tests that run its line are tried
on it; coverage.py finds them, in one run without mutants. It is killed if one of them fails in a copy of this checkout
that has the mutant. A test that is slow, or failed by a timeout, counts only if it passes right afterwards without the
mutant, so that a busy machine kills no mutant. Each mutant is printed with its line and the test that killed it. Exit
code 0: at least 85 of 100 were killed.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue

import coverage

from tests import reached
from tests.lanes import QUICK
from tests.reached_plugin import FIXTURE, TESTS

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.85
LIMIT_S = 600
"""A mutant whose tests are not over after so many seconds survives."""

TEST_LIMIT_S = 120
QUICK_S = 1
SLOW_S = 90
"""Seconds of slow tests, at most, that are tried on a mutant; they start processes, or take longer than QUICK_S."""

MEASURING_S = 3600

OUTPUT = ".pytest-output"
"""The file in a copy of the checkout with the output of its last tests."""

CHOSEN = ".pytest-chosen"
FAILED = f"{CHOSEN}.failed"
LATE = f"not over within {LIMIT_S} s"
PYTEST = "pytest"

MEASURED = ".pytest-measured"

LAUNCHER_TESTS = ["tests/entrypoint", "tests/sites", "tests/jobs"]
"""The tests of three areas, for which they are measured in one run."""

AREAS = {
    "detection": (["entrypoint/detect/*.py", "entrypoint/resources.py"], LAUNCHER_TESTS),
    "rendezvous": (["entrypoint/rendezvous/address.py", "entrypoint/rendezvous/file.py"], LAUNCHER_TESTS),
    "launch": (
        ["entrypoint/launch/start.py", "entrypoint/launch/torchrun.py", "entrypoint/options.py"],
        LAUNCHER_TESTS,
    ),
    "checkpoints": (["train/checkpoint/*.py"], ["tests/train/checkpoint", "tests/train/test_export.py"]),
    "data": (["train/data/*.py"], ["tests/train/data"]),
    "strategies": (["train/parallel/*.py"], ["tests/train/parallel", "tests/train/reporting"]),
    "verdicts": (["muster/check/doctor/*.py", "muster/check/bench/*.py"], ["tests/check"]),
    "agents": (["entrypoint/agent/*.py"], ["tests/entrypoint/agent"]),
    "fabric": (["entrypoint/fabric/*.py"], ["tests/fabric"]),
    "trainer": (
        ["train/trainer.py", "train/process.py", "muster/config_file.py"],
        [
            *("tests/train/test_train.py", "tests/train/test_learning.py", "tests/train/test_validation.py"),
            *("tests/train/test_objective.py", "tests/train/checkpoint", "tests/test_config_file.py"),
        ],
    ),
    "health": (
        ["train/health/*.py", "train/distributed/*.py"],
        ["tests/train/health", "tests/train/distributed"],
    ),
    "reports": (
        ["muster/report/*.py", "train/reporting/*.py"],
        ["tests/report", "tests/train/reporting"],
    ),
}
"""The files that are changed, and the tests that have to notice it, by area."""

ABSENT = ("train/data/nvjpeg.py", "muster/check/doctor/gpus.py")
ON_GPUS = re.compile(r"torch\.cuda\.(Event|stream|current_stream)\(")
"""Files that need a GPU, and calls that show that a function needs one."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the file's new text, and what changed where."""

    area: str
    path: str
    line: int
    before: str
    after: str
    text: str
    lines: range
    """The lines of its statement."""

    when_called: bool
    """False for a statement that runs when its module is loaded."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


@dataclass
class Asked:
    """A test that can notice mutants.

    Attributes:
        is_slow: whether it is marked as one that starts processes, or took longer than QUICK_S.
        lines: the lines that it reaches, by file.
    """

    name: str
    is_slow: bool
    seconds: float
    lines: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]


def changed(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that may take the place of `node`."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = copy.deepcopy(node)
        other.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield other
    elif isinstance(node, ast.BoolOp):
        other = copy.deepcopy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not has_text(node):
        other = copy.deepcopy(node)
        other.op = SIGNS[type(node.op)]()
        yield other
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def has_text(node: ast.AST) -> bool:
    """True for sums of texts and lists: another sign raises a TypeError, which any test finds."""
    kinds = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
    return any(
        isinstance(part, kinds) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def skipped(tree: ast.Module) -> set[ast.AST]:
    """Nodes that are left as they are: annotations, decorators, assert, raise, f-strings, code for types or GPUs."""
    left: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts = [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            parts = [*node.decorator_list]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr) or is_for_types(node):
            parts = [node]
        if isinstance(node, ast.FunctionDef) and ON_GPUS.search(ast.unparse(node)):
            parts = [node]
        for part in parts:
            left |= set(ast.walk(part)) if part is not None else set()
    return left


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(tree: ast.Module) -> dict[ast.AST, tuple[range, bool]]:
    """For each node, the lines of its statement (of a compound one, its head), and whether it is in a function."""
    found: dict[ast.AST, tuple[range, bool]] = {}

    def look(node: ast.AST, lines: range, when_called: bool) -> None:
        if isinstance(node, ast.stmt):
            body = [part for part in getattr(node, "body", []) if isinstance(part, ast.stmt)]
            assert node.end_lineno is not None
            lines = range(node.lineno, max(node.lineno + 1, body[0].lineno) if body else node.end_lineno + 1)
        found[node] = lines, when_called
        for name, value in ast.iter_fields(node):
            called = when_called or (isinstance(node, ast.FunctionDef) and name == "body")
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    look(part, lines, called)

    look(tree, range(0), False)
    return found


def mutants_of(area: str, path: Path) -> list[Mutant]:
    """All mutants of one file."""
    source = path.read_text()
    tree = ast.parse(source)
    left = skipped(tree)
    places = statements(tree)
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node in ast.walk(tree):
        if node in left or not isinstance(node, ast.expr):
            continue
        first = starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        last = starts[node.end_lineno - 1] + node.end_col_offset
        before = source.encode()[first:last].decode()
        for other in changed(node):
            after = f"({ast.unparse(other)})"
            text = source.encode()[:first].decode() + after + source.encode()[last:].decode()
            name = str(path.relative_to(ROOT))
            found.append(Mutant(area, name, node.lineno, before, after, text, *places[node]))
    return found


def choose(number: int, seed: int, areas: Sequence[str], only: str) -> list[Mutant]:
    """Equally many random mutants of each area, in an order that mixes the areas; of them those of `areas`."""
    drawn = random.Random(seed)
    chosen: list[Mutant] = []
    for place, (area, (patterns, _)) in enumerate(AREAS.items()):
        paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
        names = [path for path in paths if str(path.relative_to(ROOT)) not in ABSENT and only in str(path)]
        all_of_them = [mutant for path in names for mutant in mutants_of(area, path)]
        share = number // len(AREAS) + (place < number % len(AREAS))
        chosen += drawn.sample(all_of_them, min(share, len(all_of_them)))
    drawn.shuffle(chosen)  # so that the first ones are a fair sample, if the run is broken off
    return [mutant for mutant in chosen if mutant.area in areas]


def copy_checkout(folder: Path) -> None:
    """Copies the files that git does not ignore, and makes an environment there that uses this one's packages."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=240).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    venv.create(folder / ".venv", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
    # Python reads no .pth files in folders that a .pth file adds: so the editable install of the clone has no effect.
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    borrowed = dict.fromkeys([str(folder), *packages, str(Path(coverage.__file__).parents[1])])
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    for name in ("train", "muster"):
        script = folder / ".venv" / "bin" / name
        script.write_text(f"#!{folder}/.venv/bin/python\nfrom muster.entrypoint.main import {name}\n{name}()\n")
        script.chmod(0o755)


def run_pytest(folder: Path, limit_s: float, *words: str) -> int | None:
    """Runs tests of `make test` in the checkout in `folder`; returns the exit code, None where they did not end."""
    argv = [str(folder / ".venv/bin/python"), "-m", "pytest", "-q", f"--timeout={TEST_LIMIT_S}", "-m", QUICK]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    with (folder / OUTPUT).open("w") as output:
        process = subprocess.Popen(
            [*argv, "-p", "tests.reached_plugin", *words],
            cwd=folder,
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def measure(folder: Path, tests: Sequence[str], files: Sequence[str]) -> dict[str, Asked]:
    """Runs `tests` in the checkout in `folder`; returns those that passed, with the lines of `files` that they reach.

    Raises:
        RuntimeError: they did not end.
    """
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
    noting = site / "noting.pth"
    measured = folder / MEASURED
    shutil.rmtree(measured, ignore_errors=True)
    measured.mkdir()
    paths = [str(folder / file) for file in files]
    noting.write_text(f"import tests.reached; tests.reached.measure({str(measured)!r}, {paths})\n")
    try:
        run_pytest(folder, MEASURING_S, f"--measure={measured}", *tests)
    finally:
        noting.unlink()
    if not (measured / TESTS).exists():
        raise RuntimeError(f"the tests without any mutant did not end: {(folder / OUTPUT).read_text()[-3000:]}")
    found: dict[str, Asked] = {}
    users: dict[str, list[str]] = defaultdict(list)
    for name, test in json.loads((measured / TESTS).read_text()).items():
        if test["outcomes"] == ["passed"] * 3:
            found[name] = Asked(name, test["is_process"] or test["seconds"] > QUICK_S, test["seconds"])
            for fixture in test["fixtures"]:
                users[FIXTURE + fixture].append(name)
        elif "failed" in test["outcomes"]:
            print(f"not asked, since it fails when it is measured: {name}", flush=True)
    both = coverage.Coverage(data_file=str(measured / reached.DATA), config_file=False, messages=False)
    both.combine()
    data = both.get_data()
    for path, file in zip(paths, files, strict=True):
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                for name in users.get(context, [context]):
                    if name in found:
                        found[name].lines[file].add(line)
    return found


def asked_of(mutant: Mutant, tests: dict[str, Asked]) -> list[list[Asked]]:
    """The tests that are tried on the mutant, in order: quick ones of its module, other quick ones, slow ones.

    These are the tests that reach its line; if none does, or the line runs when the module is loaded, all that reach
    the file. A process that was killed has left no record of the lines that it reached.
    """
    file = [test for test in tests.values() if mutant.path in test.lines]
    line = [test for test in file if test.lines[mutant.path].intersection(mutant.lines)]
    reaching = line if line and mutant.when_called else file
    named = Path(mutant.path).stem
    seconds: Counter[str] = Counter()
    for test in reaching:
        seconds[test.file] += test.seconds
    quick = [test for test in reaching if not test.is_slow]
    quick.sort(key=lambda test: (seconds[test.file], test.file))
    # One case of each test function before the second of any, so that those within SLOW_S are not all alike.
    cases: Counter[str] = Counter()
    order: dict[str, tuple[bool, int, float]] = {}
    for test in (test for test in reaching if test.is_slow):
        function = test.name.partition("[")[0]
        order[test.name] = (named not in test.file, cases[function], test.seconds)
        cases[function] += 1
    slow: list[Asked] = []
    spent = 0.0
    for name in sorted(order, key=order.__getitem__):
        if not slow or spent + tests[name].seconds <= SLOW_S:
            slow.append(tests[name])
            spent += tests[name].seconds
    slow.sort(key=lambda test: (named not in test.file, test.file))
    return [
        [test for test in quick if named in test.file],
        [test for test in quick if named not in test.file],
        slow,
    ]


def first_failure(folder: Path, tests: Sequence[Asked]) -> tuple[str, str]:
    """The first of `tests` to fail in the checkout in `folder`, and its message; both empty where all pass.

    In place of a test: a file that can't be loaded, PYTEST if pytest failed without a test, LATE if it did not end.
    """
    if not tests:
        return "", ""
    (folder / CHOSEN).write_text("".join(f"{test.name}\n" for test in tests))
    files = list(dict.fromkeys(test.file for test in tests))
    code = run_pytest(folder, LIMIT_S, "-x", f"--chosen={folder / CHOSEN}", *files)
    failed = folder / FAILED
    if failed.exists():
        failure = json.loads(failed.read_text().splitlines()[0])
        return failure["test"], failure["text"]
    if code is None:
        return LATE, ""
    return ("", "") if code == 0 else (PYTEST, "")


@dataclass(frozen=True)
class Verdict:
    """The result for a mutant: whether a test noticed it; which one, or how many were tried."""

    is_killed: bool
    why: str


def try_mutant(mutant: Mutant, folder: Path, tests: dict[str, Asked]) -> Verdict:
    """Runs the tests that reach the mutant, in the checkout in `folder`."""
    path = folder / mutant.path
    original = path.read_text()
    batches = [batch for batch in asked_of(mutant, tests) if batch]
    num_asked = sum(map(len, batches))
    while batches:
        asked = batches.pop(0)
        change(path, mutant.text)
        try:
            name, text = first_failure(folder, asked)
        finally:
            change(path, original)
        if name == LATE:
            return Verdict(False, LATE)
        if not name:
            continue
        test = tests.get(name)
        if test is not None and not test.is_slow and "imeout" not in text:
            return Verdict(True, name)
        again = [test] if test is not None else [test for test in asked if name in (test.file, PYTEST)]
        if not first_failure(folder, again)[0]:
            return Verdict(True, name)
        batches.insert(0, [test for test in asked if test not in again])
    return Verdict(False, f"{num_asked} tests asked")


def change(path: Path, text: str) -> None:
    """Writes a module, and removes its compiled files: Python compares the times of both in whole seconds."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--area", action="append", choices=AREAS, help="of the mutants only its; may be repeated")
    parser.add_argument("--only", default="", metavar="PATH", help="only files with this in their path")
    options = parser.parse_args()
    mutants = choose(options.number, options.seed, options.area or list(AREAS), options.only)
    groups = {tuple(AREAS[mutant.area][1]): set[str]() for mutant in mutants}
    for mutant in mutants:
        groups[tuple(AREAS[mutant.area][1])].add(mutant.path)
    free: Queue[Path] = Queue()
    started = time.monotonic()
    outcomes: Counter[tuple[str, bool]] = Counter()
    with tempfile.TemporaryDirectory(prefix="muster-mutants-") as scratch:
        for number in range(options.jobs):
            folder = Path(scratch) / str(number)
            copy_checkout(folder)
            free.put(folder)

        def measured(tests: tuple[str, ...]) -> dict[str, Asked]:
            folder = free.get()
            try:
                found = measure(folder, tests, sorted(groups[tests]))
            finally:
                free.put(folder)
            print(f"{' '.join(tests)}: {len(found)} tests, {time.monotonic() - started:.0f} s", flush=True)
            return found

        def attempt(mutant: Mutant) -> bool:
            folder = free.get()
            try:
                verdict = try_mutant(mutant, folder, asked[tuple(AREAS[mutant.area][1])])
            finally:
                free.put(folder)
            word = "killed" if verdict.is_killed else "SURVIVED"
            print(f"{word:9}{mutant.area}: {mutant}  ({verdict.why})", flush=True)
            return verdict.is_killed

        with ThreadPoolExecutor(options.jobs) as pool:
            asked = dict(zip(groups, pool.map(measured, groups), strict=True))
            for mutant, is_killed in zip(mutants, pool.map(attempt, mutants), strict=True):
                outcomes[mutant.area, is_killed] += 1
    for area in AREAS:
        if of_area := outcomes[area, True] + outcomes[area, False]:
            print(f"{area}: {outcomes[area, True]} of {of_area} killed")
    killed = sum(outcomes[area, True] for area in AREAS)
    share = killed / max(1, len(mutants))
    print(f"{killed} of {len(mutants)} mutants killed, {share:.0%}, in {time.monotonic() - started:.0f} s")
    return 0 if killed >= WANTED * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
