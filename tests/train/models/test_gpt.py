import math

import pytest
import torch
from torch import nn

from muster.config import Options
from muster.errors import MusterError
from muster.train import models
from muster.train.models import IGNORED, gpt
from muster.train.parallel.strategy import loss_of


def made(seed=0, num_tokens=50, **more):
    model = models.build(Options(model="gpt-tiny", **more), num_tokens, 16)
    return models.place(model, torch.device("cpu"), torch.preserve_format, seed)


def texts(num_tokens=50, seed=0):
    return torch.randint(0, num_tokens, (3, 16), generator=torch.Generator().manual_seed(seed))


# Meta's counts: 1.24 B with a shared embedding, which is not shared here (128,256 x 2,048 more), and 8.03 B.
@pytest.mark.parametrize(("name", "billions"), [("gpt-1b", 1.236 + 0.263), ("gpt-8b", 8.030)])
def test_the_large_ones_have_their_sizes_and_take_no_memory(name, billions):
    model = models.build(Options(model=name), gpt.SHAPES[name].vocab, 8)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)
    assert model(torch.empty(2, 8, dtype=torch.int64, device="meta")).shape == (2, 8, gpt.SHAPES[name].vocab)


def test_all_shapes_can_be_divided():
    for shape in gpt.SHAPES.values():
        assert shape.dim % (2 * shape.num_heads) == 0
        assert shape.num_heads % shape.num_kv_heads == 0


@pytest.mark.parametrize(("name", "offered"), [("gpt-tny", "gpt-tiny"), ("GPT-8B", "gpt-8b"), ("gpt2", "gpt-")])
def test_an_unknown_one_offers_the_nearest(name, offered):
    with pytest.raises(MusterError) as raised:
        models.build(Options(model=name), 256, 16)
    assert offered in raised.value.fix


def test_no_token_sees_what_follows_it():
    model, inputs = made(), texts()
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 50
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert all((before[:, place] - after[:, place]).abs().max() > 1e-5 for place in range(9, 16))


@pytest.mark.parametrize("seq_len", [129, 256, 511])
def test_texts_of_some_hundred_tokens_give_the_same_in_fp32_and_in_double_precision(seq_len):
    """On CPUs their attention is computed in two parts in fp32, and in one in double precision."""
    tokens = torch.randint(0, 50, (2, seq_len + 1), generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.double):
        model = made().to(dtype)
        outputs = model(tokens[:, :-1])
        loss_of(outputs, tokens[:, 1:]).backward()
        found.append([outputs, *(parameter.grad for parameter in model.parameters())])
    for single, double in zip(*found, strict=True):
        assert (single - double).norm() < 1e-5 * double.norm()


def test_places_are_told_apart():
    outputs = made()(torch.full((1, 16), 7))
    assert torch.allclose(outputs[0, 0], outputs[0, 5], atol=1e-5)  # attention's mean of equal tokens is that token
    one, other = (made()(torch.tensor([order])) for order in ([1, 2, 3, 4, 5], [2, 1, 3, 4, 5]))
    assert (one[0, -1] - other[0, -1]).abs().max() > 1e-6


def test_the_first_loss_is_that_of_a_guess():
    assert loss_of(made()(texts()), texts(seed=1)).item() == pytest.approx(math.log(50), rel=0.02)


def test_targets_that_do_not_count():
    model, targets = made(), texts(seed=1)
    targets[1:] = IGNORED
    assert loss_of(model(texts()), targets).item() == pytest.approx(loss_of(model(texts()[:1]), targets[:1]).item())


def test_a_part_of_the_model_has_the_weights_that_the_whole_has():
    whole = made(seed=3)
    part = models.build(Options(model="gpt-tiny"), 50, 16)
    part.embed = None
    for number in "012":
        del part.layers[number]
    models.place(part, torch.device("cpu"), torch.preserve_format, 3)
    weights = whole.state_dict()
    assert len(part.state_dict()) == 11
    assert all(torch.equal(tensor, weights[name]) for name, tensor in part.state_dict().items())
    assert not torch.equal(weights["layers.0.attention.query.weight"], weights["layers.1.attention.query.weight"])
    assert not torch.equal(weights["output.weight"], made(seed=4).state_dict()["output.weight"])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(recompute):
    kept: list[int] = []

    def gradients(**more):
        model = made(**more)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            loss = loss_of(model(texts()), texts(seed=1))
        kept.append(sum(sizes))
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    pairs = zip(gradients(), gradients(activation_checkpoint=recompute), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    if recompute == "full":
        assert kept[1] < kept[0] / 4


def test_every_weight_learns():
    model = made()
    loss_of(model(texts()), texts(seed=1)).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())
    assert not [module for module in model.modules() if isinstance(module, nn.Linear) and module.bias is not None]


def test_gradients_are_those_of_the_loss():
    model = made().double()
    inputs, targets = texts(), texts(seed=1)
    loss_of(model(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("layers.1", "layers.2", "layers.3")):
            continue
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
        losses = []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                parameter.add_(direction, alpha=step)
                losses.append(loss_of(model(inputs), targets).item())
            parameter.add_(direction, alpha=1e-5)
        expected = (losses[0] - losses[1]) / 2e-5
        assert (parameter.grad * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-8), name
