"""Whatever goes wrong on one rank or on all: one message of three lines, one exit code, no hang."""

import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.health.faults import connection_lost, is_echo
from muster.train.trainer import promised_gpus
from tests.train.conftest import bare
from tests.train.health.test_preemption import disturbed

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]
DEADLINE_S = 120


def assert_one_message(ended, code, *words):
    """Asserts that all ranks ended with `code`, and together printed one message of three lines, with `words` in it."""
    assert [rank.code for rank in ended] == [code] * len(ended), [rank.err for rank in ended]
    lines = [line for line in bare(ended) if not line.startswith("rank ")]
    assert [line.lstrip().partition(":")[0] for line in lines] == ["error", "seen", "fix"], lines
    for word in words:
        assert word in "\n".join(lines)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["single", "--epoch=3"], ("No such option", "--epochs")),
        (["ddb"], ("ddb", "ddp")),
        (["ddp", "--batch-size=0"], ("--batch-size",)),
        (["ddp", "--optimizer=adam"], ("adamw",)),
        ([], ("no arguments",)),
    ],
)
def test_usage(argv, words):
    code = f"import sys, runpy; sys.argv = {['train', *argv]!r}\n"
    code += "try: runpy.run_module('muster.train', run_name='__main__')\n"
    code += "finally: assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 3, ended.stderr
    assert all(word in ended.stderr for word in words)


def test_help():
    command = [sys.executable, "-m", "muster.train", "ddp", "--help-all"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--keep-checkpoints" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ddp", "--model=resnet81"], ("resnet81", "resnet18")),
        (["ddp", "--data=imagefolder:/does/not/exist"], ("/does/not/exist",)),
        (["ddp", "--device=cuda"], ("no GPU", "--nv")),
        (["ddp", "--batch-size=1000"], ("1438 training samples", "2000")),
        (["single"], ("WORLD_SIZE=2", "train ddp")),
    ],
)
def test_what_all_ranks_see_is_said_once(train, tmp_path, argv, words):
    ended = train([*argv, f"--runs-dir={tmp_path}"], 2, deadline_s=DEADLINE_S, env={"CUDA_VISIBLE_DEVICES": ""})
    assert_one_message(ended, 2, *words)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_one_rank_does_not_see(train, tmp_path, make_images):
    make_images(tmp_path / "images")
    ended = train(
        ["ddp", "--data=imagefolder:~/images", "--image-size=32", f"--runs-dir={tmp_path / 'runs'}"],
        2,
        deadline_s=DEADLINE_S,
        rank_env={0: {"HOME": str(tmp_path)}, 1: {"HOME": "/nowhere"}},
    )
    assert_one_message(ended, 2, "does not exist", "rank 1 of 2")


@pytest.mark.parametrize("option", ["--lr=0.5", "--seed=2", "--name=other"])
def test_ranks_with_different_options_do_not_train_together(train, small, tmp_path, option):
    only_on_one = f"import os, sys; sys.argv += [{option!r}] * (os.environ['RANK'] == '1')"
    ended = train(["ddp", *small, f"--runs-dir={tmp_path}"], 2, deadline_s=DEADLINE_S, before=only_on_one)
    assert_one_message(ended, 2, option)
    # In the message, "elsewhere" is the rank that came first.
    told = f"elsewhere {option}, here the default", f"elsewhere the default, here {option}"
    assert any(line in rank.err for rank in ended for line in told), ended
    assert not list(tmp_path.iterdir())


def test_ranks_of_different_images_do_not_train_together(train, small, tmp_path):
    older = "import os, torch; torch.__version__ = '2.0.1' if os.environ['RANK'] == '1' else torch.__version__"
    ended = train(["ddp", *small, f"--runs-dir={tmp_path}"], 2, deadline_s=DEADLINE_S, before=older)
    assert_one_message(ended, 2, "torch 2.0.1")
    assert not list(tmp_path.iterdir())


