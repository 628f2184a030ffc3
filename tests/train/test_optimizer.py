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
