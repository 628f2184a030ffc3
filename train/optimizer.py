"""The optimizer and its learning rate."""

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from train.options import Options


def build(options: Options, model: nn.Module, *, fused: bool) -> Optimizer:
    """The optimizer `--optimizer` over the parameters of `model`; `options` are settled."""
    assert options.lr is not None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # torch 2.15 has no fused SGD for tensors that are cut over ranks.
    fused = fused and (options.optimizer == "adamw" or not any(isinstance(part, DTensor) for part in parameters))
    switch = True if fused else None  # None leaves torch its own choice, False would forbid foreach kernels too
    if options.optimizer == "adamw":
        return AdamW(parameters, lr=options.lr, weight_decay=options.weight_decay, fused=switch)
    return SGD(parameters, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay, fused=switch)


def scale_of(options: Options, world_size: int) -> float:
    """What the learning rate is multiplied by: the micro-batches of a step, their root, or 1."""
    num_micro_batches = world_size * options.accumulate
    return {"none": 1.0, "linear": float(num_micro_batches), "sqrt": num_micro_batches**0.5}[options.lr_scale]


def lr_at(options: Options, world_size: int, step: int) -> float:
    """The learning rate of `step` (from 0): a linear warm-up, then constant.

    It does not depend on `--epochs`, so that a run can be continued beyond its end.
    """
    assert options.lr is not None
    rise = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    return options.lr * scale_of(options, world_size) * rise


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Makes the next step of `optimizer` use `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
