"""What the optimizers do with weights of each kind, and the course of the learning rate."""

import math
from dataclasses import asdict

import pytest
import torch
from torch import nn

from tests.train.comparing import DIGITS, LIMIT, SPLITS, STEPS, TEXT, apart, trained
from train import optimizer
from train.lars import LARS
from train.options import Options
from train.order import TrainOrder
from train.progress import Progress
from train.resume import differences
from train.world import World


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_norms_and_biases_do_not_decay(name):
    asked = Options(optimizer=name, weight_decay=0.1).settled()
    net = model()
    built = optimizer.build(asked, net, fused=True)
    decays = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    assert [decays[id(parameter)] for parameter in net.parameters()] == [0.1, 0, 0, 0, 0.1, 0]
    every = optimizer.build(Options(optimizer=name, weight_decay=0.1, decay_norms=True).settled(), net, fused=True)
    assert {group["weight_decay"] for group in every.param_groups} == {0.1}


def test_lars_takes_steps_in_proportion_to_the_weight():
    weight, bias = nn.Parameter(torch.tensor([[3.0, 4.0]])), nn.Parameter(torch.tensor([1.0]))
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "adapt": False}]
    made = LARS(groups, lr=2.0, momentum=0.5, trust=0.01)
    weight.grad, bias.grad = torch.tensor([[0.0, 2.0]]), torch.tensor([0.25])
    made.step()
    # You, Gitman, Ginsburg 2017, (6): trust |w| / (|g| + decay |w|), times (g + decay w).
    scale = 0.01 * 5 / (2 + 0.1 * 5)
    first = torch.tensor([[0.3, 2.4]]) * scale
    assert torch.allclose(weight.detach(), torch.tensor([[3.0, 4.0]]) - 2 * first)
    assert bias.item() == pytest.approx(1 - 2 * 0.25)
    weight.grad, bias.grad = torch.zeros(1, 2), torch.zeros(1)
    before = weight.detach().clone()
    made.step()
    # Without a gradient nothing adapts: the decay alone, and what the momentum has left.
    assert torch.allclose(weight.detach(), before - 2 * (0.5 * first + 0.1 * before))
    assert bias.item() == pytest.approx(0.5 - 2 * 0.5 * 0.25)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weights_lie", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("gradients_lie", [torch.contiguous_format, torch.channels_last])
def test_the_fused_step_is_that_of_one_weight_after_the_other_however_they_lie(
    weights_lie, gradients_lie, momentum, decay
):
    torch.manual_seed(0)
    drawn = [torch.randn(4, 3, 5, 5), torch.randn(7, 1, 3, 3), torch.randn(6, 5, 1, 1), torch.randn(9)]
    fused, plain = ([nn.Parameter(laid(part, weights_lie)) for part in drawn] for _ in range(2))
    asked = Options(momentum=momentum, weight_decay=decay, decay_norms=True, lr=0.1).settled()
    steps = optimizer.build(asked, nn.ParameterList(fused), fused=True)
    others = torch.optim.SGD(plain, lr=0.1, momentum=momentum, weight_decay=decay)
    for _ in range(3):
        for one, other in zip(fused, plain, strict=True):
            one.grad = laid(torch.randn(one.shape), gradients_lie)
            other.grad = one.grad.clone()
        steps.step()
        others.step()
    for one, other in zip(fused, plain, strict=True):
        assert one.stride() == other.stride()
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def laid(tensor, layout):
    """A copy of `tensor`, images or their weights in `layout`."""
    return tensor.clone(memory_format=layout if tensor.dim() == 4 else torch.contiguous_format)


