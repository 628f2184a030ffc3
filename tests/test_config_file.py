"""Options from a file: what is read, what wins over it, and what is refused, with the line to write in its place."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from muster import config_file
from muster.arguments import to_argv
from muster.config import STRATEGIES, Options
from muster.config_file import to_toml
from muster.errors import MusterError
from muster.train.__main__ import parse


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.toml"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_run_writes_starts_the_same_run_under_a_name_of_its_own(file: Path, strategy: str) -> None:
    options = Options(data='imagefolder:/a "b"\\\n\x7fé🙂', lr=1e-05, bf16=False, fused=False, max_steps=3, seed=7)
    file.write_text(to_toml(strategy, replace(options, name="a", resume="auto")), encoding="utf-8")
    assert parse([strategy, f"--config={file}"]) == (strategy, options)
    assert parse([strategy, "--name", "b", "--config", str(file)]) == (strategy, replace(options, name="b"))


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(file: Path) -> None:
    file.write_text("[training]\nepochs = 3\nlr = 1\nseed = 5\n[speed]\nfused = false\n[run]\nprofile = true\n")
    argv = ["ddp", "--epochs=10", "--fused", "--no-profile", f"--config={file}", "--seed", "0"]
    assert parse(argv) == ("ddp", Options(lr=1.0))


def test_the_strategy_of_the_command_line_is_taken_if_the_file_asks_for_nothing_of_another(file: Path) -> None:
    file.write_text(to_toml("fsdp", Options(seed=3)))
    assert parse(["ddp", f"--config={file}"]) == ("ddp", Options(seed=3))
    file.write_text(to_toml("fsdp", Options(replicate=2)))
    assert parse(["fsdp", f"--config={file}"]) == ("fsdp", Options(replicate=2))
    with pytest.raises(MusterError, match="ddp has no option replicate") as refused:
        config_file.read(str(file), "ddp")
    assert f"train fsdp --config {file}" in refused.value.fix


def test_every_option_has_a_place_in_a_file(file: Path) -> None:
    for strategy in STRATEGIES:
        file.write_text(to_toml(strategy, Options()))
        assert to_argv(config_file.read(str(file), strategy)) == []


@pytest.mark.parametrize(
    ("text", "seen", "fix"),
    [
        ("[training]\nepoch = 3", "[training] epoch", "epochs"),
        ("[training]\nbatch-size = 3", "batch-size", "batch_size"),
        ("[training]\nlearning_rate = 3", "learning_rate", "lr"),
        ("[run]\nepochs = 3", "[run] epochs", "[training]"),
        ("[run]\nnproc_per_node = 2", "nproc_per_node", "options of the launch"),
        ("[run]\nconfig = 'other.toml'", "config", "--help-all"),
        ("[[run]]\nname = 'a'", "run = ", "[run]"),
        ("[trainings]\nepochs = 3", "[trainings]", "[training]"),
        ("epochs = 3", "epochs", "[training]"),
        ('model = "resnet18"', 'model = "resnet18"', "[model]"),
        ('strategy = "ddpp"', '"ddpp"', '"ddp"'),
        ('strategy = "dpp"', '"dpp"', '"ddp"'),
        ("strategy = 3", "strategy = 3", '"ddp"'),
        ("strategy = ['ddp']", "strategy = [...]", '"ddp"'),
        ("[strategy]\nname = 'ddp'", "strategy = {...}", '"ddp"'),
        ('[training]\nepochs = "3"', 'epochs = "3"', "a whole number of at least 1"),
        ("[training]\nepochs = true", "epochs = true", "a whole number of at least 1"),
        ("[training]\nepochs = 3.0", "epochs = 3.0", "a whole number of at least 1"),
        ("[training]\nepochs = 0", "epochs = 0", "a whole number of at least 1"),
        ("[training]\nepochs = [3]", "epochs = ", "a whole number of at least 1"),
        ("[training]\nmomentum = 2", "momentum = 2", "from 0 to 1"),
        ("[data]\nnum_classes = 1", "num_classes = 1", "a whole number from 2 to 1000000000"),
        ("[training]\nlr = nan", "lr = nan", "a number from 0 to 1e+30"),
        ("[training]\nweight_decay = 1e308", "weight_decay = 1e+308", "a number from 0 to 1e+30"),
        ("[training]\nlr = inf", "lr = inf", "a number from 0 to 1e+30"),
        (f"[training]\nlr = {10**400}", "lr = 1000", "a number from 0 to 1e+30"),
        *(
            (f"[{section}]\n{name} = {10**25}", f"{name} = 1000", "a whole number from")
            for section, name in [
                *(("data", name) for name in ("image_size", "seq_len", "vocab_size", "num_classes", "num_samples")),
                *(("data", name) for name in ("train_num_workers", "valid_num_workers")),
                ("ddp", "bucket_mb"),
                *(("training", "warmup_steps"), ("run", "hang_timeout"), ("run", "silence_timeout")),
            ]
        ),
        (f"[run]\ntimeout_s = {10**20}", "timeout_s = 1000", "from 1 to 999999"),
        ('[training]\nlr_scale = "cubic"', '"cubic"', '"none" or "linear" or "sqrt"'),
        ('[speed]\nfused = "no"', 'fused = "no"', "true or false"),
        ("[data]\ndata = 3", "data = 3", "a text"),
        ('[run]\nname = "a\\u0000b"', "name = ", "a text"),
        ("epochs 3", "line 1", "correct"),
        ("a = " + "[" * 50_000, "options.toml", "correct"),
        ("#" * 70_000, "options.toml", "config.toml"),
    ],
)
def test_what_is_not_there_or_of_another_type_is_refused(file: Path, text: str, seen: str, fix: str) -> None:
    file.write_text(text)
    with pytest.raises(MusterError) as refused:
        config_file.read(str(file), "ddp")
    assert refused.value.code == 2
    assert str(file) in refused.value.seen
    assert seen in refused.value.seen
    assert fix in refused.value.fix
    assert "[]" not in refused.value.wrong  # for options outside any section


def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"[run]\nname = '\xe9'\n")
    for name in ("missing", "pipe", "latin", "."):
        with pytest.raises(MusterError, match="file") as refused:
            config_file.read(str(tmp_path / name), "ddp")
        assert str(tmp_path) in refused.value.seen
    file = str(tmp_path / "config.toml")
    assert file not in refused.value.fix  # it is not there
    Path(file).touch()
    with pytest.raises(MusterError) as refused:
        config_file.read(str(tmp_path), "ddp")
    assert refused.value.fix == f"--config {file}"
