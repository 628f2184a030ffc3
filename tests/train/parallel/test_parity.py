"""The same global batch, split over ranks in any way, trains the same weights: with --deterministic to the bit.

In fp32 the sum of four gradients depends on their order in its last bit, and from that a ResNet at its start diverges
within ten steps: where a ReLU flips in a channel of small variance, a change of 1e-10 in the weights was seen to change
the gradient by 1 %. So gradients are added up in double precision, and these tests take large steps.
"""

import pytest
import torch

from muster.config import Options
from muster.train import models
from muster.train.checkpoint import manager as checkpoint
from muster.train.data.sampler import seed_of

pytestmark = pytest.mark.process

FOUR = {"single": (1, 4), "ddp": (4, 1), "ddp-accumulate": (2, 2)}
TWO = {"single": (1, 2), "ddp": (2, 1), "ddp-one": (1, 2)}
THREE = {"single": (1, 3), "ddp": (3, 1)}
CASES = {
    "resnet18": (FOUR, ["--lr=0.05", "--max-steps=6"]),
    "resnet18 contiguous": (FOUR, ["--lr=0.05", "--max-steps=3", "--no-channels-last"]),
    "resnet18 three": (THREE, ["--lr=0.05", "--max-steps=3"]),
    # dropout: its random numbers have to follow the micro-batch, not the rank
    "squeezenet1_1": (FOUR, ["--lr=0.01", "--max-steps=6", "--image-size=32"]),
    "resnet18 two": (TWO, ["--lr=0.05", "--max-steps=6"]),
}


QUICK = ("resnet18 two", "squeezenet1_1")


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[] if case in QUICK else pytest.mark.full) for case in CASES]
)
def ended(request, train, small, tmp_path_factory):
    """The last checkpoint of each split of one global batch, by the name of the split."""
    runs = tmp_path_factory.mktemp("parity")
    splits, options = CASES[request.param]
    common = [*small, f"--model={request.param.split()[0]}", "--warmup-steps=0", "--epochs=1", "--deterministic"]
    states = {}
    for name, (world_size, accumulate) in splits.items():
        split = [
            name.partition("-")[0],
            *common,
            *options,
            f"--accumulate={accumulate}",
            f"--name={name}",
            f"--runs-dir={runs}",
        ]
        train([*split, f"--runs-dir={runs}"], world_size, ok=True)
        states[name] = checkpoint.load_newest(runs / name)[1]
    return states


def trained(state):
    """The parameters as one vector, without the statistics that batch normalisation keeps for validation."""
    tensors = state["model"].items()
    names = ("running_mean", "running_var", "num_batches_tracked")
    return torch.cat([tensor.double().flatten() for name, tensor in tensors if not name.endswith(names)])


def momenta(state):
    return torch.cat([value["momentum_buffer"].flatten() for value in state["optimizer"]["state"].values()])


def difference(one, other):
    return ((one - other).norm() / one.norm()).item()


def start(state):
    """The parameters before the first step, which depend on the seed alone."""
    torch.manual_seed(seed_of(state["options"]["seed"], "weights"))
    model = models.build(Options(model=state["identity"]["model"]), 10, state["options"]["image_size"])
    return trained({"model": model.state_dict()})


def test_every_split_trains_what_the_single_process_trains(ended):
    weights, slopes = trained(ended["single"]), momenta(ended["single"])
    moved = difference(weights, start(ended["single"]))
    assert moved > 2e-5
    for name in ended.keys() - {"single"}:
        apart = difference(weights, trained(ended[name]))
        slope = difference(slopes, momenta(ended[name]))
        assert (apart, slope) == (0, 0), name
    losses = [state["progress"]["history"][-1]["train_loss"] for state in ended.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