def test_the_rate_rises_and_falls():
    constant = Options(lr=0.4, warmup_steps=4).settled()
    assert [optimizer.lr_at(constant, 1, step, 10) for step in range(6)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )
    cosine = Options(lr=0.4, warmup_steps=4, lr_schedule="cosine", lr_end=0.1).settled()
    rates = [optimizer.lr_at(cosine, 1, step, 14) for step in range(20)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates[9] == pytest.approx(0.4 * (0.1 + 0.9 / 2))
    assert rates[14:] == pytest.approx([0.04] * 6)
    assert sorted(rates[4:], reverse=True) == rates[4:]
    longer = Options(lr=0.4, warmup_steps=4, lr_schedule="cosine", lr_steps=24).settled()
    assert optimizer.lr_at(longer, 1, 14, 14) == pytest.approx(0.4 * (1 + math.cos(math.pi / 2)) / 2)
    assert optimizer.lr_at(Options(lr=0.4, lr_schedule="cosine").settled(), 1, 30, 20) == 0.0


def order_of(world_size):
    return TrainOrder(100, batch_size=5, accumulate=1, rank=0, world_size=world_size, seed=0)


@pytest.mark.parametrize("more", [{}, {"max_steps": 35}, {"lr_steps": 30}])
def test_the_extent_of_a_run_that_nobody_disturbs_is_the_same_all_along(more):
    options = Options(epochs=4, **more)
    for epoch, sample in ((0, 0), (1, 0), (2, 40), (3, 90)):
        progress = Progress(epoch=epoch, sample=sample, step=epoch * 10 + sample // 10)
        assert optimizer.extent(options, progress, order_of(2)) == (more.get("max_steps", 40), 0)


def test_a_cosine_goes_on_where_the_data_is_when_ranks_are_lost_or_come():
    options = Options(lr=1.0, warmup_steps=0, epochs=4, lr_schedule="cosine").settled()
    half = Progress(epoch=2, step=20)
    for world_size, left in ((1, 40), (2, 20), (4, 10)):
        num_steps, ahead = optimizer.extent(options, half, order_of(world_size))
        assert num_steps == 20 + left
        rates = [optimizer.lr_at(options, world_size, step, num_steps, ahead) for step in range(20, num_steps)]
        assert rates[0] == pytest.approx(0.5)
        assert rates[left // 2] == pytest.approx((1 + math.cos(0.75 * math.pi)) / 2)
    # Steps that the user has counted stay as they are.
    counted = Options(lr=1.0, warmup_steps=0, epochs=4, lr_schedule="cosine", lr_steps=30).settled()
    assert optimizer.extent(counted, half, order_of(1))[1] == 0


def test_a_cosine_that_ends_elsewhere_is_told():
    def noted(**change):
        options = Options(lr_schedule="cosine", image_size=16)
        old, new = asdict(options) | {"seq_len": None}, asdict(options) | {"seq_len": None} | change
        return differences({"options": old, "num_shares": 1}, new, World())

    assert "epochs 10 -> 20" in noted(epochs=20)[0]
    assert "max_steps None -> 5" in noted(max_steps=5)[0]
    assert noted(name="other") == []
    assert "lr_schedule" in noted(lr_schedule="constant", epochs=20)[0]


@pytest.mark.process
def test_lars_of_cut_weights_is_that_of_whole_ones(train, tmp_path):
    common = [*TEXT, *STEPS, "--optimizer=lars", "--lr=20", "--max-steps=3"]
    single = trained(train, tmp_path, "single", 1, [*common, "--accumulate=2"], "single")
    for strategy, (world_size, more) in SPLITS.items():
        differences = apart(single, trained(train, tmp_path, strategy, world_size, [*common, *more], strategy))
        print(f"lars, {strategy}: weights {differences[0]:.1e}, momenta {differences[1]:.1e}")
        assert max(differences) < LIMIT, strategy


@pytest.mark.process
def test_lars_learns_the_digits(train, summary_of, tmp_path):
    argv = ["single", *DIGITS, "--batch-size=32", "--no-bf16", "--optimizer=lars", "--epochs=2", "--name=run"]
    train([*argv, f"--runs-dir={tmp_path}"], ok=True)
    assert summary_of(tmp_path / "run")["best_accuracy"] > 0.6
