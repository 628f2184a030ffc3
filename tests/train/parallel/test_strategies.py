"""Properties of every strategy, and the messages where one does not fit."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from muster.config import GUIDE, STRATEGIES, Options
from muster.train import parallel
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.optim import Precision
from muster.train.parallel import dp
from tests.train.comparing import LIMIT, ROOT, STEPS, TEXT, apart, trained

MADE_UP = """
from torch.nn.parallel import DistributedDataParallel

from muster.train.parallel.strategy import Gradients, Strategy


class Echo(Strategy):
    def wrap(self, model, precision):
        return DistributedDataParallel(super().wrap(model, precision))

    def gradients(self, model):
        return Gradients(self.options.accumulate)

    def unwrap(self, model):
        return model.module
"""
# Stands for the one line in muster/config.py.
ADDED = "from muster import config\nconfig.STRATEGIES['echo'] = 'Made for a test.'\n"


@pytest.mark.process
def test_a_new_strategy_is_a_file_and_a_line_and_is_part_of_the_selftest(train, tmp_path):
    (tmp_path / "echo.py").write_text(MADE_UP)
    before = f"{ADDED}from muster.train import parallel\nparallel.__path__.append({str(tmp_path)!r})\n"
    argv = [*TEXT, *STEPS, "--max-steps=2"]
    single = trained(train, tmp_path, "single", 1, [*argv, "--accumulate=2"], "single")
    ended = train(["echo", *argv, f"--runs-dir={tmp_path}", "--name=echo"], 2, before=before, ok=True)
    assert "(echo, gloo)" in ended[0].out
    assert max(apart(single, checkpoint.load_newest(tmp_path / "echo")[1])) < LIMIT
    code = f"{ADDED}from muster.train import selftest\nprint([row.strategy for row in selftest.cases(2)].count('echo'))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert answer.stdout.strip() == "1"


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "pipeline"])
def test_a_rank_alone_trains_as_single(name):
    alone = parallel.load(name, World(), Options(model="gpt-tiny"))
    model = torch.nn.Linear(2, 2)
    assert alone.assign_data() is alone.world
    assert alone.unwrap(alone.wrap(model, Precision(bf16=False, channels_last=False, fused=False))) is model
    assert alone.notes() == []


@pytest.mark.process
def test_in_a_world_of_one_each_trains_as_the_single_process(train, tmp_path):
    argv = [*TEXT, *STEPS, "--max-steps=2", "--accumulate=2"]
    single, *others = (trained(train, tmp_path, name, 1, argv, name) for name in STRATEGIES)
    assert [apart(single, other) for other in others] == [[0, 0]] * (len(STRATEGIES) - 1)


@pytest.mark.process
def test_dp_says_what_it_is_for(train, tmp_path):
    [ended] = train(["dp", *TEXT, "--max-steps=1", f"--runs-dir={tmp_path}", "--name=run"], ok=True)
    assert "note: dp is for comparison: 'train ddp'" in ended.out


@pytest.mark.process
@pytest.mark.parametrize("name", ["single", "dp"])
def test_what_is_for_one_process_refuses_two(train, tmp_path, name):
    ended = train([name, *TEXT, "--max-steps=1", f"--runs-dir={tmp_path}", "--name=run"], 2)
    assert [rank.code for rank in ended] == [2, 2]
    assert "'train ddp' trains one model with all processes" in ended[0].err


def test_the_help_says_which_is_for_what():
    lines = GUIDE.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(STRATEGIES)
    assert max(map(len, lines)) < 79


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tp", "--model=resnet18"], "splits transformers"),
        (["ddp", "--replicate=2"], "has no option --replicate"),
        (["ddp", "--activation-checkpoint=full"], "activations of resnet18 can't be recomputed"),
    ],
)
def test_what_can_not_work_is_refused_before_anything_is_launched(argv, words, tmp_path):
    code = f"import sys; sys.argv = {['train', *argv]!r}; from muster.entrypoint.cli import train\n"
    code += "try: train()\nfinally: assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 3


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_threads_of_dp_compute_in_the_chosen_precision(bf16, dtype):
    precision = Precision(bf16=bf16, channels_last=False, fused=False)
    strategy = dp.DP(World(device=torch.device("meta")), Options())
    # The meta device stands for the GPUs. On a machine without any, DataParallel calls its module as it is.
    model = strategy.wrap(nn.Linear(4, 4), precision).to_empty(device="cpu")

    def compute():
        # torch calls a copy of the model in its thread in this way: it passes on whether autocast is on, not the type.
        with torch.autocast("cpu", dtype=torch.float16, enabled=bf16):
            return model(torch.ones(2, 4)).dtype

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(compute).result() == dtype
    assert isinstance(strategy.unwrap(model), nn.Linear)
