"""A training ends with an error if a process or host is killed or cut off; resumed, it equals an undisturbed one.

Each story is one training with a fault after each of its starts, on fake hosts of its own and without a scheduler.
The stories run in parallel, as they mostly wait; each test takes the result of one.
"""

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters.deadline import wait_for
from tests.clusters.faults import (
    END_S,
    EPOCH,
    EPOCHS,
    LONG,
    WHOLE_S,
    Place,
    Running,
    Training,
    assert_same_bits,
    newest_of,
)
from tests.clusters.hosts import Hosts
from tests.clusters.weights import summary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ALPHA, BETA = HOSTS = ("alpha", "beta")


@dataclass(frozen=True)
class Fault:
    """A fault in a training.

    Attributes:
        place: where a rank has stopped when the fault comes.
        harm: causes the fault.
        named: a pattern for the words that name the fault in an error message.
        newest: the step of the newest checkpoint at that time.
        dead: the host whose agent it kills; all others end with 1.
        options: of the training, besides the usual ones.
    """

    place: Place
    harm: Callable[[Running], None]
    named: str
    newest: int
    dead: str = ""
    options: tuple[str, ...] = ()


def kill_worker(host: str) -> Callable[[Running], None]:
    return lambda running: running.signal(running.worker(host), signal.SIGKILL)


def kill_agent(host: str) -> Callable[[Running], None]:
    return lambda running: running.signal(running.agent(host), signal.SIGKILL)


def kill_host(host: str) -> Callable[[Running], None]:
    return lambda running: running.kill_host(host)


def stop_worker(host: str) -> Callable[[Running], None]:
    return lambda running: running.signal(running.worker(host), signal.SIGSTOP)


def cut(host: str) -> Callable[[Running], None]:
    return lambda running: running.hosts.link(host, up=False)


# Rank 0 is on alpha, where the store of the agents is too; rank 1 on beta.
PROCESSES = (
    Fault(Place(1, "import"), kill_worker(BETA), "rank 1 on beta was ended by SIGKILL", 0),
    Fault(Place(0, "meet"), kill_worker(ALPHA), "rank 0 on alpha was ended by SIGKILL", 0),
    Fault(Place(1, "file 10"), kill_worker(BETA), "rank 1 on beta was ended by SIGKILL", 5),
    Fault(Place(0, "step 12"), kill_worker(ALPHA), "rank 0 on alpha was ended by SIGKILL", 10),
    Fault(Place(0, "step 17"), kill_agent(BETA), "rank 1 on beta", 15, BETA),
    Fault(Place(1, "step 22"), kill_agent(ALPHA), "alpha", 20, ALPHA),
)
WHOLE_HOSTS = (
    Fault(Place(1, "meet"), kill_host(BETA), "rank 1 on beta", 0, BETA),
    Fault(Place(0, "step 7"), kill_host(ALPHA), "alpha", 5, ALPHA),
    Fault(Place(1, "file 15"), kill_host(BETA), "rank 1 on beta", 10, BETA),
)
STOPPED = (Fault(Place(1, "step 7"), stop_worker(BETA), "rank 1 on beta", 5, options=("--silence-timeout=45",)),)
CUT_OFF = (Fault(Place(1, "step 12"), cut(BETA), "rank 1 on beta", 10),)


def goes_through(faults: tuple[Fault, ...], folder: Path, straight: Path, end: Callable[[Training], None]) -> None:
    """Runs a story: a training with one of these faults after each start, which `end` then brings to its end."""
    with Hosts(HOSTS, folder) as hosts:
        training = Training(hosts, folder)
        for fault in faults:
            meets_with(fault, training, straight)
        end(training)
    assert newest_of(training.run) == EPOCH * EPOCHS
    assert summary(training.run)["resumed_from"]
    assert_same_bits(training.run, straight)


def meets_with(fault: Fault, training: Training, straight: Path) -> None:
    """Starts the training, causes the fault, and asserts that the training ends as it should."""
    before = newest_of(training.run)
    running = training.start(fault.place, [*LONG, *fault.options])
    running.await_place()
    # Checkpoints are written in the background, and may be complete only after the steps that follow.
    wait_for(f"the checkpoint of step {fault.newest}", lambda: newest_of(training.run) == fault.newest, END_S)
    fault.harm(running)
    codes = running.codes()
    for host in set(HOSTS) - running.dead:
        training.hosts.link(host, up=True)
    told = f"{fault}\n{running.said()}"
    assert codes == {host: -signal.SIGKILL if host == fault.dead else 1 for host in HOSTS}, told
    assert re.search(f"(error: |ends: ).*{fault.named}", running.said()), told
    assert (f"step-{before:08d}" in running.said()) == bool(before), told
    assert newest_of(training.run) == fault.newest, told
    if fault.newest:
        assert_same_bits(training.run, straight)


def ends_undisturbed(training: Training) -> None:
    running = training.start()
    assert set(running.codes(WHOLE_S).values()) == {0}, running.said()


def ends_though_the_link_is_cut_for_a_while(training: Training) -> None:
    """The ranks wait for each other meanwhile, as TCP sends lost packets again."""
    running = training.start(Place(1, "step 17"))
    running.await_place()
    training.hosts.link(BETA, up=False)
    running.go_on()
    time.sleep(6)  # the length of the fault: TCP sends again after 0.2 s, 0.4 s ... 3.2 s
    assert all(agent.poll() is None for agent in running.agents.values()), running.said()
    assert newest_of(training.run) <= 20
    training.hosts.link(BETA, up=True)
    assert set(running.codes(WHOLE_S).values()) == {0}, running.said()


STORIES = {
    "processes": (PROCESSES, ends_undisturbed),
    "hosts": (WHOLE_HOSTS, ends_undisturbed),
    "stopped": (STOPPED, ends_undisturbed),
    "links": (CUT_OFF, ends_though_the_link_is_cut_for_a_while),
}


@pytest.fixture(scope="module")
def told(
    straight: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Mapping[str, "Future[None]"]]:
    """The results of the selected stories, which this starts."""
    asked = {item.callspec.params.get("story") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(len(STORIES)) as threads:
        yield {
            name: threads.submit(goes_through, faults, tmp_path_factory.mktemp(name), straight, end)
            for name, (faults, end) in STORIES.items()
            if name in asked
        }


@pytest.mark.parametrize("story", STORIES)
def test_a_disturbed_training_ends_and_resumes_to_the_same_bits(story: str, told: Mapping[str, "Future[None]"]) -> None:
    told[story].result()
