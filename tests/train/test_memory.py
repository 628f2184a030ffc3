"""Memory that is used up: three lines that say who, of what, and what to turn; the last checkpoint stays whole."""

import pytest

from train import checkpoint

DEADLINE_S = 120

# Rank 1 may take no more than it has when its third step of all begins, and that step wants more.
SHORT = """
import os, resource, torch
from train.loop import Loop
step = Loop.step
def short(self, batches, sums):
    if self.progress.step == 2 and os.environ["RANK"] == "1":
        pages = int(open("/proc/self/statm").read().split()[0])
        held = torch.empty(0)
        limit = pages * os.sysconf("SC_PAGE_SIZE") + 2**24
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    step(self, batches, sums)
Loop.step = short
"""


def lines_of(ended):
    return [line for rank in ended for line in rank.err.splitlines() if not line.startswith("rank ")]


@pytest.mark.process
def test_a_rank_that_runs_out_of_memory_ends_all_and_the_last_checkpoint_stays(train, tmp_path):
    argv = ["ddp", "--model=gpt-small", "--data=synthetic", "--num-samples=64", "--batch-size=2", "--seq-len=32"]
    argv += ["--no-bf16", "--device=cpu", "--name=run", f"--runs-dir={tmp_path}"]
    train([*argv, "--max-steps=2"], 2, ok=True)
    argv[argv.index("--batch-size=2")] = "--batch-size=16"
    ended = train([*argv, "--resume"], 2, deadline_s=DEADLINE_S, before=SHORT)
    assert [rank.code for rank in ended] == [2, 2], lines_of(ended)
    lines = lines_of(ended)
    assert [line.lstrip().partition(":")[0] for line in lines] == ["error", "seen", "fix"], lines
    assert "out of memory on rank 1 of 2" in lines[0]
    assert "GiB held at most" in lines[1]
    assert "--batch-size=16, step 3" in lines[1]
    for word in (
        "--batch-size=8 --accumulate=2",
        "--activation-checkpoint=selective",
        "train fsdp",
        "train plan --mod",
    ):
        assert word in lines[2]
    assert checkpoint.load_newest(tmp_path / "run")[1]["progress"]["step"] == 2
