"""`make gpu`: FAIL for a case that hangs, dies or reports wrong figures; SKIP without a GPU; complete result files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.casework import Case, at_most, exactly
from benchmarks.gpu.runner import read_table, write_whole

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "benchmarks" / "gpu" / "runner.py"

MADE_UP = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu import runner
from benchmarks.gpu.casework import Case, at_most

def made(name, code, timeout_s=20, **more):
    start = "import os, sys, time, json, signal, subprocess; report = lambda **f: open(os.environ['GPU_CASE_RESULT'], "
    start += "'w').write(json.dumps({'figures': f})); "
    return Case(name=name, part="A", shows="", command=(sys.executable, "-c", start + code), timeout_s=timeout_s,
                expect={"error": at_most(0.1)}, on_cpu=True, **more)

runner.CPU_PATIENCE = 1
runner.TERM_GRACE_S = 0.5
"""


def run_made_up(
    tmp_path: Path, *cases: str, settings: str = "", deadline_s: float = 60
) -> tuple[int, dict[str, Any], str]:
    """Runs cases given as arguments of `made`; returns the exit code, each case's outcome, and the output."""
    code = f"{MADE_UP}\n{settings}\ncases = [{', '.join(f'made({case})' for case in cases)}]\n"
    code += "sys.exit(runner.main(['--device=cpu', '--out', sys.argv[1]], cases))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=deadline_s)
    assert "Traceback" not in done.stderr, done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["complete"]
    return done.returncode, {one["name"]: one for one in record["cases"]}, done.stdout


def test_figures_within_their_bounds_pass_and_everything_else_fails(tmp_path: Path) -> None:
    code, found, output = run_made_up(
        tmp_path,
        "'good', 'report(error=0.05)'",
        "'hangs', 'signal.signal(signal.SIGTERM, signal.SIG_IGN); print(\"stuck\", flush=True); time.sleep(100)', 1",
        "'dies', 'os.kill(os.getpid(), signal.SIGSEGV)'",
        "'fails', 'report(error=0.0); sys.exit(\"no such thing\")'",
        "'off', 'report(error=0.5)'",
        "'silent', 'pass'",
        "'lacks', 'report(speed=3)'",
        "'no-number', 'report(error=float(\"nan\"))'",
        "'words', 'report(error=\"small\")'",
        '\'torn\', \'open(os.environ["GPU_CASE_RESULT"], "w").write("{")\'',
    )
    assert code == 1
    assert [name for name, one in found.items() if one["verdict"] == "PASS"] == ["good"]
    assert {one["verdict"] for one in found.values()} == {"PASS", "FAIL"}
    reasons = {name: one["reason"] for name, one in found.items()}
    assert "longer than 1 s" in reasons["hangs"]
    assert "SIGSEGV" in reasons["dies"]
    assert "no such thing" in reasons["fails"]
    assert "0.5" in reasons["off"]
    assert "0.1" in reasons["off"]
    assert "missing" in reasons["lacks"]
    assert found["good"]["figures"] == {"error": 0.05}
    assert (tmp_path / found["hangs"]["log"]).read_text() == "stuck\n"
    assert "10 cases: 1 PASS, 9 FAIL, 0 SKIP" in output


def test_nothing_of_a_case_lives_on(tmp_path: Path) -> None:
    """Not even a process in a session of its own, as the ranks of torchrun are."""
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    child = f'subprocess.Popen([\\"sleep\\", \\"1{mark}\\"], start_new_session=True)'
    _, found, _ = run_made_up(
        tmp_path, f"'leaves', '{child}; report(error=0.0)'", f"'stuck', '{child}; time.sleep(99)', 1"
    )
    assert [one["verdict"] for one in found.values()] == ["PASS", "FAIL"]
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in read_if_there(path)]