def test_ranks_with_and_without_a_gpu_do_not_train_together(train, small, tmp_path):
    """A node's driver may be broken, or its container started without --nv."""
    only_on_one = (
        "import os, torch; from types import SimpleNamespace\n"
        "torch.cuda.device_count = lambda: os.environ['RANK'] == '1'\n"
        "torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid='GPU-1')"
    )
    ended = train(["ddp", *small, f"--runs-dir={tmp_path}"], 2, deadline_s=DEADLINE_S, before=only_on_one)
    assert_one_message(ended, 2, "kind of device")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_ranks_compute_in_one_precision(train, summary_of, tmp_path, strategy):
    """Ranks exchange weights and activations in it: nodes without bfloat16 in hardware decide for all."""
    only_on_one = "import os; from muster.train import optim; optim.has_bf16 = lambda _: os.environ['RANK'] == '1'"
    argv = [strategy, "--model=gpt-tiny", "--data=synthetic", "--seq-len=8", "--batch-size=4", "--num-samples=16"]
    argv += ["--max-steps=1", "--device=cpu", "--name=run", f"--runs-dir={tmp_path}"]
    train(argv, 2, deadline_s=DEADLINE_S, before=only_on_one, ok=True)
    assert summary_of(tmp_path / "run")["options"]["bf16"] is False


def test_hosts_may_differ_in_paths_and_cores(train, tmp_path, make_images):
    for rank in (0, 1):
        make_images(tmp_path / f"images{rank}")
    of_rank = (
        "import os, sys; rank = os.environ['RANK']\n"
        f"sys.argv += [f'--data=imagefolder:{tmp_path}/images{{rank}}', f'--train-num-workers={{rank}}']\n"
        f"sys.argv += [f'--runs-dir={tmp_path}/runs{{rank}}', f'--valid-num-workers={{rank}}']\n"
        "sys.argv += ['--resume=' + ('latest' if rank == '0' else 'auto')]"
    )
    argv = ["ddp", "--image-size=32", "--batch-size=8", "--max-steps=1"]
    train(argv, 2, deadline_s=DEADLINE_S, before=of_rank, ok=True)


def test_a_sample_that_one_rank_can_not_read_ends_all(train, tmp_path, make_images):
    root = make_images(tmp_path / "images")
    (root / "cat" / "005.jpg").write_text("these are not pixels")
    argv = ["ddp", f"--data=imagefolder:{root}", "--image-size=32", "--batch-size=2", "--epochs=3", "--no-bf16"]
    for workers in ([], ["--train-num-workers=1", "--valid-num-workers=1"]):
        ended = train([*argv, *workers, f"--runs-dir={tmp_path / 'runs'}"], 2, deadline_s=DEADLINE_S)
        assert_one_message(ended, 2, "005.jpg", "--on-bad-sample=skip")


@pytest.mark.parametrize("program", ["rank0", "rank1"])
def test_an_unexpected_error_of_one_rank_ends_all(train, small, tmp_path, program):
    broken_step = (
        "import os\n"
        "from muster.train.trainer import Trainer\n"
        "step = Trainer.train_step\n"
        "def broken(self, batches, sums):\n"
        f"    if self.progress.step == 2 and 'rank{{}}'.format(os.environ['RANK']) == {program!r}:\n"
        "        raise ZeroDivisionError('made for the test')\n"
        "    step(self, batches, sums)\n"
        "Trainer.train_step = broken\n"
    )
    argv = ["ddp", *small, f"--runs-dir={tmp_path / 'runs'}"]
    ended = train(argv, 3, deadline_s=DEADLINE_S, before=broken_step)
    assert [rank.code for rank in ended] == [1, 1, 1]
    broken = int(program[-1])
    assert "ZeroDivisionError: made for the test" in ended[broken].err
    for rank in {0, 1, 2} - {broken}:
        assert "Traceback" not in ended[rank].err
        assert f"rank {broken} on" in ended[rank].err or not ended[rank].err


