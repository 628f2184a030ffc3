"""The values that each collective must deliver, by definitions written out here; and planted faults."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from muster.check.bench import collectives
from muster.check.bench.collectives import ALL, BY_NAME, ELEMENT, Collective, WrongValues
from muster.check.bench.run import wrong_values
from muster.train.distributed.world import World

PART = 1021
SENT = list[torch.Tensor]


def sent_by_all(collective: Collective, num_ranks: int, part: int, salt: int) -> SENT:
    """The message of each rank; not filled where the rank sends nothing."""
    sent = []
    for rank in range(num_ranks):
        world = World(rank=rank, world_size=num_ranks)
        message = torch.empty(part * num_ranks if collective.is_split and collective.sends_all else part)
        pattern = collective.sends(world, salt)
        if pattern is not None:
            collectives.fill(message, pattern)
        sent.append(message)
    return sent


# The message that a rank receives, by the definition of each collective; None where it is undefined.
DEFINITIONS: dict[str, Callable[[SENT, int, int], torch.Tensor | None]] = {
    "all_reduce": lambda sent, rank, part: torch.stack(sent).sum(0),
    "reduce": lambda sent, rank, part: torch.stack(sent).sum(0) if rank == 0 else None,
    "reduce_scatter": lambda sent, rank, part: torch.stack(sent).sum(0)[rank * part : (rank + 1) * part],
    "all_gather": lambda sent, rank, part: torch.cat(sent),
    "broadcast": lambda sent, rank, part: sent[0],
    "all_to_all": lambda sent, rank, part: torch.cat([each[rank * part : (rank + 1) * part] for each in sent]),
    "send_recv": lambda sent, rank, part: sent[rank - 1],
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_what_is_expected_is_what_the_definition_gives(name, num_ranks):
    collective, salt = BY_NAME[name], 5
    sent = sent_by_all(collective, num_ranks, PART, salt)
    for rank in {0, 1, num_ranks - 1} & set(range(num_ranks)):
        got = DEFINITIONS[name](sent, rank, PART)
        expected = collective.gets(World(rank=rank, world_size=num_ranks), PART, salt)
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert collectives.compare(got, expected) is None


@pytest.mark.parametrize("num_ranks", [2, 3, 1000, 12_000])
def test_sums_are_exact_in_float32(num_ranks):
    """The largest sum is an integer that float32 holds, so every order of adding gives it."""
    worlds = [World(rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    largest = collectives.period(worlds[0]) - 1
    total = int(collectives.total(worlds[0], torch.tensor([largest]), 0))
    assert total < collectives.EXACT
    terms = sum(int(collectives.addend(world, torch.tensor([largest]), 0)) for world in worlds)
    assert terms == total


def spoilt(how: str, sent: SENT, got: torch.Tensor) -> torch.Tensor:
    got = got.clone()
    if how == "one element":
        got[7] += 1
    elif how == "the last element":
        got[-1] -= 1
    elif how == "not there":
        got[-1] = float("nan")
    elif how == "shifted":
        got = got.roll(1)
    elif how == "a part is another's":
        half = got.numel() // 2
        got[half : 2 * half] = got[:half].clone()
    elif how == "one rank is missing":
        got = got - sent[1]
    elif how == "one rank counts twice":
        got = got + sent[1] - sent[0]
    return got


EVERYWHERE = ["one element", "the last element", "not there", "shifted", "a part is another's"]


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in BY_NAME for how in EVERYWHERE]
    + [("all_reduce", "one rank is missing"), ("all_reduce", "one rank counts twice")],
)
def test_a_planted_fault_is_found(name, how):
    collective = BY_NAME[name]
    sent = sent_by_all(collective, 2, PART, 9)
    got, expected = DEFINITIONS[name](sent, 0, PART), collective.gets(World(world_size=2), PART, 9)
    assert got is not None
    assert expected is not None
    assert collectives.compare(got, expected) is None
    assert collectives.compare(spoilt(how, sent, got), expected) is not None


@pytest.mark.parametrize("name", list(BY_NAME))
def test_what_an_earlier_call_left_is_found(name):
    collective, world = BY_NAME[name], World(world_size=2)
    old = DEFINITIONS[name](sent_by_all(collective, 2, PART, 9), 0, PART)
    expected = collective.gets(world, PART, 10)
    assert old is not None
    assert expected is not None
    found = collectives.compare(old, expected)
    assert found is not None
    assert found[3] > PART // 2


def test_the_first_wrong_element_is_told_across_blocks(monkeypatch):
    monkeypatch.setattr(collectives, "BLOCK", 64)
    message = torch.empty(1000)

    def pattern(index: torch.Tensor) -> torch.Tensor:
        return collectives.sent_by(3, index, 1)

    collectives.fill(message, pattern)
    assert collectives.compare(message, pattern) is None
    expected = float(message[130])
    message[130], message[131], message[999] = 0.5, float("nan"), -1.0
    assert collectives.compare(message, pattern) == (130, expected, "0.5", 3)
    # Of a value that is wrong by 1, all digits are shown.
    collectives.fill(message, lambda index: index + 1_048_790)
    message[0] += 1
    assert collectives.compare(message, lambda index: index + 1_048_790) == (0, 1_048_790.0, "1048791", 1)


def test_a_call_is_checked_in_buffers_that_hold_nothing_before():
    """A collective that does nothing, planted here, leaves NaN in the buffers: it must not pass for values."""
    world = World(world_size=1)
    for collective in ALL:
        idle = replace(collective, call=lambda sent, got: None)
        if not collective.is_in_place:  # in place, on one rank, there is nothing to do
            wrong = idle.check(world, 64, 1)
            assert wrong is not None
            assert (wrong.index, wrong.expected, wrong.found, wrong.count) == (0, 1.0, "nan", 16)

    def copied(sent: torch.Tensor, got: torch.Tensor) -> None:
        got.copy_(sent)

    for collective in ALL:
        assert replace(collective, call=copied).check(world, 64, 1) is None


@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize(("num_ranks", "size", "split"), [(2, 4096, 4096), (3, 4096, 4092), (7, 4, 28)])
def test_a_message_of_parts_has_equal_ones(name, num_ranks, size, split):
    collective, world = BY_NAME[name], World(world_size=num_ranks)
    found = collective.size(world, size)
    assert found == (split if collective.is_split else size)
    largest = max(buffer.numel() for buffer in collective.buffers(world, found))
    assert largest * ELEMENT == found


def test_wrong_values_name_collective_size_rank_host_element_and_both_values():
    faults = [
        WrongValues("all_reduce", size, rank, f"node{rank:02}", 17, 5.0, "nan", 3)
        for size in (1 << 20, 4096)
        for rank in (1, 2)
    ]
    told = [str(each) for each in wrong_values(faults)]
    assert len(told) == 2
    assert "all_reduce gave wrong values to rank 1 on node01, at 4K, 1M" in told[0]
    assert "element 17 of 4K was nan, not 5; 3 elements are wrong" in told[0]
    assert "rank 2 on node02" in told[1]
