"""A training that is killed at random moments, again and again, ends with the weights of an undisturbed run.

`--soak-minutes 30` takes longer; `--soak-seed N` repeats the kills of a run, as far as the machine is as fast.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.clusters.deadline import wait_for
from tests.clusters.faults import LONG, START_S, WHOLE_S, Running, Training, assert_same_bits, newest_of, runs_through
from tests.clusters.hosts import Hosts
from tests.clusters.requirements import require_namespaces
from tests.clusters.weights import summary

pytestmark = [pytest.mark.cluster, pytest.mark.long]

HOSTS = ("alpha", "beta")
EPOCHS_A_MINUTE = 12
PACE_S = 0.2
MAX_STARTS_A_MINUTE = 12

# The other host waits this long for one that was killed before its store was up; by default 15 minutes.
MEET = ["--rdzv-timeout=60"]


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    # An option sets how long the test takes, so its time limit depends on that.
    minutes = request.config.getoption("--soak-minutes")
    request.node.add_marker(pytest.mark.timeout(900 + 60 * 3 * minutes))
    return minutes


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--soak-seed")
    return random.SystemRandom().randrange(10**6) if given is None else given


def test_kills_at_random_moments_change_nothing(minutes: float, seed: int, tmp_path: Path) -> None:
    require_namespaces()
    print(f"--soak-seed={seed}")
    chance, options = random.Random(seed), [*LONG, *MEET, f"--epochs={round(EPOCHS_A_MINUTE * minutes) + 4}"]
    killed: list[str] = []
    (tmp_path / "straight").mkdir()
    with Hosts(HOSTS, tmp_path) as hosts:
        straight = runs_through(Training(hosts, tmp_path / "straight"), options)
        training = Training(hosts, tmp_path)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end or len(killed) < 2:
            running = training.start(options=options, pace_s=PACE_S)
            # Between two kills at the start, the training would make no progress.
            in_start = chance.random() < 0.3 and not (killed and killed[-1].startswith("start"))
            killed.append(wait_and_kill(running, training, chance, in_start=in_start))
            codes = running.codes()
            print(f"{killed[-1]}: {codes}, step {newest_of(training.run)}")
            if 0 in codes.values():
                break
            assert set(codes.values()) <= {1, -signal.SIGKILL}, running.said()
            assert len(killed) <= 2 + MAX_STARTS_A_MINUTE * minutes, killed
        running = training.start(options=options)
        assert set(running.codes(WHOLE_S).values()) == {0}, running.said()
    assert len(killed) >= 2
    assert summary(training.run)["resumed_from"]
    assert newest_of(training.run) == newest_of(straight)
    assert_same_bits(training.run, straight)


def wait_and_kill(running: Running, training: Training, chance: random.Random, *, in_start: bool) -> str:
    """Kills a process or host at a random moment, of the start or after a new checkpoint; returns which, and when."""
    host, what = chance.choice(HOSTS), chance.choice(("worker", "agent", "host"))
    moment = chance.uniform(0, 8 if in_start else 3)
    before = newest_of(training.run)
    if not in_start:
        wait_for("a new checkpoint", lambda: newest_of(training.run) > before or has_ended(running), START_S)
    time.sleep(moment)  # the random moment
    if what == "host":
        running.kill_host(host)
    else:
        # A process that has not started yet, or has just ended, can't be killed: this tries again.
        wait_for(f"a process on {host}", lambda: kill_process(running, host, what) or has_ended(running), START_S)
    return f"{'start' if in_start else 'step'} + {moment:.1f} s: {what} on {host}"


def kill_process(running: Running, host: str, what: str) -> bool:
    try:
        running.signal(running.worker(host) if what == "worker" else running.agent(host), signal.SIGKILL)
    except (ValueError, ProcessLookupError):
        return False
    return True


def has_ended(running: Running) -> bool:
    return any(agent.poll() is not None for agent in running.agents.values())