@pytest.mark.full
def test_a_killed_rank_ends_the_others(ranks, small, tmp_path):
    start_ranks, wait_ranks = ranks
    argv = ["ddp", *small, "--model=squeezenet1_1", "--image-size=32", "--epochs=1000", "--timeout-s=30"]
    argv += ["--num-samples=240", "--name=run", f"--runs-dir={tmp_path / 'runs'}"]
    processes = start_ranks(argv, 3, tmp_path)
    try:
        end = time.monotonic() + DEADLINE_S
        while not checkpoint.saved(tmp_path / "runs" / "run"):
            assert time.monotonic() < end, "no checkpoint came"
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGKILL)
    finally:
        ended = wait_ranks(processes, tmp_path, DEADLINE_S)
    assert [rank.code for rank in ended] == [1, -9, 1]


def test_a_rank_that_never_comes(train, small, tmp_path):
    argv = ["ddp", *small, f"--runs-dir={tmp_path}", "--timeout-s=3"]
    ended = train(argv, 2, deadline_s=DEADLINE_S, rank_env={1: {"RANK": "0", "WORLD_SIZE": "1"}})
    assert ended[0].code == 1
    assert "error: " in ended[0].err
    assert len(ended[0].err.splitlines()) == 3, ended[0].err


def test_a_disk_that_fills_up_ends_all_and_keeps_the_last_good_one(train, tmp_path):
    argv = ["ddp", "--model=squeezenet1_1", "--image-size=32", "--batch-size=8", "--max-steps=2", "--name=run"]
    argv += [f"--runs-dir={tmp_path}"]
    train(argv, 2, ok=True)
    [good] = checkpoint.saved(tmp_path / "run")
    size = (good / "rank-00000").stat().st_size - 100_000
    limit = f"({size}, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]})"
    argv[argv.index("--max-steps=2")] = "--max-steps=4"
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, {limit})"
    ended = train([*argv, "--resume"], 2, deadline_s=DEADLINE_S, before=limited)
    assert_one_message(ended, 1, "could not be written", good.name)
    names = sorted(path.name for path in good.parent.iterdir())
    assert names == ["latest", good.name]
    assert checkpoint.load_newest(tmp_path / "run")[1]["progress"]["step"] == 2


def test_an_existing_run_is_not_overwritten(train, small, tmp_path):
    argv = ["ddp", *small, "--max-steps=1", "--name=run", f"--runs-dir={tmp_path}"]
    train(argv, ok=True)
    assert not (tmp_path / "run" / ".writer").exists()  # with it, a training on another host would wait a while
    before = (tmp_path / "run" / "summary.json").read_text()
    assert_one_message(train(argv, 2, deadline_s=DEADLINE_S), 2, "never overwritten", "--resume")
    assert (tmp_path / "run" / "summary.json").read_text() == before


def test_debug_shows_where(ranks, tmp_path):
    start_ranks, wait_ranks = ranks
    argv = ["single", "--model=no", f"--runs-dir={tmp_path / 'runs'}"]
    [ended] = wait_ranks(start_ranks(argv, 1, tmp_path, env={"MUSTER_DEBUG": "1"}), tmp_path, DEADLINE_S)
    assert ended.code == 2
    assert "Traceback" in ended.err


def test_a_connection_that_is_lost_is_told_with_its_other_end():
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer [10.0.0.2]:29511"
    error = RuntimeError(f"{text}. This is typically caused by a remote worker crashing.\nframe #0")
    assert is_echo(error)
    told = connection_lost(error, World(rank=1, host="node01"))
    assert (told.code, told.seen) == (1, "rank 1 on node01: Connection closed by peer [10.0.0.2]:29511")
    assert not is_echo(RuntimeError("the shapes don't fit"))
    assert not is_echo(OSError("Connection reset by peer"))  # of a file system


