"""Memory: the reuse of memory that tensors free, and an error of three lines where memory is used up."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from muster.config import Options
from muster.train.__main__ import parse
from muster.train.checkpoint import manager as checkpoint
from muster.train.distributed.world import World
from muster.train.health import memory
from muster.train.health.memory import explain, find, memory_options
from tests.train.conftest import bare, environment

DEADLINE_S = 120

# From its third step on, each of RANKS may take only 16 MiB beyond what it has, and the step needs more.
SHORT = """
import os, resource
from muster.train.trainer import Trainer
step = Trainer.train_step
def short(self, batches, sums):
    if self.progress.step == 2 and os.environ["RANK"] in RANKS:
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + 2**24
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    step(self, batches, sums)
Trainer.train_step = short
"""


def lines_of(ended):
    return [line for line in bare(ended) if not line.startswith("rank ")]


@pytest.mark.process
@pytest.mark.parametrize("ranks", ["1", "01"])
def test_ranks_that_run_out_of_memory_end_all_and_the_last_checkpoint_stays(train, tmp_path, ranks):
    argv = ["ddp", "--model=gpt-small", "--data=synthetic", "--num-samples=64", "--batch-size=2", "--seq-len=32"]
    argv += ["--no-bf16", "--device=cpu", "--name=run", f"--runs-dir={tmp_path}"]
    train([*argv, "--max-steps=2"], 2, ok=True)
    argv[argv.index("--batch-size=2")] = "--batch-size=16"
    ended = train([*argv, "--resume"], 2, deadline_s=DEADLINE_S, before=f"RANKS = {ranks!r}\n{SHORT}")
    assert [rank.code for rank in ended] == [2, 2], ended
    lines = [line for line in bare(ended) if not line.startswith("rank ")]
    assert [line.lstrip().partition(":")[0] for line in lines] == ["error", "seen", "fix"], lines
    assert re.search(f"out of memory on rank [{ranks}] of 2", lines[0])
    assert "GiB used at the peak" in lines[1]
    assert "--batch-size=16, step 3" in lines[1]
    for word in ("--batch-size=8 --accumulate=2", "--activation-checkpoint=selective", "train fsdp"):
        assert word in lines[2]
    assert checkpoint.load_newest(tmp_path / "run")[1]["progress"]["step"] == 2


def raised(error):
    """Raises and catches `error`, which then has a traceback; returns it."""
    try:
        raise error
    except type(error) as caught:
        return caught


class Card:
    total_memory = 80 * 2**30


def test_the_words_for_a_gpu(monkeypatch):
    """The exception is made for the test: there is no GPU here to fill."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 79 * 2**30)
    words = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    world = World(rank=3, world_size=8, host="node01", device=torch.device("cuda", 3))
    options = Options(model="gpt-8b", batch_size=1)
    told = explain(raised(torch.OutOfMemoryError(words)), "fsdp", options, world)
    assert told is not None
    assert told.code == 2
    assert told.wrong == "out of memory on rank 3 of 8 (node01, NVIDIA H100)"
    assert told.seen == "2.50 GiB more requested, 79.00 of 80.00 GiB used at the peak, --batch-size=1"
    assert told.fix == "--activation-checkpoint=selective or --cpu-offload"


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 3 * 2**28])
def test_a_real_allocation_that_is_too_large(monkeypatch, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    told = explain(caught.value, "single", Options(batch_size=7), World())
    assert told is not None
    assert "more requested" in told.seen
    total = "0.75" if limit > 0 else f"{psutil.virtual_memory().total / 2**30:.2f}"
    assert f" of {total} GiB used" in told.seen
    assert told.fix.startswith("--batch-size=3")


@pytest.mark.parametrize(
    "words",
    [
        "DataLoader worker (pid 812) is killed by signal: Killed. ",
        "DataLoader worker (pid(s) 8, 9) exited unexpectedly",
    ],
)
def test_a_worker_that_was_killed_is_told_as_that(words):
    told = explain(raised(RuntimeError(words)), "ddp", Options(), World(rank=1, world_size=2, host="node01"))
    assert told is not None
    assert told.code == 1
    assert "rank 1 of 2 (node01)" in told.wrong
    assert words.strip(" .") in told.seen
    assert "--train-num-workers" in told.fix


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("the shapes don't fit"), False),
        (OSError(28, "No space left on device"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle ...)`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (dist.DistBackendError("NCCL error ... ncclUnhandledCudaError\nCuda failure 2 'out of memory'"), True),
        (dist.DistBackendError("NCCL error ... ncclUnhandledCudaError\nCuda failure 719 'launch failure'"), False),
    ],
)
def test_which_errors_count_as_out_of_memory(error, is_memory):
    assert (find(error) is error) == is_memory
    outer = ValueError("caused by it")
    outer.__cause__ = error
    assert (find(outer) is error) == is_memory


@pytest.mark.parametrize(
    ("argv", "world_size", "words"),
    [
        (["single", "--batch-size=1"], 1, ["more processes, with 'train fsdp'"]),
        (["ddp"], 4, ["--batch-size=16 --accumulate=2", "'train fsdp' in place of ddp"]),
        (["fsdp", "--replicate=2", "--accumulate=3"], 4, ["--batch-size=16 --accumulate=6", "--replicate=1"]),
        (["fsdp", "--batch-size=1", "--cpu-offload"], 2, ["more processes, with 'train fsdp'"]),
        (["tp", "--model=gpt-1b", "--activation-checkpoint=selective", "--batch-size=1"], 2, ["=full"]),
        (["pipeline", "--model=gpt-1b", "--activation-checkpoint=full"], 2, ["more --microbatches"]),
    ],
)
def test_which_options_reduce_memory(argv, world_size, words):
    found = memory_options(*parse(argv), world_size)
    assert len(found) == len(words)
    assert all(word in turn for word, turn in zip(words, found, strict=True))
    # Each option that they name exists.
    parse([argv[0], *(word for turn in found for word in turn.split() if re.fullmatch("--[a-z-]+=.*", word))])


COUNT = """
import resource, sys, torch
from muster.train.health import memory
if sys.argv[1] == "keep":
    assert memory.keep_heap()
for turn in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for mib in (1, 40, 60):
        torch.ones(mib * 2**18)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(after - before)
"""


def faults(how: str) -> int:
    """The page faults of allocating some 100 MiB, after the process has allocated and freed as much several times."""
    command = [sys.executable, "-c", COUNT, how]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=240)
    return int(done.stdout)


@pytest.mark.process
def test_freed_memory_is_used_again_with_few_page_faults():
    # 101 MiB are 25,856 small pages, or 50 large ones.
    assert faults("leave") >= 50
    assert faults("keep") < 10


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_set_stays(name):
    assert not memory.keep_heap({name: "1"})


def test_a_c_library_without_mallopt_ends_no_training(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not memory.keep_heap({})


TRAIN = """
import gc, sys
from muster.train.trainer import Trainer
step = Trainer.train_step
def look(*arguments):
    print("look", gc.isenabled(), *(len(gc.get_objects(generation)) for generation in range(3)))
    return step(*arguments)
Trainer.train_step = look
sys.argv = ["train", "single", "--data=synthetic", "--num-samples=8", "--batch-size=4", "--max-steps=1"]
from muster.train.__main__ import main
main()
"""


@pytest.mark.process
def test_training_collects_garbage_and_what_imports_made_is_old(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAIN]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path
    )
    (look,) = [line.split() for line in done.stdout.splitlines() if line.startswith("look ")]
    assert look[1] == "True"
    young, older, oldest = map(int, look[2:])
    assert young + older < 50_000
    assert oldest > 100_000
    # nanobind reports each object that still exists when the interpreter ends.
    assert "leaked" not in done.stderr
