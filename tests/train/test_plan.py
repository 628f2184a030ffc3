"""`train plan`: the simplest that fits, what to turn where nothing does, and what is no question."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from train import combinations
from train.arguments import parse
from train.errors import MusterError
from train.options import Options
from train.plan import __main__ as program
from train.plan import planner, table
from train.plan.candidates import kinds
from train.plan.hardware import Hardware
from train.plan.planner import GIB, here, make

ROOT = Path(__file__).parents[2]
START = "import sys; sys.argv[0] = 'train'; from entrypoint.cli import train; train()"


def machines(gpus, memory, per_node=8):
    return Hardware(gpus=gpus, memory=memory, gpus_per_node=min(gpus, per_node))


def names(found):
    return [row.candidate.name for row in found.rows]


@pytest.fixture(scope="module")
def of_8b():
    """The plan for gpt-8b by micro-batches of one on 8 GPUs with so many GiB."""
    plans = {}

    def find(memory):
        if memory not in plans:
            plans[memory] = make(Options(model="gpt-8b", batch_size=1), machines(8, memory))
        return plans[memory]

    return find


@pytest.mark.parametrize(
    ("memory", "name", "words"),
    [
        (300, "ddp", "train ddp --model=gpt-8b --data=tokens:PATH --batch-size=1"),
        (140, "fsdp", "train fsdp --model=gpt-8b --data=tokens:PATH --batch-size=1"),
        (80, "fsdp, selective", "train fsdp --model=gpt-8b --activation-checkpoint=selective --data="),
        (48, "fsdp, full", "train fsdp --model=gpt-8b --activation-checkpoint=full --data="),
        (30, "fsdp, full, offload", "--cpu-offload"),
    ],
)
def test_the_less_memory_the_less_simple(of_8b, memory, name, words):
    found = of_8b(memory)
    assert found.choice is not None
    assert found.choice.candidate.name == name
    assert words in found.choice.candidate.typed
    assert found.choice.need.total <= memory * GIB
    assert not any(row.fits(found.memory) for row in found.rows[1 : names(found).index(name)])


def test_where_nothing_fits_it_says_what_to_turn(of_8b):
    found = of_8b(12)
    assert found.choice is None
    assert found.nearest is not None
    assert found.nearest.need.total > 12 * GIB
    said = "\n".join(table.verdict(found))
    assert "nothing fits into 12 GiB; the nearest, fsdp, full, offload with --batch-size=1" in said
    assert f"it fits with --seq-len={found.seq_len}" in said
    shorter = Options(model="gpt-8b", batch_size=1, seq_len=found.seq_len)
    assert make(shorter, machines(8, 12)).choice is not None
    longer = Options(model="gpt-8b", batch_size=1, seq_len=2 * (found.seq_len or 0))
    assert make(longer, machines(8, 12)).choice is None


def test_so_many_gpus_that_it_fits():
    options = Options(model="gpt-8b", batch_size=1, seq_len=1024)
    found = make(options, machines(2, 20))
    if found.choice is not None:  # by offloading: what more GPUs would do is not asked then
        assert found.choice.candidate.options.cpu_offload
    asked = planner.planner_for(options, machines(2, 20))
    number = planner.enough_gpus(asked, next(row.candidate for row in found.rows if row.candidate.strategy == "fsdp"))
    assert number is not None
    assert number > 2
    assert any(
        row.fits(found.memory) and row.candidate.strategy == "fsdp" for row in make(options, machines(number, 20)).rows
    )


def test_smaller_micro_batches_and_the_same_global_batch():
    found = make(Options(model="resnet18", data="fake", batch_size=64), machines(2, 2.2))
    assert found.choice is not None
    options = found.choice.candidate.options
    assert found.choice.candidate.strategy == "ddp"
    assert options.batch_size < 64
    assert options.batch_size * options.accumulate == 64
    assert table.verdict(found)[0] == "on the GPUs alone nothing fits with --batch-size=64"


@pytest.mark.parametrize("gpus", [1, 3, 8])
@pytest.mark.parametrize("model", ["gpt-tiny", "resnet18"])
def test_every_command_that_is_named_can_be_typed(model, gpus):
    found = make(Options(model=model, batch_size=16), machines(gpus, 80))
    assert found.choice is not None
    assert found.choice.candidate.strategy == ("single" if gpus == 1 else "ddp")
    for row in found.rows:
        strategy, options = parse(row.candidate.typed.split()[1:])
        combinations.check(strategy, options)
        assert strategy == row.candidate.strategy
    strategies = {row.candidate.strategy for row in found.rows}
    assert ("tp" in strategies) == (model == "gpt-tiny" and gpus == 8)
    assert ("pipeline" in strategies) == (model == "gpt-tiny" and gpus == 8)


def test_what_is_asked_for_stays():
    asked = Options(model="gpt-8b", activation_checkpoint="selective", replicate=2, tensor_parallel=4, clip_norm=1.0)
    listed = [candidate for kind in kinds(asked, machines(8, 80)) for candidate in kind]
    assert all(candidate.options.activation_checkpoint != "none" for candidate in listed)
    assert all(candidate.options.clip_norm == 1.0 for candidate in listed)
    assert {one.options.replicate for one in listed if one.strategy == "fsdp"} == {2}
    assert {one.options.tensor_parallel for one in listed if one.strategy == "tp"} == {4}
    assert {one.options.tensor_parallel for one in listed if one.strategy != "tp"} == {None}


def test_without_gpus_their_number_has_to_be_said(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MusterError, match="no GPU can be seen here") as raised:
        here(Hardware(gpus=8))
    assert raised.value.seen == "no --memory"
    assert here(Hardware(gpus=16, memory=80)) == Hardware(gpus=16, memory=80, gpus_per_node=8)


@pytest.mark.process
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--gpus=0", "--memory=80"], ("--gpus",)),
        (["--gpus=8", "--memory=0"], ("--memory",)),
        (["--model=gpt-8b", "--gpu=8"], ("No such option",)),
        (["--gpus=8", "--memory=80", "--activation-checkpoint=some"], ("selective",)),
    ],
)
def test_bad_options_are_refused_before_torch_is_loaded(argv, words):
    code = f"import sys, runpy; sys.argv = {['train plan', *argv]!r}\n"
    code += "try: runpy.run_module('train.plan', run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 3, ended.stderr
    assert all(word in ended.stderr for word in words)


def answered(monkeypatch, capsys, *argv):
    """The exit code of `train.plan` with `argv`, and what it prints."""
    monkeypatch.setattr(sys, "argv", ["plan", *argv])
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model=gpt-9b"], "--model=gpt-8b"),
        (["--model=resnet19"], "--model=resnet18"),
        (["--model=resnet18", "--activation-checkpoint=full"], "can't compute its activations again"),
    ],
)
def test_what_there_is_not(monkeypatch, capsys, argv, words):
    code, _, err = answered(monkeypatch, capsys, *argv, "--gpus=2", "--memory=80")
    assert code == 2
    assert len(err.splitlines()) == 3, err
    assert words in err


ASKED = ("--model=gpt-1b", "--gpus=4", "--memory=40", "--batch-size=1")


def test_what_programs_read_is_what_people_read(monkeypatch, capsys):
    code, out, _ = answered(monkeypatch, capsys, *ASKED)
    lines = out.splitlines()
    assert code == 0
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in out
    code, out, _ = answered(monkeypatch, capsys, *ASKED, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["num_parameters"] == 1_498_482_688
    assert lines[-1].strip() == found["choice"]["command"]
    assert found["choice"]["fits"]
    shown = [line for line in lines if line.startswith("│ ")][1:]
    assert [line.split("│")[1].strip() for line in shown] == [row["name"] for row in found["strategies"]]


def test_the_code_where_nothing_fits(monkeypatch, capsys):
    code, out, err = answered(monkeypatch, capsys, "--model=resnet50", "--data=fake", "--gpus=2", "--memory=0.5")
    assert (code, err) == (2, "")
    assert "nothing fits into 0.5 GiB" in out


@pytest.mark.process
def test_the_command():
    command = [sys.executable, "-c", START, "plan", "--model=gpt-tiny", "--gpus=2", "--memory=4"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "  train ddp --model=gpt-tiny --data=tokens:PATH"