def test_promised_gpus_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for value, count in [("0,1", 1), ("GPU-5d5c", 1), ("", 0), ("-1", 0)]:
        assert len(promised_gpus({"CUDA_VISIBLE_DEVICES": value}, World())) == count
    assert promised_gpus({}, World()) == []
    assert "--nv" in promised_gpus({"CUDA_VISIBLE_DEVICES": "0"}, World())[0]


def test_who_asks_for_the_cpu_is_not_warned_of_gpus(train, small, tmp_path):
    argv = ["single", *small, "--max-steps=1", f"--runs-dir={tmp_path}"]
    none_is_seen = "import torch; torch.cuda.is_available = lambda: False"
    for more, count in (["--device=cpu"], 0), ([], 1):
        [ended] = train([*argv, *more], before=none_is_seen, env={"CUDA_VISIBLE_DEVICES": "0"}, ok=True)
        assert ended.out.count("CUDA_VISIBLE_DEVICES=0") == count


def test_a_loss_that_is_no_number_is_told_with_its_step_and_rank(train, small, tmp_path):
    argv = ["ddp", *small, "--epochs=2", "--name=run", f"--runs-dir={tmp_path}", "--model=squeezenet1_1"]
    argv[argv.index("--image-size=16")] = "--image-size=32"
    # The loss of rank 1 is NaN in the fourth step of the second epoch. An epoch has 44 steps of two micro-batches.
    broken = (
        "import os, torch, muster.train.parallel.strategy as g\n"
        "count, plain = [0], g.loss_of\n"
        "def loss_of(outputs, targets, smoothing=0.0):\n"
        "    count[0] += torch.is_grad_enabled()\n"
        "    nan = os.environ['RANK'] == '1' and count[0] == 2 * 44 + 2 * 3 + 1 and torch.is_grad_enabled()\n"
        "    return plain(outputs, targets) * (float('nan') if nan else 1)\n"
        "g.Gradients.criterion = staticmethod(loss_of)\n"
    )
    ended = train([*argv, "--accumulate=2", "--lr=0"], 2, deadline_s=DEADLINE_S, before=broken)
    words = ("from step 48 on, first on rank 1", "epoch 2, at step ", "--clip-norm", "--resume")
    assert_one_message(ended, 1, *words)
    # The ranks add up losses every 10 steps, more often where steps are slow, and act at the next sum: in mid-epoch.
    told = re.search(r"epoch 2, at step (\d+)", ended[0].err)
    assert told is not None
    assert 48 < int(told[1]) <= 60
    assert checkpoint.load_newest(tmp_path / "run")[1]["progress"]["step"] == 44


TOKENS = ["--model=gpt-tiny", f"--data=tokens:{Path(__file__).parents[1] / 'text.txt'}", "--seq-len=8", "--no-bf16"]


def test_a_pipeline_whose_last_rank_alone_knows_the_loss_tells_the_step(train, tmp_path):
    argv = ["pipeline", *TOKENS, "--batch-size=4", "--epochs=1", "--lr=1e30", "--warmup-steps=0", "--log-every=1"]
    ended = train([*argv, "--microbatches=2", f"--runs-dir={tmp_path}"], 2, deadline_s=DEADLINE_S)
    assert_one_message(ended, 1, "first on rank 1")
    told = re.search(r"from step (\d+) on, .* at step (\d+)", ended[0].err, re.DOTALL)
    assert told is not None
    assert 1 < int(told[1]) <= int(told[2]) <= 6


def test_a_checkpoint_of_weights_that_are_broken_already_is_not_recommended(train, tmp_path):
    images = ["--model=squeezenet1_1", "--data=fake", "--num-samples=8", "--num-classes=2", "--image-size=32"]
    argv = ["single", *images, "--batch-size=4", "--no-bf16", "--warmup-steps=0", "--lr=1e30", "--name=run"]
    # A checkpoint with the weights that the first step broke, from a version that accepted any validation loss.
    takes_any = "import math; math.isnan = lambda _: False"
    train([*argv, f"--runs-dir={tmp_path}", "--max-steps=1"], before=takes_any, ok=True)
    ended = train([*argv, f"--runs-dir={tmp_path}", "--resume"], deadline_s=DEADLINE_S)
    assert_one_message(ended, 1, "from step 2 on", "the checkpoint of step 1 gives the same loss")
    assert "--resume" not in ended[0].err


