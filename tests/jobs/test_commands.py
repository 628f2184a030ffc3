"""`muster job` as users type it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from muster.entrypoint.sites import profiles
from muster.paths import ROOT
from tests.jobs.everything import site

START = "import sys; from muster.entrypoint.cli import muster; sys.argv[0] = 'muster'; muster()"


def job(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", START, "job", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)


def refusal(*words: str, cwd: Path | None = None) -> list[str]:
    done = job(*words, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3, done.stderr
    return lines


def test_options_and_a_command_become_a_script(tmp_path: Path) -> None:
    words = ["--nodes", "4", "--time", "2h", "--account", "p1", "--partition", "long", "--gpus", "2", "--name", "try"]
    done = job("juwels-booster", *words, "--", "train", "fsdp", "--model", "gpt-1b")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in (
        "--job-name=try --output=%x-%j.out --open-mode=append",
        "--nodes=4 --ntasks-per-node=1 --time=02:00:00",
        "--account=p1 --partition=long --cpus-per-task=48 --gres=gpu:2 ",
    ):
        assert f"#SBATCH {line}" in done.stdout
    assert '  "${MUSTER_IMAGE:-muster.sif}" train fsdp --model gpt-1b "$@"' in lines
    assert "sbatch juwels-booster.sbatch --epochs 3" in done.stdout


def test_without_options_a_job_has_two_nodes_for_an_hour() -> None:
    done = job("juwels-booster")
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("#SBATCH --nodes=2 ") and "--time=01:00:00" in line for line in done.stdout.splitlines())


def test_the_list_names_every_profile() -> None:
    lines = [line.rstrip() for line in job("list").stdout.splitlines()]
    names = [line.split()[0] for line in lines if line.strip()]
    assert set(names) > set(profiles.names_in(profiles.SITES))
    refused = [line.split()[0] for line in lines if line.endswith("refused")]
    assert refused == [name for name in profiles.names_in(profiles.SITES) if profiles.load_site(name).refused]


def test_an_unknown_site_is_told_with_those_there_are() -> None:
    wrong, seen, fix = refusal("juwels-boster")
    assert "no site of this name" in wrong
    assert seen == " seen: juwels-boster"
    assert fix.startswith("  fix: juwels-booster, or one of these: ")
    assert "perlmutter" in fix


@pytest.mark.parametrize(
    ("words", "wrong", "fix"),
    [
        (["train", "dpp"], "No such command 'dpp'", "train dp or train ddp"),
        (["train", "ddp", "--epocs", "3"], "No such option: --epocs", "train ddp --epochs"),
        (["train", "ddp", "--epochs=x"], "Invalid value for '--epochs'", "train ddp --epochs"),
        (["train", "fsdp", "--zero1"], "the strategy fsdp has no option --zero1", "train ddp --zero1"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_training_that_would_be_refused_after_the_queue(words: list[str], wrong: str, fix: str) -> None:
    first, seen, last = refusal("slurm", "--", *words)
    assert wrong in first
    assert seen == f" seen: {' '.join(words)}"
    assert fix in last


@pytest.mark.parametrize(
    "words",
    [["train", "ddp", "--resume", "--epochs=3"], ["train", "export", "runs/x"], ["muster", "run", "x.py"], ["sh", "x"]],
    ids=" ".join,
)
def test_any_other_command_goes_into_the_script(words: list[str]) -> None:
    done = job("slurm", "--", *words)
    assert done.returncode == 0, done.stderr
    assert f'  "${{MUSTER_IMAGE:-muster.sif}}" {" ".join(words)} "$@"' in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "is_kept"),
    [
        ([], False),
        (["train", "ddp", "--nnodes=2"], False),
        (["train", "ddp", "--nnodes=1:2"], True),
        (["train", "ddp", "--nnodes", "1:2", "--epochs", "3"], True),
        (["muster", "run", "--nnodes=1:2", "x.py"], True),
        (["bash", "-c", "train ddp --nnodes=1:2"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_slurm_does_not_end_a_job_that_goes_on_with_fewer_nodes(words: list[str], is_kept: bool) -> None:
    lines = job("slurm", "--", *words).stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert any(line.startswith("#SBATCH --nodes=2 --ntasks-per-node=1 --no-kill ") for line in lines) == is_kept


@pytest.mark.parametrize(
    "words",
    [
        "python hello.py",
        "hello.py",
        "torchrun hello.py",
        "python -m torch.distributed.run hello.py",
        "accelerate launch --num_processes 8 hello.py",
        "deepspeed hello.py",
    ],
)
def test_a_script_that_would_run_on_each_node_by_itself_is_refused(words: str) -> None:
    assert "muster run hello.py" in refusal("derecho", "--nodes", "2", "--", *words.split())[2]
    assert job("derecho", "--nodes", "2", "--", "muster", "run", "hello.py").returncode == 0


def test_a_launcher_that_runs_in_a_rank_without_its_options_is_refused_with_them() -> None:
    words = "tune run --nproc_per_node=2 full_finetune_distributed --config c.yaml"
    told = "muster run --nproc_per_node=2 --no-python tune run full_finetune_distributed --config c.yaml"
    assert refusal("derecho", "--nodes", "2", "--", *words.split())[2].endswith(told)
    assert job("derecho", "--nodes", "2", "--", *told.split()).returncode == 0


@pytest.mark.parametrize("words", ["python -c print(1)", "python3 -u -W ignore hello.py", "/opt/python -I hello.py"])
def test_options_of_python_stay_with_python(words: str) -> None:
    told = shlex.split(refusal("slurm", "--", *words.split())[2])
    assert told[told.index("run") :] == ["run", "--no-python", *words.split()]
    assert job(*told[3:]).returncode == 0


def test_a_refused_site() -> None:
    wrong, _, _ = refusal("frontier")
    assert "this image does not run on Frontier" in wrong


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["slurm", "--time", "90"], "--time=90"),
        (["slurm", "--nodes", "0"], "--nodes"),
        (["slurm", "--account", "a b"], "--account=a b"),
        (["slurm", "--name", "$(id)"], "--name=$(id)"),
        (["slurm", "--kind", "job"], "--kind job"),
        (["slurm", "train", "--epochs", "3"], "--epochs"),
        (["none.toml"], "none.toml"),
        ([300 * "a"], 300 * "a"),
        ([300 * "a" + ".toml"], 300 * "a"),
        (["slurm", "--name", "a/b"], "--name=a/b"),
        (["list", "train", "ddp"], "muster job SITE -- train ddp"),
        (["slurm", "--image=-x.sif"], "--image=-x.sif"),
        (["slurm", "--", "--epochs", "3"], "-- train ddp --epochs 3"),
        (["kubernetes", "--", ""], "begins with a program"),
        (["slurm", "--", "train", "single"], "--nodes 1 -- train single"),
        *(
            (["slurm", "--", "train", *words], "would do nothing")
            for words in ([], ["--help"], ["--version"], ["ddp", "-h"], ["ddp", "--epochs=3", "--help-all"])
        ),
        (["slurm", "--", "muster"], "would do nothing"),
        (["slurm", "--", "muster", "run", "--help"], "would do nothing"),
        (["slurm", "--", "muster", "run", "--nproc-per-nod=4", "x.py"], "--nproc-per-node"),
        (["slurm", "--", "muster", "doctor", "--quik"], "--quick"),
        (["slurm", "--", "muster", "train", "ddp", "--epochs=3"], "fix: train ddp --epochs=3"),
        (["slurm", "--", "train ddp --epochs 3"], "fix: muster job slurm -- train ddp --epochs 3"),
        (["slurm", "--", "train", "ddp", "--nnodes=3"], "fix: muster job slurm --nodes 3 -- train ddp --nnodes=3"),
        (["slurm", "--", "train", "ddp", "--nnodes", "3:4"], "--nodes 4 --"),
        (["slurm", "--", "muster", "run", "--nnodes=1", "x.py"], "--nodes 1 -- muster run --nnodes=1 x.py"),
        (["slurm", "--", "muster", "run", "--standalone", "x.py"], "--nodes 1 -- muster run --standalone x.py"),
        (["slurm", "--", "muster", "run", "--nnodes=2", "--node-rank=0", "x.py"], "leave --node-rank out"),
        (["slurm", "--", "train", "ddp", "--nproc-per-node=0"], "fix: --nproc-per-node 2"),
        (["slurm", "--", "muster", "run", "--nproc-per-node=all", "x.py"], "fix: --nproc-per-node 2"),
        (["slurm", "--", "train", "ddp", "--fabric=cxi"], "slingshot"),
    ],
)
def test_requests_that_can_not_be_met_are_refused(words: list[str], about: str) -> None:
    assert about in "".join(refusal(*words))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("python x.py", "muster run x.py"),
        ("train single", "train single"),
        ("--epochs 3", "train ddp --epochs 3"),
        ("train ddp --nnodes 3", "train ddp --nnodes 3"),
        ("muster run --nnodes 3 x.py", "muster run --nnodes 3 x.py"),
    ],
)
def test_a_fix_keeps_the_options_of_the_job(words: str, told: str) -> None:
    options = ["--time", "12:00:00", "--image", "an image.sif", "--account", "me"]
    _, *typed = shlex.split(refusal("slurm", *options, "--", *words.split())[2])
    assert [word for word in typed if word not in ("--nodes", "1", "3")][3:9] == options
    assert typed[typed.index("--") + 1 :] == told.split()
    assert job(*typed[2:]).returncode == 0


def test_an_option_that_is_not_there_is_the_commands_only_where_there_may_be_one() -> None:
    assert "muster job SITE -- train ddp --epochs" in refusal("slurm", "--epochs", "3")[2]
    assert "muster job SITE -- train ddp --x" in refusal("slurm", "muster", "run", "a.py", "--x")[2]
    for words in (["list", "--json"], ["slurm", "--json"], ["slurm", "--qos=long"]):
        assert "--help" in (fix := refusal(*words)[2])
        assert words[1].partition("=")[0] not in fix


@pytest.mark.parametrize(
    "words",
    [
        "run",
        "run --nnodes=2:3 x.py --nnodes=9",
        "run x.py --help",
        "run -m a.b --version",
        "run --nproc-per-node=gpu --fabric=off x.py",
        "run --nproc-per-node=cpu --fabric=slingshot x.py",
        "doctor --quick",
        "fabric check",
    ],
)
def test_a_valid_command_is_written_and_not_run(words: str) -> None:
    command = f"muster {words}"
    assert command in job("slurm", "--", *command.split()).stdout


NO_TEXT = "a\udcff"


def test_a_name_that_is_no_text_is_refused_and_a_word_is_escaped() -> None:
    refusal("slurm", "--image", f"{NO_TEXT}.sif")
    assert r"muster run $'a\xff'" in job("slurm", "--", "muster", "run", NO_TEXT).stdout


def test_a_profile_whose_name_is_no_text(tmp_path: Path) -> None:
    path = site(tmp_path, "slurm", f"{NO_TEXT}.toml")
    refusal(path)


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = site(tmp_path, "slurm", "my site.toml")
    done = job("my site.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The job may start in another folder.
    assert f'MUSTER_SITE="${{MUSTER_SITE:-{path}}}"' in done.stdout
    assert done.stdout == making.make(path, Wanted())


def test_a_command_of_the_jobs_own_wants_two_hyphens_before_it() -> None:
    for words in (["slurm", "train", "ddp", "--epochs", "3"], ["slurm", "--epochs=3"]):
        assert "muster job SITE -- train ddp --epochs" in refusal(*words)[2]
    assert "muster job --gpus" in refusal("slurm", "--gpu", "3")[2]
