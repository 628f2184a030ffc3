"""Suggestions for an unknown option, and for a value that an option does not take."""

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from muster.arguments import limits_of
from muster.config import SECTIONS

_SYNONYMS = {
    "--accumulate": "--accum --grad-accum --gradient-accumulation",
    "--batch-size": "--batchsize --bs",
    "--bf16": "--amp --fp16 --half --mixed-precision",
    "--clip-norm": "--grad-clip --max-norm",
    "--data": "--data-dir --data-path --dataset",
    "--epochs": "--epoch --num-epochs",
    "--image-size": "--image --img-size",
    "--lr": "--learning-rate",
    "--lr-schedule": "--lr-scheduler --scheduler",
    "--max-steps": "--iterations --iters --steps",
    "--model": "--arch",
    "--name": "--exp-name --run-name",
    "--nnodes": "--nodes --num-nodes",
    "--no-bf16": "--fp32",
    "--nproc-per-node": "--gpus --ngpus --np --nproc --num-gpus",
    "--runs-dir": "--checkpoint-dir --output-dir --save-dir",
    "--seq-len": "--block-size --context",
    "--track mlflow": "--mlflow",
    "--track tensorboard": "--tensorboard",
    "--track wandb": "--wandb",
    "--train-num-workers": "--num-workers --workers",
    "--warmup-steps": "--warmup",
    "--weight-decay": "--wd",
}
ALIASES = {theirs: ours for ours, names in _SYNONYMS.items() for theirs in names.split()}
"""Our option for each name by which other programs call it."""

_VALIDATED = "each epoch ends with a validation; a run's accuracy is in its summary.json"
ABSENT = {
    "--pretrained": "training begins from new weights, or with --resume from a run's checkpoint",
    **dict.fromkeys(("--eval", "--evaluate", "--test"), _VALIDATED),
}
"""Options that people expect of `train` and that it does not have, with what to use in their place."""

MIN_SIMILARITY = 0.75
"""The least similarity (difflib's ratio) of a misspelt name and a suggestion: "--gpus" is no misspelt "--fused"."""


def of_option(asked: str, parameters: Sequence[Any], path: str, typed: Sequence[str]) -> str:
    """The fix to show for the words `typed`, in which the command `path` has the unknown option `asked`."""
    known = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    word = f"--{asked.lstrip('-')}".replace("_", "-").lower()
    meant = ALIASES.get(word, "")
    if meant.partition(" ")[0] in known:
        return f"{path} {meant}"
    if word in ABSENT and path.startswith("train"):
        return ABSENT[word]
    if word.startswith("--no-") and f"--{word[5:]}" in known:
        return f"{path}, without {asked}"
    if near := difflib.get_close_matches(word, known, n=1, cutoff=MIN_SIMILARITY):
        return f"{path} {near[0]}"
    if path == "train":
        return f"a strategy comes first, as in train ddp {asked}; train --help lists what there is"
    # True where the option belongs to the job's command, whose -- is missing, and not to the scheduler.
    is_commands = word in _SYNONYMS or word[2:].replace("-", "_") in SECTIONS or {"train", "muster"} & set(typed[1:])
    if path == "muster job" and "list" not in typed and is_commands:
        return f"-- comes before the job's command, as in muster job SITE -- train ddp {asked}; or muster job --help"
    return f"{path} --help lists what there is"


def of_value(parameter: Any, path: str) -> str | None:
    """A line to type with the values that an option takes; None where one line can't name them."""
    if getattr(parameter, "type_descriptor", None) is None or parameter.param_type_name != "option":
        return None
    name = max(parameter.opts, key=len)
    if choices := get_args(parameter.type_descriptor.annotation):
        return f"{path} {name} " + " or ".join(map(str, choices))
    limits = limits_of(parameter)
    return f"{path} {name} with a number {limits}" if limits else None
