"""Optimizers on weights of each kind, and the schedule of the learning rate."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from muster.config import Options
from muster.train import optim
from muster.train.checkpoint.manager import Progress
from muster.train.checkpoint.run_directory import differences
from muster.train.data.sampler import TrainSampler
from muster.train.distributed.world import World
from muster.train.trainer import lr_at, plan_steps


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_norms_and_biases_do_not_decay(name):
    asked = Options(optimizer=name, weight_decay=0.1).settled()
    net = model()
    built = optim.build(asked, net, fused=True)
    decays = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    assert [decays[id(parameter)] for parameter in net.parameters()] == [0.1, 0, 0, 0, 0.1, 0]
    every = optim.build(Options(optimizer=name, weight_decay=0.1, decay_norms=True).settled(), net, fused=True)
    assert {group["weight_decay"] for group in every.param_groups} == {0.1}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_parts_of_a_weight_get_the_bits_that_the_whole_gets(name):
    """fsdp shards weights anywhere, and torch's fused AdamW for CPUs gave the last elements of a part other bits."""
    asked = Options(optimizer=name, deterministic=True).settled()

    def trained(size):
        drawn = torch.Generator().manual_seed(0)
        parts = nn.ParameterList(torch.randn(128, generator=drawn).split(size))
        optimizer = optim.build(asked, parts, fused=optim.choose_precision(asked, World()).fused)
        for _ in range(20):
            for part, gradient in zip(parts, torch.randn(128, generator=drawn).split(size), strict=True):
                part.grad = gradient
            optimizer.step()
        return torch.cat([part.detach() for part in parts])

    assert torch.equal(trained(128), trained(7))


def test_a_transformer_that_computes_in_double_precision_is_not_autocast(monkeypatch):
    """bf16 would be on by default; parts of a weight that fsdp gathers would then be rounded before they are used."""
    monkeypatch.setattr(optim, "has_bf16", lambda _: True)
    exact = Options(model="gpt-tiny", deterministic=True)
    assert not optim.choose_precision(exact, World()).bf16
    for other in ({"bf16": True}, {"model": "resnet18"}, {"deterministic": False}):
        assert optim.choose_precision(replace(exact, **other), World()).bf16


