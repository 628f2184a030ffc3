"""What becomes of memory that tensors leave."""

import subprocess
import sys

import pytest

from tests.train.conftest import environment
from train import heap

COUNT = """
import resource, sys, torch
from train import heap
if sys.argv[1] == "keep":
    assert heap.keep()
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
    assert not heap.keep({name: "1"})
