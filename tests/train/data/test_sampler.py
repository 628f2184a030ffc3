import itertools

import pytest

from muster.train.data.sampler import TrainSampler, ValidSampler

SPLITS = [(1, 8), (2, 4), (4, 2), (8, 1)]  # world size, accumulate


def micro_batches(world_size, accumulate, *, num_samples=103, batch_size=3, epoch=0, first=0, max_steps=None, seed=5):
    """{(step, block): samples} over all ranks."""
    blocks = {}
    for rank in range(world_size):
        order = TrainSampler(
            num_samples, batch_size=batch_size, accumulate=accumulate, rank=rank, world_size=world_size, seed=seed
        )
        order.set_epoch(epoch, first, max_steps)
        batches = list(order)
        assert len(batches) == len(order) == order.num_steps * accumulate
        for number, draws in enumerate(batches):
            step, turn = divmod(number, accumulate)
            assert {draw.epoch for draw in draws} == {epoch}
            blocks[step, turn * world_size + rank] = [draw.sample for draw in draws]
    return blocks


def test_micro_batches_depend_on_the_global_batch_alone():
    results = [micro_batches(*split) for split in SPLITS]
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 4 * 8  # 103 samples, global batches of 24: the last 7 are dropped


def test_no_sample_twice_in_an_epoch():
    samples = list(itertools.chain(*micro_batches(4, 2).values()))
    assert len(samples) == len(set(samples)) == 96


def test_epochs_and_seeds_differ_and_repeat():
    assert micro_batches(2, 1, epoch=1) != micro_batches(2, 1, epoch=2)
    assert micro_batches(2, 1, seed=1) != micro_batches(2, 1, seed=2)
    assert micro_batches(2, 1, epoch=1) == micro_batches(2, 1, epoch=1)


def test_an_epoch_goes_on_where_it_was_left():
    whole = micro_batches(2, 2)
    rest = micro_batches(2, 2, first=3 * 12)
    assert {(step + 3, block): samples for (step, block), samples in rest.items()} == {
        key: samples for key, samples in whole.items() if key[0] >= 3
    }
    assert {step for step, _ in micro_batches(2, 2, max_steps=2)} == {0, 1}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 12, 23])
def test_validation_takes_every_sample_once(world_size, num_samples):
    ranks = [ValidSampler(num_samples, batch_size=3, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [list(order) for order in ranks]
    assert [len(own) for own in batches] == [len(order) for order in ranks]
    assert {order.num_rounds for order in ranks} == {max(map(len, ranks))}
    assert sorted(draw.sample for own in batches for batch in own for draw in batch) == list(range(num_samples))
