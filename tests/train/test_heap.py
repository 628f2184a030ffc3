"""What becomes of memory that tensors leave."""

import subprocess
import sys
from pathlib import Path

import pytest

from muster.train import memory
from tests.train.conftest import environment

COUNT = """
import resource, sys, torch
from muster.train import memory
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
    """How often the system has to give a page of some 100 MiB that were in use before, again and again."""
    command = [sys.executable, "-c", COUNT, how]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.process
def test_it_is_used_again_without_the_system():
    # 25,856 small pages, or 50 large ones.
    assert faults("leave") >= 50
    assert faults("keep") < 10


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_set_stays(name):
    assert not memory.keep_heap({name: "1"})


TRAIN = """
import gc, sys
from muster.train.loop import Loop
step = Loop.step
def look(*arguments):
    print("look", gc.isenabled(), *(len(gc.get_objects(generation)) for generation in range(3)))
    return step(*arguments)
Loop.step = look
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
    # nanobind tells of each object that is still there as the interpreter ends.
    assert "leaked" not in done.stderr
