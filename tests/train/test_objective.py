"""Label smoothing and deterministic kernels, in one process and split over ranks."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from muster.config import Options, check
from muster.errors import MusterError
from muster.train.parallel.strategy import loss_of
from tests.train.comparing import DIGITS, STEPS, TEXT, apart, trained


def test_a_smoothed_target_gives_each_class_its_share():
    logits, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    spread = 0.9 * torch.nn.functional.one_hot(labels, 4) + 0.1 / 4
    by_hand = -(spread * logits.log_softmax(-1)).sum(-1).mean()
    assert loss_of(logits, labels, 0.1).item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert loss_of(logits, labels).item() == pytest.approx(cross_entropy(logits, labels).item())
    both = loss_of((logits, logits), labels, 0.1)
    assert both.item() == pytest.approx(1.3 * by_hand.item(), rel=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("data", [pytest.param(DIGITS, marks=pytest.mark.full), TEXT])
def test_label_smoothing_is_the_same_in_every_split(train, tmp_path, data):
    options = ["--label-smoothing=0.1"]
    common = [*data, *STEPS, *options, "--optimizer=sgd", "--lr=0.05", "--max-steps=3", "--deterministic"]
    single = trained(train, tmp_path, "single", 1, [*common, "--accumulate=4"], "single")
    plain = [word for word in common if word not in options]
    assert max(apart(single, trained(train, tmp_path, "single", 1, [*plain, "--accumulate=4"], "plain"))) > 1e-5
    for strategy in ("ddp", "fsdp"):
        state = trained(train, tmp_path, strategy, 2, [*common, "--accumulate=2"], strategy)
        assert max(apart(single, state)) < 1e-6
        losses = [each["progress"]["history"][-1] for each in (single, state)]
        assert losses[1]["train_loss"] == pytest.approx(losses[0]["train_loss"], rel=1e-5)
        assert losses[1]["train_accuracy"] == losses[0]["train_accuracy"]


@pytest.mark.process
def test_stages_train_on_smoothed_targets_too(train, tmp_path):
    common = [*TEXT, *STEPS, "--label-smoothing=0.2", "--optimizer=sgd", "--lr=0.1", "--max-steps=2"]
    single = trained(train, tmp_path, "single", 1, common, "single")
    state = trained(train, tmp_path, "pipeline", 2, common, "pipeline")
    assert max(apart(single, state)) < 1e-6
    losses = [each["progress"]["history"][-1]["valid_loss"] for each in (single, state)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_steps": 50}, "need --lr-schedule=cosine"),
        ({"lr_end": 0.1}, "need --lr-schedule=cosine"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(MusterError, match=words):
        check("ddp", Options(**options))


@pytest.mark.process
def test_kernels_that_give_other_bits_are_refused_by_name(train, tmp_path):
    # torch has no deterministic kernel for max_unpool2d, not even on CPUs (torch.use_deterministic_algorithms).
    before = (
        "import torch, muster.train.parallel.strategy as g\n"
        "plain = g.loss_of\n"
        "def loss_of(outputs, targets, smoothing=0.0):\n"
        "    pooled, where = torch.nn.functional.max_pool2d(torch.ones(1, 4, 4), 2, return_indices=True)\n"
        "    torch.nn.functional.max_unpool2d(pooled, where, 2)\n"
        "    return plain(outputs, targets, smoothing)\n"
        "g.loss_of, g.Gradients.criterion = loss_of, staticmethod(loss_of)\n"
    )
    argv = ["ddp", *DIGITS, *STEPS, "--max-steps=2", f"--runs-dir={tmp_path}"]
    train(argv, 2, ok=True, before=before)
    ended = train([*argv, "--deterministic"], 2, before=before)
    assert [rank.code for rank in ended] == [2, 2]
    said = "".join(rank.err for rank in ended)
    assert "max_unpooling2d" in said
    assert "--deterministic" in said
    train([*argv, "--deterministic"], 2, ok=True)
