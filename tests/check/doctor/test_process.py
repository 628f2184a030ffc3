"""`muster doctor` and `train --preflight` as users start them on this machine."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from muster.check.doctor.finding import code_of
from tests.check.doctor.healthy import found_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def start(
    command: str, *argv: str, folder: Path, env: Mapping[str, str] = {}, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs our command after the shell code `before`, without the variables of a job that the tests may run in."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    words = [str(BIN / command), *argv] if command != "python" else [sys.executable, *argv]
    return subprocess.run(
        ["sh", "-c", f'{before}\nexec "$@"', "sh", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_two_ranks_tell_a_program(tmp_path: Path) -> None:
    done = start("muster", "doctor", "--json", "--device=cpu", "--nproc-per-node=2", folder=tmp_path)
    told = json.loads(done.stdout)
    findings = found_of(told)
    # This machine may have faults, but none that stops ranks from communicating.
    assert {finding.about for finding in findings} <= {"shm", "open files", "cores", "checkpoints"}, done.stdout
    assert done.returncode == told["code"] == code_of(findings)
    assert told["ranks"] == 2
    assert told["seconds"] > 0
    assert [rank["rank"] for rank in told["facts"]] == [0, 1]
    names = [part["name"] for part in told["parts"]]
    assert names[0] == "software"
    assert names[-1] == "collectives"
    # Meanwhile one rank prints each step.
    steps = [line for line in done.stderr.splitlines() if line.startswith("muster doctor: ")]
    assert len(steps) == len(set(steps)) >= 3, done.stderr
    assert "collectives" in steps[-1]
    assert list(tmp_path.iterdir()) == []


def test_warnings_leave_the_way_to_a_training_open(tmp_path: Path) -> None:
    """`muster doctor && train ddp` trains."""
    done = start(
        "muster", "doctor", "--quick", "--device=cpu", "--nproc-per-node=2", folder=tmp_path, before="ulimit -n 300"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the limit of open files is low" in done.stdout
    assert "seen: ulimit -n: 300" in done.stdout
    assert "error:" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_fault_ends_all_ranks_with_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["--quick", "--device=cpu", "--nproc-per-node=2", "--checkpoint-dir=file/runs"]
    done = start("muster", "doctor", *options, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no checkpoint can be written" in done.stdout
    assert "Not a directory" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1].startswith("failed: 1 finding")
    assert "error:" not in done.stderr


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named_with_its_host(tmp_path: Path, unused_port: int) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MUSTER_NODES": "alpha,beta"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    done = start("python", "-m", "muster.check", "doctor", "--json", "--timeout-s=3", folder=tmp_path, env=env)
    assert done.returncode == 2, done.stderr
    (finding,) = found_of(json.loads(done.stdout))
    assert (finding.host, finding.wrong) == ("alpha, beta", "ranks 1, 2, 3 did not connect")
    assert "waited 3 s" in finding.seen


# Rank 1 is killed in its first reduce, and so can't report anything.
KILLED = """
import os, signal, sys, threading, time
def plant():
    while not hasattr(sys.modules.get("torch.distributed"), "batch_isend_irecv"):
        time.sleep(0.01)
    sys.modules["torch.distributed"].reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("RANK") == "1" and "muster.check" in sys.orig_argv:
    threading.Thread(target=plant, daemon=True).start()
"""


@pytest.mark.full
def test_a_rank_that_is_killed_in_a_collective_is_told_by_another_node(tmp_path: Path, unused_port: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILLED)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = ["doctor", "--json", "--device=cpu", "--nproc-per-node=1", "--nnodes=2", "--master-addr=127.0.0.1"]
    words += [f"--master-port={unused_port}"]
    with ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(start, "muster", *words, f"--node-rank={rank}", folder=tmp_path, env=env) for rank in (0, 1)
        ]
        first, second = (node.result() for node in nodes)
    (finding,) = found_of(json.loads(first.stdout))
    assert finding.wrong.startswith("rank 1 on ")
    assert "SIGKILL" in finding.seen
    assert (first.returncode, second.returncode) == (1, 1)


def test_a_full_disk_under_the_log_changes_nothing(tmp_path: Path) -> None:
    command = ["-m", "muster.check", "doctor", "--quick", "--json", "--device=cpu"]
    done = start("python", *command, folder=tmp_path, before="exec 2>/dev/full")
    assert done.returncode == json.loads(done.stdout)["code"]


def test_letters_that_the_terminal_has_not_are_written_out(tmp_path: Path) -> None:
    (tmp_path / "größe").mkdir()
    command = ["-m", "muster.check", "doctor", "--quick", "--device=cpu", "--checkpoint-dir=größe"]
    done = start("python", *command, folder=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode in (0, 2), done.stderr
    assert "gr\\xf6\\xdfe" in "".join(done.stdout.replace("|", "").split())
    assert "Traceback" not in done.stderr


def test_output_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    command = ["-m", "muster.check", "doctor", "--quick", "--device=cpu"]
    done = start("python", *command, folder=tmp_path, before="exec >/dev/full")
    assert done.returncode == 1
    assert "error: the output can't be written: No space left on device\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_option_is_told_in_three_lines(tmp_path: Path) -> None:
    done = start("python", "-m", "muster.check", "doctor", "--quik", folder=tmp_path)
    assert done.returncode == 2
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: ", " seen: ", "  fix: "]


def test_preflight_says_a_warning_and_trains_on(tmp_path: Path) -> None:
    options = "--preflight --device=cpu --data=digits --image-size=16 --max-steps=1 --batch-size=8 --name=run"
    done = start("train", "single", *shlex.split(options), folder=tmp_path, before="ulimit -n 300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: " in done.stderr
    assert " seen: ulimit -n: 300" in done.stderr
    assert (tmp_path / "runs" / "run" / "summary.json").exists()