def test_a_rank_that_is_killed_is_told_once(small, tmp_path):
    """Its agent reports it: so the others learn it at once, and do not wait until they miss its heartbeat."""

    def kill(launch):
        [rank] = [each for each in psutil.Process(launch.pid).children() if each.environ().get("RANK") == "1"]
        rank.kill()

    code, said = disturbed(tmp_path, ["ddp", *small, "--save-every=0.01", "--name=run"], kill)
    assert code == 1, said
    [line] = [line for line in said.splitlines() if "SIGKILL" in line or line.startswith("error: ")]
    assert re.fullmatch(r"error: rank 1 on \S+ was ended by SIGKILL.*", line)


ELSEWHERE = """
import dataclasses, os, signal
from muster.train import process
from muster.train.trainer import Trainer
read = process.read_environment
host = "node0" + os.environ["RANK"]
process.read_environment = lambda *words: dataclasses.replace(read(*words), host=host)
step = Trainer.train_step
def ended(self, batches, sums):
    if self.progress.step == 2 and os.environ["RANK"] == "1":
        ENDS
    step(self, batches, sums)
Trainer.train_step = ended
"""


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGINT)", "raise ValueError('no such thing')"])
def test_what_ends_a_training_on_one_host_is_told_on_the_others(train, small, tmp_path, ends):
    """If nodes are started by hand, each has a terminal of its own, where Ctrl-C reaches this node alone."""
    before = ELSEWHERE.replace("ENDS", ends)
    env = [{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}] * 2
    ended = train(["ddp", *small, f"--runs-dir={tmp_path}"], 2, before=before, rank_env=dict(enumerate(env)))
    assert ended[0].code
    [line] = [line for line in bare(ended[:1]) if "node01" in line]
    assert line.startswith("rank 0 on node00 ends: rank 1 on node01 failed: ")
    assert ("interrupted" if "SIGINT" in ends else "no such thing") in line


def test_each_terminal_shows_what_is_wrong_on_all(train, small, tmp_path):
    """If nodes are started by hand, each has a terminal of its own; in a job rank 0 prints the error for all."""
    before = "import os; os.isatty = lambda _: True"
    argv = ["ddp", *small, f"--runs-dir={tmp_path}", "--resume=nothing"]
    ended = train(argv, 2, before=before, rank_env={1: {"LOCAL_RANK": "0"}})
    assert [rank.code for rank in ended] == [2, 2]
    assert ended[0].err == ended[1].err != ""
    assert len(bare(ended[:1])) == 3


def test_a_host_that_dies_while_the_ranks_meet_is_told_on_the_others(train, small, tmp_path):
    """The ranks wait for each other then, and read the fault that an agent published (entrypoint/agent/nodes.py)."""
    before = """
import dataclasses, os
from muster.train import process
from muster.train.health import faults
read, meet = process.read_environment, process.meet
host = "node0" + os.environ["RANK"]
process.read_environment = lambda *words: dataclasses.replace(read(*words), host=host)
def dies(world, *words):
    if not world.main:
        faults.publish(world, faults.Fault(1, host, 1, "its host gave no sign of life"), world.store)
        world.store.set("left/1", "")
        os._exit(1)
    return meet(world, *words)
process.meet = dies
"""
    env = [{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}] * 2
    ended = train(["ddp", *small, f"--runs-dir={tmp_path}"], 2, before=before, rank_env=dict(enumerate(env)))
    assert ended[0].code == 1
    assert bare(ended[:1]) == ["rank 0 on node00 ends: rank 1 on node01 failed: its host gave no sign of life"]
