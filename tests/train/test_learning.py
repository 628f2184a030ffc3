"""Every strategy learns: a transformer learns this repository's sources, a classifier images of digits.

The report at the end of the session has the curves: the training loss of each epoch, and the last validation.
"""

import math
from collections import Counter

import pytest

from tests.train.comparing import ROOT

# A minute each. Shorter tests: data/test_tokens.py and test_train.py show that ddp learns, parallel/test_matrix.py that
# all strategies train as the single process does.
pytestmark = [pytest.mark.process, pytest.mark.once, pytest.mark.long]

SOURCES = ROOT / "train" / "parallel"
GPT = [
    *("--model=gpt-tiny", f"--data=tokens:{SOURCES}", "--seq-len=64", "--epochs=4", "--lr=0.003"),
    *("--no-bf16", "--keep-checkpoints=1"),
]
RESNET = ["--data=digits", "--image-size=16", "--epochs=2", "--lr=0.005", "--no-bf16", "--keep-checkpoints=1"]


def curve(values):
    """`values` as a bar chart in one line."""
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * value / max(values))] for value in values)


def entropy_of_bytes(folder):
    """The entropy of single bytes, in nats: the loss of a model that knows only how frequent each byte is."""
    counts = Counter(b"".join(path.read_bytes() for path in folder.rglob("*.py")))
    total = counts.total()
    return -sum(number / total * math.log(number / total) for number in counts.values())


@pytest.fixture
def learned(train, summary_of, tell, tmp_path):
    """Trains with a strategy and reports its curve; returns the record of the last epoch."""

    def run(title, strategy, world_size, options):
        train([strategy, *options, "--name=run", f"--runs-dir={tmp_path}"], world_size, ok=True)
        epochs = summary_of(tmp_path / "run")["epochs"]
        losses = [epoch["train_loss"] for epoch in epochs]
        numbers = " ".join(f"{loss:.2f}" for loss in losses)
        last = epochs[-1]
        validation = f"validation: loss {last['valid_loss']:.2f}, accuracy {last['valid_accuracy']:.0%}"
        tell(title, f"{strategy:<9} {world_size}  {curve(losses)}  {numbers}   {validation}")
        assert losses == sorted(losses, reverse=True)
        return last

    return run


@pytest.mark.parametrize(
    ("strategy", "world_size", "batch_size"),
    [("single", 1, 16), ("ddp", 2, 8), ("fsdp", 2, 8), ("tp", 2, 16), ("pipeline", 2, 16)],
)
def test_a_transformer_learns_the_sources_of_this_repository(learned, strategy, world_size, batch_size):
    known = entropy_of_bytes(SOURCES)
    title = f"a transformer on this repository's sources: loss by epoch (by bytes' frequencies alone {known:.2f})"
    last = learned(title, strategy, world_size, [*GPT, f"--batch-size={batch_size}"])
    assert last["valid_loss"] < 0.85 * known
    assert last["train_loss"] < 0.85 * known


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("dp", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_classifier_learns_the_digits(learned, strategy, world_size):
    title = "resnet18 on the digits: loss by epoch (by chance 2.30, accuracy 10%)"
    last = learned(title, strategy, world_size, [*RESNET, f"--batch-size={32 // world_size}"])
    assert last["valid_accuracy"] > 0.8
