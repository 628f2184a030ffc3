"""Changes the code in small ways, one at a time, and tells which changes no test of `make test` notices.

    python -m tests.mutants [--number 120] [--seed 1] [--jobs 2] [--only PATH]

A mutant is one changed place: a comparison, a condition, a constant, a sign. It is killed where a test fails in a copy
of this checkout that has it; each is printed with its line and the test that killed it. Exit code 0: at least 85 of 100
were killed.
"""

import argparse
import ast
import copy
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.lanes import QUICK

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.85
LIMIT_S = 600
"""A mutant whose tests are not over by then is killed: it made something wait."""

OUTPUT = ".pytest-output"
"""In a copy of the checkout: what its last tests said."""

NO_TESTS = 5
"""pytest's exit code where it selects none."""

AREAS = {
    "detection": (["entrypoint/detect/*.py", "entrypoint/resources.py"], ["tests/entrypoint"]),
    "rendezvous": (["entrypoint/rendezvous/address.py", "entrypoint/rendezvous/file.py"], ["tests/entrypoint"]),
    "launch": (
        ["entrypoint/launch/start.py", "entrypoint/launch/torchrun.py", "entrypoint/options.py"],
        ["tests/entrypoint"],
    ),
    "checkpoints": (["train/checkpoint/*.py"], ["tests/train/checkpoint", "tests/train/test_export.py"]),
    "data": (["train/data/*.py"], ["tests/train/data"]),
    "strategies": (["train/parallel/*.py"], ["tests/train/parallel", "tests/train/reporting/test_stopwatch.py"]),
    "verdicts": (["muster/check/doctor/*.py", "muster/check/bench/*.py"], ["tests/check"]),
}
"""What is changed, and the tests that have to notice it."""

ABSENT = ("train/data/nvjpeg.py", "muster/check/doctor/gpus.py")
ON_GPUS = re.compile(r"torch\.cuda\.(Event|stream|current_stream)\(")
"""Files, and what functions call, that need a GPU."""

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

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


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
    """True for sums of texts and lists, whose other signs are errors of types that any test finds."""
    kinds = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
    return any(
        isinstance(part, kinds) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def skipped(tree: ast.Module) -> set[ast.AST]:
    """Nodes that are left as they are: annotations, decorators, defaults of options, what types or GPUs alone need."""
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


def mutants_of(area: str, path: Path) -> list[Mutant]:
    """All mutants of one file."""
    source = path.read_text()
    tree = ast.parse(source)
    left = skipped(tree)
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
            found.append(Mutant(area, str(path.relative_to(ROOT)), node.lineno, before, after, text))
    return found


def choose(number: int, seed: int, only: str) -> list[Mutant]:
    """As many mutants of each area, drawn by chance, in an order that mixes the areas."""
    drawn = random.Random(seed)
    chosen: list[Mutant] = []
    for place, (area, (patterns, _)) in enumerate(AREAS.items()):
        paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
        names = [path for path in paths if str(path.relative_to(ROOT)) not in ABSENT and only in str(path)]
        all_of_them = [mutant for path in names for mutant in mutants_of(area, path)]
        share = number // len(AREAS) + (place < number % len(AREAS))
        chosen += drawn.sample(all_of_them, min(share, len(all_of_them)))
    drawn.shuffle(chosen)  # so that the first ones are a fair sample, should it be broken off
    return chosen


def copy_checkout(folder: Path) -> None:
    """A copy of the files that git knows, with an environment of its own that borrows this one's packages."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    venv.create(folder / ".venv", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
    # Path files in a folder that a path file adds are not read: the installed clone stays out of it.
    (site / "borrowed.pth").write_text(f"{folder}\n{sysconfig.get_path('purelib')}\n")
    for name in ("train", "muster"):
        script = folder / ".venv" / "bin" / name
        script.write_text(f"#!{folder}/.venv/bin/python\nfrom muster.entrypoint.main import {name}\n{name}()\n")
        script.chmod(0o755)


def is_noticed(folder: Path, tests: Sequence[str], marks: str = QUICK) -> bool:
    """True where one of the tests with these marks fails in the checkout in `folder`."""
    argv = [str(folder / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "--timeout=120", "-m", marks, *tests]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    env = {**kept, "PYTHONDONTWRITEBYTECODE": "1"}
    with (folder / OUTPUT).open("w") as output:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(LIMIT_S) not in (0, NO_TESTS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True


def failed_test(folder: Path) -> str:
    """The test that failed in the last run of tests in `folder`, with its reason as pytest shortens it."""
    said = (folder / OUTPUT).read_text(errors="replace").splitlines()
    failures = [line for line in said if line.startswith(("FAILED ", "ERROR "))]
    return failures[-1].partition(" ")[2] if failures else f"no test was over within {LIMIT_S} s, or none could start"


def try_mutant(mutant: Mutant, folder: Path) -> bool:
    """True where a test notices the mutant: those that bear the module's name are asked first."""
    path = folder / mutant.path
    original = path.read_text()
    path.write_text(mutant.text)
    try:
        tests = AREAS[mutant.area][1]
        named = sorted(
            str(file.relative_to(folder))
            for file in (folder / "tests").rglob(f"test_*{Path(mutant.path).stem}*.py")
            if any(str(file.relative_to(folder)).startswith(test) for test in tests)
        )
        return (
            bool(named and is_noticed(folder, named))
            or is_noticed(folder, tests, f"({QUICK}) and not process")
            or is_noticed(folder, tests, f"({QUICK}) and process")
        )
    finally:
        path.write_text(original)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="PATH", help="only files with this in their path")
    options = parser.parse_args()
    mutants = choose(options.number, options.seed, options.only)
    free: Queue[Path] = Queue()
    started = time.monotonic()
    survivors: list[Mutant] = []
    with tempfile.TemporaryDirectory(prefix="muster-mutants-") as scratch:
        for number in range(options.jobs):
            folder = Path(scratch) / str(number)
            copy_checkout(folder)
            free.put(folder)

        def attempt(mutant: Mutant) -> bool:
            folder = free.get()
            try:
                noticed = try_mutant(mutant, folder)
                killer = f"  ({failed_test(folder)})" if noticed else ""
            finally:
                free.put(folder)
            print(f"{'killed' if noticed else 'SURVIVED':9}{mutant.area}: {mutant}{killer}", flush=True)
            return noticed

        def fails_unchanged(tests: tuple[str, ...]) -> str:
            folder = free.get()
            try:
                return (folder / OUTPUT).read_text()[-2000:] if is_noticed(folder, tests) else ""
            finally:
                free.put(folder)

        asked = list({tuple(AREAS[mutant.area][1]): None for mutant in mutants})
        with ThreadPoolExecutor(options.jobs) as pool:
            for tests, failure in zip(asked, pool.map(fails_unchanged, asked), strict=True):
                if failure:
                    print(f"{failure}\nthese fail without any mutant: {' '.join(tests)}", file=sys.stderr)
                    return 2
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, noticed in zip(mutants, pool.map(attempt, mutants), strict=True):
                if not noticed:
                    survivors.append(mutant)
    killed = len(mutants) - len(survivors)
    share = killed / max(1, len(mutants))
    print(f"{killed} of {len(mutants)} mutants killed, {share:.0%}, in {time.monotonic() - started:.0f} s")
    return 0 if killed >= WANTED * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
