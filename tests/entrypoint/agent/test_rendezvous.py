"""The rendezvous of a launch's agents, and the failure that an agent reports to the others."""

import json
import signal
import time
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException

from muster.entrypoint.agent import rendezvous
from muster.entrypoint.agent.failures import cause_of
from muster.entrypoint.agent.rendezvous import handler_of, wait_for_all
from muster.entrypoint.rendezvous.network import free_port
from muster.errors import MusterError


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({4: -9}, 4),
        # torchrun ends the others by SIGTERM, and counts them as failures too.
        ({4: -15, 5: -9}, 5),
        ({4: -15, 5: 1}, 5),
        ({4: 1, 5: -9, 6: -15}, 5),
        ({4: -15, 5: 2}, 5),
        # A scheduler's warning.
        ({4: -15, 5: -15}, None),
        ({4: -10}, None),
        ({4: 75, 5: -9}, None),
    ],
)
def test_a_rank_that_a_warning_ended_is_not_the_cause(
    codes: dict[int, int], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_COMMAND", "train ddp")
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=7) for rank, code in codes.items()}
    assert cause_of(failures) == rank


def test_a_second_process_of_a_node_is_refused_where_the_nodes_meet() -> None:
    """pbsdsh starts such processes: one for each line of the job's node file."""
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    meeting = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    second = Thread(target=wait_for_all, args=(meeting.clone(), 1, 2, timedelta(seconds=5)))
    second.start()
    wait_for_all(meeting, 0, 2, timedelta(seconds=5))
    second.join()
    for node_rank in (0, 1):
        with pytest.raises(MusterError, match=f"two processes have node rank {node_rank}"):
            wait_for_all(meeting, node_rank, 2, timedelta(seconds=5))


@pytest.mark.parametrize("has_come", [False, True])
def test_a_node_that_a_signal_ends_as_it_comes_may_come_again(has_come: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes as soon as the others see this node. Its key is removed, unless another process wrote it."""
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    meeting = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = dist.PrefixStore("muster", meeting)
    if has_come:
        others.set("came/1", "another process")

    class Interrupted(dist.PrefixStore):
        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            answer = super().compare_set(key, expected, value)
            if key == "came/1":
                raise SignalException("this process got SIGINT", sigval=signal.SIGINT)
            return answer

    monkeypatch.setattr(rendezvous, "PrefixStore", Interrupted)
    with pytest.raises(SignalException):
        wait_for_all(meeting.clone(), 1, 2, timedelta(seconds=5))
    assert others.check(["came/1"]) == has_come


def test_nodes_that_differ_in_their_number_are_refused_where_they_meet() -> None:
    """Otherwise they would train, and then wait for each other for ever."""
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    meeting = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(TimeoutError, match="node rank 1 did not come"):
        wait_for_all(meeting, 0, 2, timedelta(seconds=0))
    with pytest.raises(MusterError, match="given different numbers of nodes"):
        wait_for_all(meeting, 1, 3, timedelta(seconds=0))


REFUSAL = {"wrong": "node01 can't take part: the driver is too old", "seen": "driver 470", "fix": "ask", "code": 2}


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("num_come", [2, 3])
def test_a_node_that_cannot_take_part_is_known_to_all_that_come(
    refusing: int, num_come: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the others would wait for it for 15 minutes. After a refusal they wait briefly for missing nodes."""
    monkeypatch.setattr(rendezvous, "REFUSED_TIMEOUT_S", 1.0)
    store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    meeting = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard: dict[int, MusterError] = {}

    def come(node_rank: int) -> None:
        own = meeting.clone() if node_rank else meeting
        try:
            wait_for_all(own, node_rank, 3, timedelta(seconds=60), json.dumps(REFUSAL) if node_rank == refusing else "")
        except MusterError as refusal:
            heard[node_rank] = refusal

    nodes = [Thread(target=come, args=(node_rank,)) for node_rank in range(num_come)]
    for one in nodes:
        one.start()
    for one in nodes:
        one.join(30)
    assert {node_rank: refusal.parts for node_rank, refusal in heard.items()} == dict.fromkeys(range(num_come), REFUSAL)


def test_a_node_that_waits_for_another_still_gives_signs_of_life() -> None:
    """Otherwise the others would go on without it, and it would count the store, which it has itself, as lost."""
    config = SimpleNamespace(
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        run_id="test",
        min_nodes=1,
        max_nodes=2,
        local_addr="127.0.0.1",
        rdzv_configs={"is_host": 1, "last_call_timeout": 1},
    )
    handler = handler_of(config)
    store = handler.next_rendezvous().store

    def wait() -> None:
        with suppress(dist.DistError):
            store.wait(["what another node sets"], timedelta(seconds=4))

    waiting = Thread(target=wait)
    waiting.start()
    time.sleep(1.5)  # torch caches the state for one second
    handler.num_nodes_waiting()
    assert waiting.is_alive()
    waiting.join()
    handler.shutdown()
