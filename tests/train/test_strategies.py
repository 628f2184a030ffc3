"""What holds of every strategy, and how each says that it is the wrong one."""

import subprocess
import sys
from importlib import import_module

import pytest

from muster.config import STRATEGIES, WHICH, Options
from muster.train import strategies
from muster.train.strategies import Strategy, fsdp, single
from muster.train.world import World
from tests.train.comparing import ROOT, STEPS, TEXT, apart, trained

ASKED = [name for name in vars(Strategy) if not name.startswith("_")]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_has_what_the_loop_asks_for(name):
    several = strategies.load(name, World(world_size=2))
    assert len(ASKED) >= 6
    assert all(callable(getattr(several, function)) for function in ASKED)
    module = import_module(f"muster.train.strategies.{name}")
    assert module.__doc__
    assert several.wrap is module.wrap


def test_what_one_leaves_out_is_done_as_by_single():
    assert not hasattr(fsdp, "unwrap")
    assert strategies.load("fsdp", World(world_size=2)).unwrap is single.unwrap
    # but for the check: single refuses what all others are for
    strategies.load("ddp", World(world_size=2)).check(World(world_size=2), Options())


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "pipeline"])
def test_a_rank_alone_trains_as_single(name):
    alone = strategies.load(name, World())
    assert all(getattr(alone, function) is getattr(single, function) for function in set(ASKED) - {"check", "notes"})


@pytest.mark.process
def test_in_a_world_of_one_each_trains_as_the_single_process(train, tmp_path):
    argv = [*TEXT, *STEPS, "--max-steps=2", "--accumulate=2"]
    single, *others = (trained(train, tmp_path, name, 1, argv, name) for name in STRATEGIES)
    assert [apart(single, other) for other in others] == [[0, 0]] * (len(STRATEGIES) - 1)


@pytest.mark.process
def test_dp_says_what_it_is_for_and_wants_one_process(train, tmp_path):
    argv = ["dp", *TEXT, "--max-steps=1", f"--runs-dir={tmp_path}", "--name=run"]
    [ended] = train(argv, ok=True)
    assert "note: dp is for comparison: 'train ddp'" in ended.out
    ended = train(argv, 2)
    assert [rank.code for rank in ended] == [2, 2]
    assert "'train ddp' trains one model with all processes" in ended[0].err


def test_the_help_says_which_is_for_what():
    lines = WHICH.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(STRATEGIES)
    assert max(map(len, lines)) < 79


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tp", "--model=resnet18"], "cuts transformers"),
        (["ddp", "--replicate=2"], "knows nothing of --replicate"),
        (["ddp", "--activation-checkpoint=full"], "can't compute its activations again"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_is_launched(argv, words, tmp_path):
    code = f"import sys; sys.argv = {['train', *argv]!r}; from muster.entrypoint.cli import train\n"
    code += "try: train()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 3
