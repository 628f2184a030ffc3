"""Every validation sample counts once, whatever the number of ranks."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from muster.train import data, models
from muster.train.__main__ import parse
from muster.train.checkpoint import manager as checkpoint
from muster.train.data.loader import open_batches
from muster.train.distributed.world import World

pytestmark = [pytest.mark.process, pytest.mark.once]


IMAGES = ["--model=shufflenet_v2_x0_5", "--data=fake", "--num-classes=3", "--image-size=32"]
WORLDS = {
    "images": {1: "single dp ddp fsdp", 2: "ddp fsdp", 3: "ddp fsdp", 4: "ddp fsdp"},
    "tokens": {1: "single tp pipeline", **dict.fromkeys((2, 3, 4), "ddp fsdp tp pipeline")},
}
OPTIONS = {
    ("tp", 3): ["--tensor-parallel=1"],
    ("tp", 4): ["--tensor-parallel=2"],
    ("pipeline", 2): ["--microbatches=2", "--batch-size=2"],
    ("pipeline", 3): ["--microbatches=3", "--batch-size=3"],
    ("pipeline", 4): ["--pipeline-parallel=2", "--microbatches=2", "--batch-size=2"],
}
TIERS = {(13, 3): (), (13, 4): (pytest.mark.full,), (1, 3): (pytest.mark.full,)}
"""Marks of a number of samples on a number of ranks; those of all others are `long`."""

CASES = [
    pytest.param(
        *(kind, num_valid, world_size, strategy),
        marks=TIERS.get((num_valid, world_size), (pytest.mark.long,)),
    )
    for kind, worlds in WORLDS.items()
    for world_size, strategies in worlds.items()
    for strategy in strategies.split()
    for num_valid in (13, 1)
    if num_valid == 13 or world_size > 1
]


def told_by_the_weights(run, options):
    """Loss and accuracy of the weights in the checkpoint, over all validation samples, one after the other."""
    state = checkpoint.load_newest(run)[1]
    source = data.open_source(options)
    _, valid = open_batches(source, options, World())
    model = models.build(options, source.num_classes, source.size)
    model = models.place(model, torch.device("cpu"), torch.preserve_format, 0)
    model.load_state_dict(state["model"])
    model.eval()
    with torch.no_grad():
        pairs = [(model(inputs).flatten(0, -2), targets.flatten()) for inputs, targets in valid]
    scores, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    counted = targets != models.IGNORED
    accuracy = (scores.argmax(1) == targets)[counted].sum().item() / counted.sum().item()
    return cross_entropy(scores[counted], targets[counted]).item(), accuracy, len(source.valid)


@pytest.mark.parametrize(("kind", "num_valid", "world_size", "strategy"), CASES)
def test_each_sample_counts_once(train, summary_of, tmp_path, kind, num_valid, world_size, strategy):
    """13 samples, which 2, 3 or 4 ranks can't share evenly, the last sequence with 8 of 16 tokens; or a single one."""
    argv = [*IMAGES, f"--num-samples={10 * num_valid}", "--batch-size=2"]
    if kind == "tokens":
        text = tmp_path / "text"
        text.write_bytes(Path(__file__).with_name("text.txt").read_bytes()[: {13: 2010, 1: 120}[num_valid]])
        argv = ["--model=gpt-tiny", f"--data=tokens:{text}", "--seq-len=16", "--batch-size=1"]
    argv += ["--no-bf16", "--max-steps=1", "--lr=1e-6", *OPTIONS.get((strategy, world_size), [])]
    train([strategy, *argv, "--name=run", f"--runs-dir={tmp_path}"], world_size, ok=True)
    loss, accuracy, num_samples = told_by_the_weights(tmp_path / "run", parse(["single", *argv])[1])
    assert num_samples == num_valid
    epoch = summary_of(tmp_path / "run")["epochs"][-1]
    assert epoch["valid_accuracy"] == accuracy
    assert epoch["valid_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        ["--num-samples=2", "--batch-size=1"],
        ["--num-samples=4", "--batch-size=1", "--accumulate=2"],
    ],
)
def test_fewer_training_samples_than_ranks_have_use_for(train, tmp_path, options):
    sizes = ["--data=fake", "--num-classes=2", "--image-size=32", "--no-bf16", f"--runs-dir={tmp_path}"]
    ended = train(["ddp", *sizes, *options], 3)
    assert [rank.code for rank in ended] == [2, 2, 2]
    said = "".join(rank.err for rank in ended)
    assert len(said.splitlines()) == 3
    assert "training samples don't fill one global batch" in said
    assert "a smaller --batch-size or --accumulate, fewer processes" in said
    assert not list(tmp_path.iterdir())


def test_validation_samples_of_which_none_can_be_read_are_told(train, make_images, tmp_path):
    for half, per_class in (("train", 4), ("val", 1)):
        make_images(tmp_path / half, per_class=per_class)
    for path in (tmp_path / "val").rglob("*.jpg"):
        path.write_bytes(b"")
    argv = [f"--data=imagefolder:{tmp_path}", *IMAGES[:1], *IMAGES[3:], "--batch-size=2", "--epochs=1", "--no-bf16"]
    ended = train(["ddp", *argv, "--on-bad-sample=skip", f"--runs-dir={tmp_path / 'runs'}"], 2)
    assert [rank.code for rank in ended] == [1, 1]
    assert "not one validation sample can be read" in ended[0].err
    assert f"2 skipped of 2, --data=imagefolder:{tmp_path}" in ended[0].err


def test_skipped_samples_are_counted_and_listed(train, make_images, summary_of, tmp_path):
    for half, per_class in (("train", 12), ("val", 5)):
        make_images(tmp_path / half, per_class=per_class)
    bad = [tmp_path / half / "cat" / "002.jpg" for half in ("train", "val")]
    for path in bad:
        path.write_text("no pixels")
    argv = [f"--data=imagefolder:{tmp_path}", "--image-size=32", "--batch-size=4", "--epochs=2", "--no-bf16"]
    ended = train(["ddp", *argv, "--on-bad-sample=skip", "--name=run", f"--runs-dir={tmp_path / 'runs'}"], 2, ok=True)
    summary = summary_of(tmp_path / "runs" / "run")
    assert [sample["name"] for sample in summary["bad_samples"]] == sorted(map(str, bad))
    assert "samples not readable" in ended[0].out
    assert summary["step"] == 6
