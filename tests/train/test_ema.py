"""The moving average is that of the weights, whoever holds which part, and it is what validates and is exported."""

import pytest
import torch
from torch import nn

from tests.train.comparing import DIGITS, LIMIT, SPLITS, STEPS, TEXT, apart, trained, vector
from train import checkpoint, data, models
from train.data.loader import open_batches
from train.ema import MovingAverage
from train.export import export
from train.options import Options
from train.world import World

AVERAGED = ["--ema=0.5", "--optimizer=sgd", "--lr=0.1", "--max-steps=3"]


def test_it_is_the_mean_of_what_was():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))
    average = MovingAverage(model, 0.9)
    weights = []
    expected = {name: tensor.clone() for name, tensor in average.state.items()}
    assert "1.running_var" in expected
    assert "1.num_batches_tracked" not in expected
    for step in range(100):
        model(torch.randn(8, 2))
        with torch.no_grad():
            model[0].weight.add_(torch.randn(1, 2))
        weights.append(model[0].weight.detach().clone())
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, tensor in expected.items():
            expected[name] = (
                decay * tensor + (1 - decay) * {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
            )
    for name, tensor in expected.items():
        assert torch.allclose(average.state[name], tensor, rtol=1e-5), name
    with average.in_place():
        assert torch.allclose(model[0].weight, expected["0.weight"], rtol=1e-5)
        assert torch.equal(average.state["0.weight"], weights[-1])
    assert torch.equal(model[0].weight, weights[-1])


def averaged(state):
    return vector(state["ema"])


@pytest.mark.process
def test_every_strategy_has_that_of_the_single_process(train, tmp_path):
    common = [*TEXT, *STEPS, *AVERAGED]
    single = trained(train, tmp_path, "single", 1, [*common, "--accumulate=2"], "single")
    assert (averaged(single) - vector(single["model"])).norm() / averaged(single).norm() > 1e-3
    for strategy, (world_size, more) in SPLITS.items():
        state = trained(train, tmp_path, strategy, world_size, [*common, *more], strategy)
        assert state["ema"].keys() == single["ema"].keys()
        difference = ((averaged(state) - averaged(single)).norm() / averaged(single).norm()).item()
        print(f"average, {strategy}: {difference:.1e}")
        assert difference < LIMIT
        assert max(apart(single, state)) < LIMIT
        # It validates, and not the weights of the last step.
        losses = [each["progress"]["history"][-1]["valid_loss"] for each in (single, state)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.process
@pytest.mark.parametrize(("strategy", "data"), [("ddp", DIGITS), ("fsdp", TEXT)])
def test_going_on_keeps_it(train, tmp_path, strategy, data):
    common = [*data, *STEPS, *AVERAGED]
    whole = trained(train, tmp_path, strategy, 2, [*common, "--max-steps=4"], "whole")
    trained(train, tmp_path, strategy, 2, [*common, "--max-steps=2"], "parts")
    parts = trained(train, tmp_path, strategy, 2, [*common, "--max-steps=4", "--resume"], "parts")
    assert apart(whole, parts) == [0, 0]
    assert torch.equal(averaged(whole), averaged(parts))
    assert whole["progress"]["history"][-1]["valid_loss"] == parts["progress"]["history"][-1]["valid_loss"]


@pytest.mark.process
def test_what_validates_is_what_is_exported(train, tmp_path):
    common = [*DIGITS, *STEPS, "--ema=0.9", "--lr=0.05", "--max-steps=20"]
    state = trained(train, tmp_path, "ddp", 2, common, "run")
    _, file = export(tmp_path / "run", None)
    weights = torch.load(file, weights_only=True)
    assert torch.equal(weights["conv1.weight"], state["ema"]["conv1.weight"])
    assert not torch.equal(weights["conv1.weight"], state["model"]["conv1.weight"])
    asked = Options(data="digits", image_size=16, batch_size=100)
    source = data.open_source(asked)
    model = models.build(asked, 10, 16)
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        parts = [
            (models.loss_of(model(images), labels) * len(labels)).item()
            for images, labels in open_batches(source, asked, World())[1]
        ]
    told = state["progress"]["history"][-1]["valid_loss"]
    assert sum(parts) / len(source.valid) == pytest.approx(told, rel=1e-4)
    live, last = export(tmp_path / "run", tmp_path / "last.pt", last=True)
    assert torch.equal(torch.load(last, weights_only=True)["conv1.weight"], state["model"]["conv1.weight"])
    assert checkpoint.is_checkpoint(live)


@pytest.mark.process
def test_an_average_that_the_checkpoint_has_not_begins_with_its_weights(train, tmp_path):
    common = [*TEXT, *STEPS, "--optimizer=sgd", "--lr=0"]
    before = trained(train, tmp_path, "fsdp", 2, [*common, "--max-steps=1"], "run")
    [ended, _] = train(
        ["fsdp", *common, "--max-steps=2", "--ema=0.9", "--resume", "--name=run", f"--runs-dir={tmp_path}"], 2, ok=True
    )
    assert "ema None -> 0.9" in ended.out
    state = checkpoint.load_newest(tmp_path / "run")[1]
    assert torch.allclose(averaged(state), vector(before["model"]))
