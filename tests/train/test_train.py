"""Whole trainings: under torchrun, on real images, with a run's files and its output."""

import ast
import json
import math
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from muster.arguments import to_argv
from muster.config import STRATEGIES, Options, unused
from muster.config_file import to_toml
from muster.train.__main__ import parse
from muster.train.checkpoint import manager as checkpoint

ROOT = Path(__file__).parents[2]
SHORT = ["--model=squeezenet1_1", "--data=fake", "--num-samples=128", "--num-classes=2", "--image-size=32"]
SHORT += ["--no-bf16", "--batch-size=4", "--max-steps=8"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def environment():
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "SLURM", "MUSTER"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MUSTER_COMMAND": "train ddp"}


@pytest.fixture(scope="module")
def finished(environment, tmp_path_factory):
    """The completed process of `train ddp` under torchrun, and the folder of its run."""
    folder = tmp_path_factory.mktemp("work")
    command = [*TORCHRUN, "-m", "muster.train", "ddp", "--epochs=4", "--keep-checkpoints=2"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    return ended, folder / "runs" / "resnet18-digits-ddp"


@pytest.mark.process
def test_two_processes_learn_the_digits(finished):
    summary = json.loads((finished[1] / "summary.json").read_text())
    assert summary["best_accuracy"] >= 0.95
    assert summary["best_accuracy"] == max(epoch["valid_accuracy"] for epoch in summary["epochs"])


@pytest.mark.process
def test_what_a_run_leaves(finished):
    _, run = finished
    summary = json.loads((run / "summary.json").read_text())
    assert summary["strategy"] == "ddp"
    assert (summary["world_size"], summary["num_nodes"], len(summary["hosts"])) == (2, 1, 1)
    assert summary["images_per_second"] == pytest.approx(2 * summary["images_per_second_per_rank"], rel=1e-3)
    times = summary["step_time_s"]
    assert 0 < times["p50"] <= times["p95"] <= times["p99"] <= times["max"]
    assert summary["num_timed_steps"] == 87
    assert 0 < sum(epoch["seconds"] for epoch in summary["epochs"]) < summary["seconds"]
    assert summary["flops_per_sample"] > 6 * summary["num_parameters"]
    assert summary["flops_per_second_per_rank"] > 0
    assert (summary["mfu"], summary["energy_j"], summary["profile"]) == (None,) * 3
    assert summary["first_step_s"] > 0
    assert 0 <= summary["data_wait_share"] < 1
    assert 0 < summary["peak_memory_gib"] < 8
    assert [epoch["epoch"] for epoch in summary["epochs"]] == [1, 2, 3, 4]
    assert summary["command"] == "train ddp"
    assert summary["options"]["image_size"] == 32
    assert summary["options"]["device"] == "cpu"
    assert isinstance(summary["options"]["bf16"], bool)
    assert (summary["resumed_from"], summary["bad_samples"]) == (None, [])
    assert summary["versions"]["torch"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [record for record in records if record["kind"] == "steps"]
    assert [line["step"] for line in lines] == [*range(8, 89, 8)]
    assert all(line["images_per_second"] > 0 and line["memory_gib"] > 0 for line in lines)
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert lines[0]["lr"] == pytest.approx(0.01 * 8 / 20)
    assert [path.name for path in checkpoint.saved(run)] == [f"step-{step:08d}" for step in (88, 66)]


@pytest.mark.process
def test_what_a_log_file_shows(finished):
    ended, _ = finished
    lines = ended.stdout.splitlines()
    assert "\x1b" not in ended.stdout
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("world ") for line in lines) == 1  # rank 0 alone
    assert sum("/4 " in line and "%" in line for line in lines) == 4
    assert "images per second" in ended.stdout
    assert "Warning" not in ended.stderr


@pytest.mark.process
def test_what_a_terminal_shows(environment, small, tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "muster.train", "single", *small, "--max-steps=20"]
    env = {**environment, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # the other end is closed: the process has ended
    os.close(ours)
    assert process.wait(120) == 0
    assert b"\x1b[" in shown
    assert b" left\x1b[K\r" in shown
    assert b"images/s" in shown
    assert b"validation accuracy" in shown


@pytest.mark.process
def test_torchrun_hears_of_an_error(environment, tmp_path):
    command = [*TORCHRUN, "-m", "muster.train", "ddp", "--model=resnet81"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0
    assert ended.stderr.count("error: there is no classification model called resnet81") == 1
    assert "exitcode  : 2" in ended.stderr


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_survive_the_way_to_the_trainer(strategy):
    options = Options(data="imagefolder:/a b", lr=0.25, bf16=False, fused=False, max_steps=3, resume="auto", name="-x")
    assert parse([strategy, *to_argv(options)]) == (strategy, options)
    assert parse([strategy]) == (strategy, Options())
    assert parse([strategy, "--resume"])[1].resume == "latest"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_survive_the_way_to_a_file(strategy):
    options = Options(data='imagefolder:/a "b"\\\n\x7fé', lr=1e-05, bf16=False, max_steps=3, replicate=1)
    read = tomllib.loads(to_toml(strategy, options))
    assert read.pop("strategy") == strategy
    assert Options(**{name: value for section in read.values() for name, value in section.items()}) == options
    assert set(read) - {strategy} == {"model", "data", "training", "speed", "run"}
    assert read["training"]["lr"] == 1e-05
    assert "optimizer" not in read["training"]  # no option sets it


@pytest.mark.process
def test_a_runs_options_start_it_again_with_the_same_losses(train, tmp_path):
    argv = ["ddp", *SHORT, "--seed=5", "--lr=0.02", "--log-every=1", "--comm-hook=bf16", "--name=a"]
    train([*argv, f"--runs-dir={tmp_path / 'runs'}"], 2, ok=True)
    again = ["ddp", f"--config={tmp_path / 'runs' / 'a' / 'config.toml'}", "--name=b", "--max-steps=6"]
    train(again, 2, ok=True)
    runs = [(tmp_path / "runs" / name) for name in "ab"]
    first, second = (
        [
            record["train_loss"]
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if (record := json.loads(line))["kind"] == "steps"
        ]
        for run in runs
    )
    assert len(first) == 8
    assert second == first[:6]
    written = [(run / "config.toml").read_text() for run in runs]
    assert written[1] == written[0].replace("max_steps = 8", "max_steps = 6")


@pytest.mark.process
def test_a_run_that_fails_has_its_options_and_said_what_it_trains_with(train, tmp_path):
    argv = ["ddp", *SHORT, "--lr=1e30", "--lr-scale=linear", "--accumulate=2", "--warmup-steps=0", "--seed=7"]
    ended = train([*argv, "--lr-schedule=cosine", "--name=run", f"--runs-dir={tmp_path}"], 2)
    assert [each.code for each in ended] == [1, 1]
    assert "the training loss is" in ended[0].err
    assert "--lr=1e+30 --warmup-steps=0 --weight-decay=0.0001\n" in ended[0].err  # each of them may be the cause
    assert "--resume" not in ended[0].err  # there is no checkpoint
    assert not (tmp_path / "run" / "summary.json").exists()
    training = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["training"]
    assert (training["lr"], training["lr_scale"], training["accumulate"], training["seed"]) == (1e30, "linear", 2, 7)
    lines = [line for line in ended[0].out.splitlines() if line.startswith(("optimizer", "lr "))]
    assert "sgd, momentum 0.9, weight decay 0.0001; seed 7" in lines[0]
    assert "4e+30 (1e+30 x 4 by --lr-scale)" in lines[1]
    assert "cosine to 0 at the last step" in lines[1]


@pytest.mark.process
def test_a_run_whose_last_step_spoils_the_weights_fails(train, tmp_path):
    argv = ["ddp", *SHORT, "--lr=1e30", "--warmup-steps=0", "--max-steps=1", "--name=run", f"--runs-dir={tmp_path}"]
    ended = train(argv, 2)
    assert [each.code for each in ended] == [1, 1]
    assert "the validation loss is nan after step 1" in ended[0].err
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({}, ""),
        ({"data": "digits", "num_samples": 9, "num_classes": 3, "image_size": 64}, "--num-classes=3 --num-samples=9"),
        ({"data": "fake", "num_samples": 9, "seq_len": 8, "vocab_size": 9}, "--seq-len=8 --vocab-size=9"),
        ({"model": "gpt-tiny", "data": "tokens:t", "seq_len": 8, "vocab_size": 9, "momentum": 0.5}, "--momentum=0.5"),
        ({"model": "gpt-tiny", "data": "synthetic", "num_samples": 9, "num_classes": 3}, "--num-classes=3"),
        ({"optimizer": "sgd", "momentum": 0.5}, ""),
    ],
)
def test_options_that_the_model_the_data_or_the_optimizer_do_not_use_are_told(given, flags):
    assert [note.rpartition(": ")[2] for note in unused(Options(**given).settled())] == ([flags] if flags else [])


@pytest.mark.process
def test_a_run_of_tokens_reports_perplexity_and_a_short_one_has_a_curve(train, tmp_path):
    argv = ["single", "--model=gpt-tiny", "--data=synthetic", "--seq-len=16", "--num-samples=64", "--batch-size=4"]
    argv += ["--image-size=64", "--max-steps=12", "--name=run", f"--runs-dir={tmp_path}"]
    (ended,) = train(argv, 1, ok=True)
    assert "note: no effect with --model=gpt-tiny --data=synthetic --optimizer=adamw: --image-size=64\n" in ended.out
    assert "perplexity" in ended.out
    assert "accuracy" not in ended.out
    assert "(4 x 1 process)" in ended.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_perplexity"] == pytest.approx(math.exp(summary["final_valid_loss"]))
    assert summary["best_perplexity"] == summary["final_perplexity"]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [record for record in records if record["kind"] == "steps"]
    assert [line["step"] for line in lines] == [*range(1, 13)]
    assert all(line["train_perplexity"] == pytest.approx(math.exp(line["train_loss"])) for line in lines)


@pytest.mark.process
def test_lines_come_as_often_as_asked_and_an_end_before_the_last_step_is_told(train, tmp_path):
    argv = ["single", *SHORT, "--num-samples=32", "--epochs=1", "--max-steps=9", "--log-every=3"]
    (ended,) = train([*argv, "--name=run", f"--runs-dir={tmp_path}"], 1, ok=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "steps"] == [3, 6]
    assert [line.split()[3] for line in ended.out.splitlines() if "  step " in line] == ["3/8", "6/8"]
    (note,) = (line for line in ended.out.splitlines() if "--max-steps=9" in line and line.startswith("note: "))
    assert "after 8 steps" in note


@pytest.mark.process
def test_a_long_run_has_fewer_lines_than_at_its_beginning(train, tmp_path):
    argv = ["single", "--model=gpt-tiny", "--data=synthetic", "--seq-len=16", "--num-samples=64", "--batch-size=4"]
    argv += ["--max-steps=10", "--name=run", f"--runs-dir={tmp_path}"]
    train(argv, before="from muster.train import trainer\ntrainer.LOG_ALL, trainer.LOG_STEPS = 4, 3", ok=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "steps"] == [1, 2, 3, 4, 6, 9]


def test_the_trainer_imports_no_launcher_and_names_no_strategy():
    for path in (ROOT / "train").rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(name.partition(".")[0] == "entrypoint" for name in names), path
        assert "SLURM" not in path.read_text(), path
    trainer = (ROOT / "train" / "trainer.py").read_text()
    assert not any(f"parallel.{name}" in trainer or f'"{name}"' in trainer for name in STRATEGIES)