def read_if_there(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_case_may_skip_with_its_reason_and_a_missing_package_is_one(tmp_path: Path) -> None:
    skips = "json.dump({'skip': 'no such switch'}, open(os.environ['GPU_CASE_RESULT'], 'w'))"
    code, found, _ = run_made_up(
        tmp_path, f"'skips', {skips!r}", "'lacks', 'report(error=0.0)', needs=('no_such_module', 'json')"
    )
    assert code == 0
    assert {one["verdict"] for one in found.values()} == {"SKIP"}
    assert found["skips"]["reason"] == "no such switch"
    assert "no_such_module" in found["lacks"]["reason"]
    assert "json" not in found["lacks"]["reason"]


def test_each_result_is_on_disk_before_the_next_case_begins(tmp_path: Path) -> None:
    read = f"json.load(open({str(tmp_path / 'results.json')!r}))"
    look = f"record = {read}; report(error=abs(len(record['cases']) - 1) + record['complete'])"
    code, found, _ = run_made_up(tmp_path, "'first', 'report(error=0.0)'", f"'second', {look!r}")
    assert code == 0, found


def test_what_is_written_is_whole_even_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_whole(path, {"cases": [1]})
    with pytest.raises(TypeError):
        write_whole(path, {"cases": [1, object()]})
    assert json.loads(path.read_text()) == {"cases": [1]}


def test_sigterm_ends_the_case_and_keeps_the_results(tmp_path: Path) -> None:
    code = f"{MADE_UP}\ncases = [made('first', 'report(error=0.0)'), made('second', 'time.sleep(100)', 90)]\n"
    code += "sys.exit(runner.main(['--device=cpu', '--out', sys.argv[1]], cases))"
    words = [sys.executable, "-c", code, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "logs" / "second.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    record = json.loads((tmp_path / "results.json").read_text())
    assert not record["complete"]
    assert [one["name"] for one in record["cases"]] == ["first"]


def run_runner(*argv: str, hide_gpus: bool = False) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {})
    return subprocess.run([sys.executable, str(RUNNER), *argv], env=env, capture_output=True, text=True, timeout=60)


def test_without_a_gpu_every_case_is_skipped_with_its_reason(tmp_path: Path) -> None:
    done = run_runner("--out", str(tmp_path), hide_gpus=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["complete"]
    assert len(record["cases"]) == len(read_table())
    assert {one["verdict"] for one in record["cases"]} == {"SKIP"}
    assert all(one["reason"] for one in record["cases"])


@pytest.mark.parametrize(
    "argv", [["--part=Z"], ["--only=no-such-case"], ["--device=tpu"], ["--wheels=/no/such", "--device=cpu"]]
)
def test_options_that_are_wrong_are_told_with_exit_code_2(argv: list[str], tmp_path: Path) -> None:
    done = run_runner(*argv, "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_there_are_enough_cases_and_most_run_on_a_cpu() -> None:
    assert len(read_table()) >= 30
    assert sum(case.on_cpu for case in read_table()) >= 20


def test_list_names_every_case_and_its_bounds() -> None:
    done = run_runner("--list")
    assert done.returncode == 0
    for case in read_table():
        assert case.name in done.stdout
        assert case.shows, case.name


def test_a_part_ends_in_its_time_and_names_what_was_not_tried(tmp_path: Path) -> None:
    settings = "runner.PART_S, runner.MIN_S = 3, 1"
    code, found, _ = run_made_up(
        tmp_path, "'long', 'time.sleep(60)', 40", "'late', 'report(error=0.0)'", settings=settings
    )
    assert code == 1
    assert {one["verdict"] for one in found.values()} == {"FAIL"}
    assert "longer than 3 s" in found["long"]["reason"]
    assert "--only=late" in found["late"]["reason"]


def test_a_case_without_a_figure_is_refused() -> None:
    with pytest.raises(ValueError, match="figure"):
        Case(name="bare", part="A", shows="", command=("true",), timeout_s=1, expect={})


def test_bounds_say_what_is_wrong() -> None:
    assert at_most(1).problem(1) is None
    assert exactly(1).problem(True) is None
    for value in (1.5, None, "1", float("nan"), float("inf")):
        assert at_most(1).problem(value), value