def test_the_rate_rises_and_falls():
    constant = Options(lr=0.4, warmup_steps=4).settled()
    assert [lr_at(constant, 0.4, step, 10, 0, 4) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    cosine = Options(lr=0.4, warmup_steps=4, lr_schedule="cosine", lr_end=0.1).settled()
    rates = [lr_at(cosine, 0.4, step, 14, 0, 4) for step in range(20)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[9] == pytest.approx(0.4 * (0.1 + 0.9 / 2))
    assert rates[14:] == pytest.approx([0.04] * 6)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    longer = Options(lr=0.4, warmup_steps=4, lr_schedule="cosine", lr_steps=24).settled()
    assert lr_at(longer, 0.4, 14, 14, 0, 4) == pytest.approx(0.4 * (1 + math.cos(math.pi / 2)) / 2)
    assert lr_at(Options(lr=0.4, lr_schedule="cosine").settled(), 0.4, 30, 20, 0, 20) == 0.0


def order_of(world_size):
    return TrainSampler(100, batch_size=5, accumulate=1, rank=0, world_size=world_size, seed=0)


@pytest.mark.parametrize("more", [{}, {"max_steps": 35}, {"lr_steps": 30}])
def test_the_planned_steps_do_not_depend_on_the_progress(more):
    options = Options(epochs=4, **more)
    for epoch, sample in ((0, 0), (1, 0), (2, 40), (3, 90)):
        progress = Progress(epoch=epoch, sample=sample, step=epoch * 10 + sample // 10)
        progress.warmed = 10 * min(20, progress.step)
        assert plan_steps(options, progress, order_of(2)) == (more.get("max_steps", 40), 0, 20)


def test_a_cosine_goes_on_where_the_data_is_when_ranks_are_lost_or_come():
    options = Options(lr=1.0, warmup_steps=0, epochs=4, lr_schedule="cosine").settled()
    half = Progress(epoch=2, step=20)
    for world_size, left in ((1, 40), (2, 20), (4, 10)):
        num_steps, *course = plan_steps(options, half, order_of(world_size))
        assert num_steps == 20 + left
        rates = [lr_at(options, 1.0, step, num_steps, *course) for step in range(20, num_steps)]
        assert rates[0] == pytest.approx(0.5)
        assert rates[left // 2] == pytest.approx((1 + math.cos(0.75 * math.pi)) / 2)
    # A number of steps that the user has set stays as it is.
    counted = Options(lr=1.0, warmup_steps=0, epochs=4, lr_schedule="cosine", lr_steps=30).settled()
    assert plan_steps(counted, half, order_of(1))[1] == 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("done", [4, 8, 12, 20])
def test_a_cosine_after_a_warm_up_goes_on_falling_when_ranks_are_lost_or_come(done, world_size):
    options = Options(lr=1.0, warmup_steps=8, epochs=4, lr_schedule="cosine").settled()
    before, after = order_of(2), order_of(world_size)
    progress = Progress(epoch=done // 10, sample=done % 10 * 10, step=done, warmed=10 * min(8, done))
    straight = [lr_at(options, 1.0, step, *plan_steps(options, Progress(), before)) for step in range(40)]
    course = plan_steps(options, progress, after)
    rates = [lr_at(options, 1.0, step, *course) for step in range(done, course[0])]
    assert rates[0] == pytest.approx(straight[done])
    falling = rates[max(0, 8 - done) :]
    assert falling == sorted(falling, reverse=True)
    assert 0 < falling[-1] < 0.1
    # A run that resumes once more on as many ranks follows the same schedule.
    warmed = progress.warmed + max(0, 8 - done) * after.global_batch
    later = Progress(epoch=3, sample=0, step=course[0] - 100 // after.global_batch, warmed=warmed)
    again = plan_steps(options, later, after)
    rest = [lr_at(options, 1.0, step, *again) for step in range(later.step, again[0])]
    assert rest == pytest.approx(rates[-len(rest) :], abs=1e-6)


@pytest.mark.parametrize(("done", "world_size", "warmup"), [(5, 4, 0), (5, 4, 8), (4, 3, 8)])
def test_a_second_stop_among_as_many_ranks_changes_no_bit_of_a_cosine(done, world_size, warmup):
    """An epoch that 2 ranks begin and 4 end has a step less than others: a stop after it once made the rate jump."""
    options = Options(lr=1.0, warmup_steps=warmup, epochs=4, lr_schedule="cosine").settled()
    sampler = order_of(world_size)
    progress = Progress(sample=10 * done, step=done, warmed=10 * min(warmup, done))
    course = plan_steps(options, progress, sampler)
    whole, stopped = [], []
    for step in range(done, course[0]):
        if 100 - progress.sample < sampler.global_batch:
            progress.epoch, progress.sample = progress.epoch + 1, 0
        whole.append(lr_at(options, 1.0, step, *course))
        stopped.append(lr_at(options, 1.0, step, *plan_steps(options, progress, sampler)))
        progress.warmed += sampler.global_batch * (step < warmup)
        progress.sample, progress.step = progress.sample + sampler.global_batch, step + 1
    assert stopped == whole


def test_a_cosine_goes_on_over_data_that_are_fewer_than_those_used_of_the_epoch():
    """90 of 100 samples are used when the data shrink to 40: the epoch is over, and three more have four steps each."""
    options = Options(lr=1.0, warmup_steps=0, epochs=4, lr_schedule="cosine").settled()
    fewer = TrainSampler(40, batch_size=5, accumulate=1, rank=0, world_size=2, seed=0)
    course = plan_steps(options, Progress(sample=90, step=9), fewer)
    assert course[0] == 9 + 3 * 4
    rates = [lr_at(options, 1.0, step, *course) for step in range(9, 21)]
    assert rates[0] == pytest.approx((1 + math.cos(0.25 * math.pi)) / 2)
    assert rates[6] == pytest.approx((1 + math.cos(0.625 * math.pi)) / 2)
    fewer.set_epoch(0, first_sample=90)
    assert (len(fewer), list(fewer)) == (0, [])


def test_options_that_move_the_end_of_a_cosine_are_reported():
    def noted(**change):
        options = Options(lr_schedule="cosine", image_size=16)
        old, new = asdict(options) | {"seq_len": None}, asdict(options) | {"seq_len": None} | change
        return differences({"options": old, "dp_size": 1}, new, World())

    assert "epochs 10 -> 20" in noted(epochs=20)[0]
    assert "max_steps None -> 5" in noted(max_steps=5)[0]
    assert noted(name="other") == []
    assert "lr_schedule" in noted(lr_schedule="constant", epochs=20)[0]
