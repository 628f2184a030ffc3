"""`train scale`: which runs it plans, what it refuses, and the runs themselves."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint import environment, scale
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions, ScaleOptions
from tests.entrypoint.conftest import clean_environment
from tests.entrypoint.test_cli import three_lines
from train.arguments import parse
from train.errors import MusterError
from train.options import Options

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--model=resnet18",
    "--data=synthetic",
    "--image-size=32",
    "--num-classes=10",
    "--num-samples=16",
    "--batch-size=2",
]


def plan(
    worlds: ScaleOptions,
    training: Options | None = None,
    env: Environment | None = None,
    options: LaunchOptions | None = None,
) -> scale.Plan:
    here = env or Environment({}, host="here")
    return scale.plan(here, worlds, options or LaunchOptions(), training or Options(), ["train", "scale"])


def on_one_node(cores: int) -> dict[str, str]:
    """The variables of a batch script on one node."""
    return {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": str(cores),
    }


def trained(planned: scale.Plan) -> dict[int, Options]:
    """By world the options of its run, as the trainer will read them."""
    found: dict[int, Options] = {}
    for words in planned.commands:
        strategy, nproc, *rest = words
        found[int(nproc.removeprefix("--nproc-per-node="))] = parse([strategy, *rest])[1]
    return found


def test_weak_runs_differ_in_ranks_and_names_only() -> None:
    planned = plan(ScaleOptions(world="4,1,2"), Options(batch_size=24, max_steps=7))
    assert (planned.kind, planned.worlds) == ("weak", (1, 2, 4))
    assert planned.folder == Path("runs/resnet18-digits-ddp-scale")
    runs = trained(planned)
    assert [run.name for run in runs.values()] == ["w1", "w2", "w4"]
    assert {replace(run, name=None) for run in runs.values()} == {
        Options(batch_size=24, max_steps=7, epochs=7, runs_dir="runs/resnet18-digits-ddp-scale")
    }


def test_strong_runs_share_one_batch() -> None:
    runs = trained(plan(ScaleOptions(world="1,2,8", strong=True), Options(batch_size=64)))
    assert {world: run.batch_size for world, run in runs.items()} == {1: 64, 2: 32, 8: 8}
    assert {run.max_steps for run in runs.values()} == {scale.STEPS}


def test_a_batch_that_cant_be_divided_is_refused_with_one_that_can() -> None:
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world="1,3", strong=True), Options(batch_size=32))
    assert error.value.code == 2
    assert "--batch-size 33" in error.value.fix


def test_strategies_whose_ranks_share_a_batch_scale_by_groups() -> None:
    gpt = Options(model="gpt-tiny", data="synthetic", batch_size=8)
    with pytest.raises(MusterError, match="no batch of a rank"):
        plan(ScaleOptions(world="1,2", strategy="tp"), gpt)
    whole = trained(plan(ScaleOptions(world="1,2", strategy="tp", strong=True), gpt))
    assert [run.batch_size for run in whole.values()] == [8, 8]
    grouped = trained(plan(ScaleOptions(world="2,4", strategy="tp", strong=True), replace(gpt, tensor_parallel=2)))
    assert [run.batch_size for run in grouped.values()] == [8, 4]
    weak = trained(plan(ScaleOptions(world="2,4", strategy="tp"), replace(gpt, tensor_parallel=2)))
    assert [run.batch_size for run in weak.values()] == [8, 8]


@pytest.mark.parametrize(
    ("cores", "worlds", "threads"), [(8, "1,2,4", "2"), (2, "1,2,4", "1"), (64, "1,2", "32"), (7, "1,3", "2")]
)
def test_ranks_have_as_many_threads_in_all_worlds(cores: int, worlds: str, threads: str) -> None:
    env = Environment(on_one_node(cores), host="n1")
    planned = plan(ScaleOptions(world=worlds), env=env)
    assert planned.variables == {"OMP_NUM_THREADS": threads}
    assert (planned.cores, planned.threads) == (cores, int(threads))
    shared = "share" in planned.notes[0]
    assert shared == (int(threads) * planned.worlds[-1] > cores)
    # What the user set stays.
    kept = plan(ScaleOptions(world=worlds), env=replace(env, variables={**env, "OMP_NUM_THREADS": "5"}))
    assert (kept.variables, kept.threads) == ({}, 5)
    assert "yours" in kept.notes[0]


def test_without_a_list_the_worlds_are_those_of_this_machine() -> None:
    gpus = Environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, host="here")
    planned = plan(ScaleOptions(), env=gpus)
    assert planned.worlds == (1, 2, 4, 6)
    # With GPUs the number of threads is the launch's own affair.
    assert (planned.variables, planned.threads, planned.cores) == ({}, None, None)
    env = Environment(on_one_node(128), host="n1")
    assert plan(ScaleOptions(), env=env).worlds == (1, 2, 4, 8)
    assert plan(ScaleOptions(), Options(device="cpu"), env=gpus).worlds == (1, 2)


@pytest.mark.parametrize("world", ["", "0", "1,,2", "two", "1,-2", "1.5"])
def test_a_list_that_is_none_is_refused(world: str) -> None:
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world=world))
    assert "--world 1,2,4" in error.value.fix


@pytest.mark.parametrize(
    ("options", "training"),
    [
        (LaunchOptions(nnodes="2"), Options()),
        (LaunchOptions(nproc_per_node="2"), Options()),
        (LaunchOptions(spawn=2), Options()),
        (LaunchOptions(node_rank=0), Options()),
        (LaunchOptions(), Options(resume="auto")),
        (LaunchOptions(), Options(name="a/b")),
        (LaunchOptions(), Options(replicate=2)),
    ],
)
def test_what_cant_go_with_it_is_refused(options: LaunchOptions, training: Options) -> None:
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world="1,2"), training, options=options)
    assert error.value.code == 2


def test_a_job_of_several_nodes_gets_a_line_for_each_world(recordings: Path) -> None:
    env = environment.load(recordings / "slurm" / "a_sbatch_N2.node01.0.env")
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world="1,2,4"), env=env, options=LaunchOptions(interface="ib0"))
    lines = error.value.fix.split(" && ")
    assert error.value.code == 2
    assert [line.partition(" train")[0] for line in lines[:-1]] == [
        "srun --nodes=1 --ntasks=1 --ntasks-per-node=1",
        "srun --nodes=1 --ntasks=1 --ntasks-per-node=1",
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1",
    ]
    assert [line.partition("--nproc-per-node=")[2][:1] for line in lines[:-1]] == ["1", "2", "2"]
    assert all("--interface=ib0" in line for line in lines[:-1])
    assert lines[-1] == "muster report runs/resnet18-digits-ddp-scale"
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world="1,3"), env=env)
    assert error.value.fix == "--world 1,2,4"


def test_tasks_that_a_launcher_started_dont_each_make_all_runs(recordings: Path) -> None:
    for name in ("b_srun_N2_1per.node02.1.env", "c_srun_N2_2per.node02.2.env"):
        with pytest.raises(MusterError) as error:
            plan(ScaleOptions(world="1,2"), env=environment.load(recordings / "slurm" / name))
        assert "srun started it" in error.value.wrong


def test_other_schedulers_are_told_what_to_do(recordings: Path) -> None:
    env = Environment(
        {"PBS_JOBID": "1.x", "PBS_NODEFILE": "/nodes", "PBS_ENVIRONMENT": "PBS_BATCH"},
        "n1",
        {"PBS_NODEFILE": "n1\nn2\n"},
    )
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world="1,2"), env=env)
    assert "muster report" in error.value.fix


def test_dry_run_prints_the_commands_and_makes_nothing(command: Run, tmp_path: Path) -> None:
    arguments = ["scale", "--world", "1,2", "--dry-run", "--name", "a b", *TINY]
    answer = command("train", *arguments, env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    first, second, last = answer.stdout.splitlines()
    assert first.startswith("train ddp --nproc-per-node=1 ")
    assert second.startswith("train ddp --nproc-per-node=2 ")
    assert last == "muster report 'runs/a b'"
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken_is_refused(command: Run, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    answer = command("train", "scale", "--world=1", "--name=mine", *TINY, cwd=tmp_path)
    assert answer.returncode == 2
    assert "--name" in three_lines(answer.stderr)[2]
    assert list((tmp_path / "runs" / "mine").iterdir()) == []


@pytest.mark.process
def test_the_first_run_that_fails_ends_it_with_its_code(command: Run, tmp_path: Path) -> None:
    answer = command("train", "scale", "--world=1,2", "--model=resnet17", cwd=tmp_path)
    assert answer.returncode == 2
    wrong, seen, fix = three_lines("\n".join(answer.stderr.splitlines()[-3:]))
    assert "1 rank ended with exit code 2" in wrong
    assert "done: none" in seen
    assert "--world 2" in fix
    assert "run 2 of 2" not in answer.stderr


@pytest.mark.once
@pytest.mark.process
def test_the_runs_and_their_report(command: Run, tmp_path: Path) -> None:
    arguments = ["scale", "--world=1,2", *TINY, "--max-steps=2"]
    answer = command("train", *arguments, env={"OMP_NUM_THREADS": "1"}, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "resnet18-synthetic-ddp-scale"
    summaries = [json.loads((folder / name / "summary.json").read_text()) for name in ("w1", "w2")]
    assert [(one["world_size"], one["global_batch"], one["step"]) for one in summaries] == [(1, 2, 2), (2, 4, 2)]
    made = json.loads((folder / "scale.json").read_text())
    assert (made["kind"], made["worlds"], made["runs"], made["threads"]) == ("weak", [1, 2], ["w1", "w2"], 1)
    assert "Weak scaling: resnet18 on synthetic, ddp" in answer.stdout
    assert (folder / "report" / "scaling-efficiency.png").is_file()
    assert "<h1>resnet18-synthetic-ddp-scale</h1>" in (folder / "report" / "index.html").read_text()


@pytest.mark.process
def test_what_ends_it_is_passed_on_to_the_run(tmp_path: Path) -> None:
    """Not by a training, which takes long to start: its command is a program that tells when it is ready."""
    child = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('ready', flush=True); "
    child += "time.sleep(60)"
    code = (
        "import os, sys; from entrypoint import scale_runs; "
        f"code, name = scale_runs.wait([sys.executable, '-c', {child!r}], dict(os.environ)); "
        "print(name); sys.exit(code)"
    )
    env = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        os.kill(parent.pid, signal.SIGTERM)
        assert parent.wait(timeout=30) == 75
        assert parent.stdout.read() == "SIGTERM\n"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
