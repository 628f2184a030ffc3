"""What was meant by an option that there is not, or by a value that an option does not take."""

import difflib
from collections.abc import Sequence
from typing import Any, get_args

MEANT = {
    "--learning-rate": "--lr",
    "--bs": "--batch-size",
    "--batchsize": "--batch-size",
    "--steps": "--max-steps",
    "--iterations": "--max-steps",
    "--iters": "--max-steps",
    "--epoch": "--epochs",
    "--num-epochs": "--epochs",
    "--gpus": "--nproc-per-node",
    "--ngpus": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--nproc": "--nproc-per-node",
    "--np": "--nproc-per-node",
    "--nodes": "--nnodes",
    "--num-nodes": "--nnodes",
    "--arch": "--model",
    "--dataset": "--data",
    "--data-dir": "--data",
    "--data-path": "--data",
    "--workers": "--train-num-workers",
    "--num-workers": "--train-num-workers",
    "--wd": "--weight-decay",
    "--warmup": "--warmup-steps",
    "--scheduler": "--lr-schedule",
    "--lr-scheduler": "--lr-schedule",
    "--amp": "--bf16",
    "--fp16": "--bf16",
    "--half": "--bf16",
    "--mixed-precision": "--bf16",
    "--fp32": "--no-bf16",
    "--grad-clip": "--clip-norm",
    "--max-norm": "--clip-norm",
    "--gradient-accumulation": "--accumulate",
    "--grad-accum": "--accumulate",
    "--accum": "--accumulate",
    "--output-dir": "--runs-dir",
    "--save-dir": "--runs-dir",
    "--checkpoint-dir": "--runs-dir",
    "--run-name": "--name",
    "--exp-name": "--name",
    "--wandb": "--track wandb",
    "--tensorboard": "--track tensorboard",
    "--mlflow": "--track mlflow",
    "--image": "--image-size",
    "--img-size": "--image-size",
    "--context": "--seq-len",
    "--block-size": "--seq-len",
}
"""Other programs' names, and ours."""

ABSENT = {
    "--pretrained": "training begins from new weights, or with --resume from a run's checkpoint",
    "--eval": "each epoch ends with a validation; a run's accuracy is in its summary.json",
    "--evaluate": "each epoch ends with a validation; a run's accuracy is in its summary.json",
    "--test": "each epoch ends with a validation; a run's accuracy is in its summary.json",
}
"""What people look for in `train` and it does not have, with what there is in its place."""

LEAST_ALIKE = 0.75
"""Names less alike than this have nothing to do with each other: "--gpus" is no misspelt "--fused"."""


def of_option(asked: str, parameters: Sequence[Any], path: str) -> str:
    """The line to type in place of the command `path` with the option `asked`, which it does not have."""
    known = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    word = f"--{asked.lstrip('-')}".replace("_", "-").lower()
    meant = MEANT.get(word, "")
    if meant.partition(" ")[0] in known:
        return f"{path} {meant}"
    if word in ABSENT and path.startswith("train"):
        return ABSENT[word]
    near = difflib.get_close_matches(word, known, n=1, cutoff=LEAST_ALIKE)
    if near:
        return f"{path} {near[0]}"
    if path == "train":
        return f"a strategy comes first, as in train ddp {asked}; train --help lists what there is"
    if path == "muster job":
        return (
            f"-- comes before the job's own command, as in muster job SITE -- train ddp {asked}; or muster job --help"
        )
    return f"{path} --help lists what there is"


def of_value(parameter: Any, path: str) -> str | None:
    """The values that an option takes, as a line to type; None where that can't be said in a line."""
    if getattr(parameter, "type_descriptor", None) is None or parameter.param_type_name != "option":
        return None
    name = max(parameter.opts, key=len)
    choices = [str(choice) for choice in get_args(parameter.type_descriptor.annotation)]
    if choices:
        return f"{path} {name} " + " or ".join(choices)
    low, high = parameter.min, parameter.max
    if low is not None and high is not None:
        return f"{path} {name} from {low:g} to {high:g}"
    return f"{path} {name} with a number from {low:g} on" if low is not None else None
