"""Every validation sample counts once, whatever the number of ranks."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from train import checkpoint, data, models
from train.data.loader import open_batches
from train.options import Options
from train.world import World

pytestmark = pytest.mark.process


def test_three_ranks_and_a_set_that_three_does_not_divide(train, small, summary_of, tmp_path):
    train(["ddp", *small, "--max-steps=4", "--name=run", f"--runs-dir={tmp_path}"], 3, ok=True)
    _, state, _ = checkpoint.load_newest(tmp_path / "run")
    options = Options(data="digits", image_size=16, batch_size=100)
    source = data.open_source(options)
    assert len(source.valid) % 3 != 0
    _, valid = open_batches(source, options, World())
    model = models.build(options, 10, 16)
    model.load_state_dict(state["model"])
    model.eval()
    with torch.no_grad():
        pairs = [(model(images), labels) for images, labels in valid]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    epoch = summary_of(tmp_path / "run")["epochs"][-1]
    assert len(labels) == len(source.valid)
    assert epoch["valid_accuracy"] == (logits.argmax(1) == labels).sum().item() / len(labels)
    assert epoch["valid_loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-4)


def test_ranks_without_any_validation_sample(train, summary_of, tmp_path):
    sizes = ["--data=fake", "--num-samples=24", "--num-classes=3", "--image-size=32", "--batch-size=4", "--epochs=1"]
    train(["ddp", *sizes, "--no-bf16", "--name=run", f"--runs-dir={tmp_path}"], 3, ok=True)
    # 24 samples train, 2 validate: the third rank has none
    assert summary_of(tmp_path / "run")["epochs"][0]["valid_accuracy"] in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (["--num-samples=2", "--batch-size=1"], "at most 2 processes, with --batch-size=1"),
        (["--num-samples=4", "--batch-size=1", "--accumulate=2"], "--batch-size=1 --accumulate=1 or less"),
        (["--num-samples=7", "--batch-size=4"], "--batch-size=2 or less"),
    ],
)
def test_fewer_training_samples_than_ranks_have_use_for(train, tmp_path, options, fix):
    sizes = ["--data=fake", "--num-classes=2", "--image-size=32", "--no-bf16", f"--runs-dir={tmp_path}"]
    ended = train(["ddp", *sizes, *options], 3)
    assert [rank.code for rank in ended] == [2, 2, 2]
    said = "".join(rank.err for rank in ended)
    assert len(said.splitlines()) == 3
    assert "training samples don't fill one global batch" in said
    assert fix in said
    assert not list(tmp_path.iterdir())


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
