"""A full or lost file system ends a training with a clear error; resumed, it ends with the bits of an undisturbed one.

Only the host sees the file system: its ranks write there, and a test reads a copy.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.deadline import wait_for
from tests.clusters.faults import END_S, WHOLE_S, Place, Running, Training, assert_same_bits, newest_of
from tests.clusters.hosts import Hosts
from tests.clusters.requirements import require_namespaces
from tests.clusters.weights import lines_of_error

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HOST = "alpha"


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    require_namespaces()
    (tmp_path / "runs").mkdir()
    with Hosts([HOST], tmp_path) as hosts:
        yield Training(hosts, tmp_path, ranks_a_host=2)


def mount(training: Training, *words: str) -> None:
    training.hosts.run(HOST, ["mount", "-n", *words, training.folder / "runs"], check=True)


def as_seen_there(training: Training) -> Path:
    """A copy of the run as the host sees it."""
    copy = training.folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    training.hosts.run(HOST, ["cp", "-a", training.run, copy], check=True)
    return copy


def comes_to_step_7(training: Training) -> Running:
    """Starts a training; returns when rank 0 has stopped after step 7 and the checkpoint of step 5 is complete."""
    running = training.start(Place(0, "step 7"))
    running.await_place()
    seen_by_agent = Path(f"/proc/{running.agent(HOST).pid}/root{training.run}")
    wait_for("the checkpoint of step 5", lambda: newest_of(seen_by_agent) == 5, END_S)
    return running


def failed(running: Running, *words: str) -> None:
    """Asserts that the training ends with 1, and that one error message has all `words`."""
    assert running.codes() == {HOST: 1}, running.said()
    said = running.said()
    assert "Traceback" not in said, said
    errors = [" ".join(line.split()) for line in lines_of_error(said)]
    assert any(all(word in " ".join(errors[at : at + 3]) for word in words) for at in range(0, len(errors), 3)), said


def goes_on_to_the_same_bits(training: Training, straight: Path, resumed: int) -> None:
    running = training.start()
    assert running.codes(WHOLE_S) == {HOST: 0}, running.said()
    assert f"step-{resumed:08d}" in running.said()
    copy = as_seen_there(training)
    assert newest_of(copy) == newest_of(straight)
    assert_same_bits(copy, straight)


def test_a_disk_that_checkpoints_have_filled(training: Training, straight: Path) -> None:
    # A checkpoint has 3 MB: there is room for two, but not for a third.
    mount(training, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    failed(training.start(), "the checkpoint could not be written: No space left on device", "step-00000010")
    copy = as_seen_there(training)
    assert newest_of(copy) == 10
    assert_same_bits(copy, straight)
    assert not list(copy.glob("checkpoints/.*"))
    mount(training, "-o", "remount,size=64m")
    goes_on_to_the_same_bits(training, straight, 10)


@pytest.mark.long
def test_a_disk_that_others_have_filled(training: Training, straight: Path) -> None:
    mount(training, "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    running = comes_to_step_7(training)
    filler = training.folder / "runs" / "filler"
    filled = training.hosts.run(HOST, ["dd", "if=/dev/zero", f"of={filler}", "bs=64k"])
    assert "No space left" in filled.stderr
    running.go_on()
    failed(running, "could not be written: No space left on device", "--resume")
    training.hosts.run(HOST, ["rm", filler], check=True)
    goes_on_to_the_same_bits(training, straight, 5)


def test_a_file_system_that_vanishes_and_comes_back(training: Training, straight: Path) -> None:
    store = training.folder / "store"
    store.mkdir()
    mount(training, "--bind", str(store))
    running = comes_to_step_7(training)
    training.hosts.run(HOST, ["umount", "-n", "-l", training.folder / "runs"], check=True)
    running.go_on()
    failed(running, "could not be written: No such file or directory", "--resume")
    # Nothing was written into the folder below the mount, where nobody would look for it.
    assert list((training.folder / "runs").iterdir()) == []
    mount(training, "--bind", str(store))
    goes_on_to_the_same_bits(training, straight, 5)
