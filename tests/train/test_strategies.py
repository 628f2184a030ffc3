"""What holds of every strategy, and how each says that it is the wrong one."""

import subprocess
import sys

import pytest

from tests.train.comparing import ROOT, STEPS, TEXT, apart, trained
from train import strategies
from train.combinations import WHICH
from train.options import STRATEGIES
from train.strategies import Strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_has_what_the_loop_asks_for(name):
    module = strategies.load(name)
    asked = [name for name in vars(Strategy) if not name.startswith("_")]
    assert len(asked) >= 6
    assert all(callable(getattr(module, function)) for function in asked)
    assert module.__doc__


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
    code = f"import sys; sys.argv = {['train', *argv]!r}; from entrypoint.cli import train\n"
    code += "try: train()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 3
