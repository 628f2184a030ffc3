"""Every strategy, in every allowed combination, on 2 and on 4 ranks trains as the single process does.

Three steps in fp32 over the same micro-batches, by SGD with momentum, many by AdamW and with clipped gradients too. The
report at the end of the session has the differences.
"""

from dataclasses import dataclass

import pytest

from tests.train.comparing import LIMIT, STEPS, TEXT, apart, losses, trained

pytestmark = pytest.mark.process

PARTS = 4
"""Micro-batches of a step, in all worlds."""

MODELS = {
    "gpt-tiny": [*TEXT, "--batch-size=1"],
    # fsdp keeps the weights of convolutions contiguous, for which torch has another kernel than for channels_last.
    "resnet18": ["--data=digits", "--image-size=16", "--batch-size=8", "--no-channels-last"],
}
RECIPES = {
    # A ResNet amplifies differences in the last bits of sums within some steps, so its sums are exact.
    "sgd": {
        "gpt-tiny": ["--optimizer=sgd", "--lr=0.1"],
        "resnet18": ["--optimizer=sgd", "--lr=0.05", "--deterministic"],
    },
    # AdamW divides a gradient by its own size: even one that is nearly 0 gives a full step, whose sign its last bits
    # decide.
    "adamw": {model: ["--optimizer=adamw", "--deterministic"] for model in MODELS},
    # The norm of all gradients is larger at the start, so every step is clipped.
    "sgd, cut": {"gpt-tiny": ["--optimizer=sgd", "--lr=1", "--clip-norm=0.05"]},
}


@dataclass(frozen=True)
class Row:
    """A strategy, its world size, and the options by which a step of all ranks together takes all PARTS.

    Attributes:
        recipes, images: the recipes of the transformer, and of the image classifier.
    """

    strategy: str
    world_size: int
    options: str = ""
    accumulate: int = 1
    recipes: tuple[str, ...] = ("sgd",)
    images: tuple[str, ...] = ()


# Schedules and recomputed activations do not concern the optimizer: SGD alone tests them.
BOTH = ("sgd", "adamw")
CUT = ("sgd", "sgd, cut", "adamw")
LINE, LINES = "--batch-size=4 --microbatches=4", "--pipeline-parallel=2 --batch-size=2 --microbatches=2"
ROWS = [
    Row("ddp", 2, accumulate=2, recipes=CUT, images=("sgd",)),
    Row("ddp", 4, recipes=CUT, images=BOTH),
    Row("ddp", 2, "--zero1", accumulate=2, recipes=CUT),
    Row("ddp", 4, "--zero1", images=("sgd",)),
    Row("fsdp", 2, accumulate=2, recipes=CUT, images=("sgd",)),
    Row("fsdp", 4, recipes=CUT, images=BOTH),
    Row("fsdp", 4, "--replicate=2", recipes=CUT, images=("sgd",)),
    Row("fsdp", 2, "--cpu-offload", accumulate=2, recipes=CUT),
    Row("fsdp", 4, "--replicate=2 --cpu-offload", images=("sgd",)),
    Row("fsdp", 2, "--activation-checkpoint=selective", accumulate=2),
    Row("fsdp", 4, "--activation-checkpoint=full"),
    Row("tp", 2, accumulate=4, recipes=CUT),
    Row("tp", 2, "--activation-checkpoint=selective", accumulate=4),
    Row("tp", 4, "--tensor-parallel=2", accumulate=2, recipes=CUT),
    Row("tp", 4, "--tensor-parallel=2 --activation-checkpoint=full", accumulate=2),
    *(Row("pipeline", 2, f"{LINE} --schedule={each}") for each in ("gpipe", "interleaved")),
    *(Row("pipeline", 2, f"{LINE} --schedule={each}", recipes=CUT) for each in ("1f1b", "zero-bubble")),
    *(Row("pipeline", 4, f"{LINE} --schedule={each}") for each in ("gpipe", "1f1b")),
    *(Row("pipeline", 4, f"{LINES} --schedule={each}") for each in ("gpipe", "interleaved", "zero-bubble")),
    Row("pipeline", 4, f"{LINES} --schedule=1f1b", recipes=CUT),
    Row("pipeline", 2, "--batch-size=2 --microbatches=2 --activation-checkpoint=full", accumulate=2),
]
QUICK = {
    ("ddp", 2, ""),
    ("ddp", 2, "--zero1"),
    ("fsdp", 2, ""),
    ("fsdp", 4, "--replicate=2"),
    ("tp", 2, ""),
    ("tp", 4, "--tensor-parallel=2"),
    ("pipeline", 2, f"{LINE} --schedule=zero-bubble"),
    ("pipeline", 4, f"{LINES} --schedule=1f1b"),
}
"""The rows that `make test` trains too, by SGD: each strategy alone, and in one combination."""


def marks(row, recipe):
    return [] if recipe == "sgd" and (row.strategy, row.world_size, row.options) in QUICK else [pytest.mark.full]


CASES = [
    pytest.param(model, recipe, row, marks=marks(row, recipe))
    for row in ROWS
    for model, recipes in (("gpt-tiny", row.recipes), ("resnet18", row.images))
    for recipe in recipes
]


def name_of(part):
    return part if isinstance(part, str) else f"{part.strategy} {part.world_size} {part.options}".strip()


@pytest.fixture(scope="module")
def single(train, tmp_path_factory):
    """The state of the single process, by model and recipe."""
    runs = tmp_path_factory.mktemp("single")
    known = {}

    def state(model, recipe):
        if (model, recipe) not in known:
            argv = [*MODELS[model], *STEPS, *RECIPES[recipe][model], "--max-steps=3", f"--accumulate={PARTS}"]
            known[model, recipe] = trained(train, runs, "single", 1, argv, f"{model}-{recipe}")
        return known[model, recipe]

    return state


@pytest.mark.parametrize(("model", "recipe", "row"), CASES, ids=name_of)
def test_three_steps_are_those_of_the_single_process(train, single, tell, tmp_path, model, recipe, row):
    options = [*RECIPES[recipe][model], f"--accumulate={row.accumulate}", *row.options.split()]
    argv = [*MODELS[model], *STEPS, *options, "--max-steps=3"]
    state = trained(train, tmp_path, row.strategy, row.world_size, argv, "run")
    weights, moments = apart(single(model, recipe), state)
    # The running statistics of batch normalisation are averaged over ranks, and validation uses them.
    names = ("train_loss",) if model == "resnet18" else ("train_loss", "valid_loss")
    loss = max(losses(single(model, recipe), state, names))
    where = f"{row.strategy} {row.world_size}"
    tell(
        "weights, moments and loss after 3 steps, relative to the single process",
        f"{where:<11} {model:<9} {recipe:<21} {weights:8.0e} {moments:8.0e} {loss:8.0e}  {row.options}",
    )
    assert max(weights, moments, loss) < LIMIT
