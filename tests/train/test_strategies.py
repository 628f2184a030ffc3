"""What holds of every strategy, and how each says that it is the wrong one."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest
import torch
from torch import nn

from muster.config import STRATEGIES, WHICH, Options
from muster.train import strategies
from muster.train.precision import Precision
from muster.train.strategies import Strategy, dp, fsdp, single
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


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_threads_of_dp_compute_in_the_chosen_precision(bf16, dtype):
    precision = Precision(bf16=bf16, channels_last=False, fused=False)
    # The meta device stands for the GPUs. On a machine without any, DataParallel calls its module as it is.
    model = dp.wrap(nn.Linear(4, 4), World(device=torch.device("meta")), Options(), precision).to_empty(device="cpu")

    def compute():
        # As torch calls a copy of the model in its thread: of autocast only whether it is on is passed on.
        with torch.autocast("cpu", dtype=torch.float16, enabled=bf16):
            return model(torch.ones(2, 4)).dtype

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(compute).result() == dtype
    assert isinstance(dp.unwrap(model), nn.Linear)
