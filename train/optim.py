"""The optimizer and its learning rate."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from muster.config import Options
from muster.train.checkpoint import Progress
from muster.train.data.sampler import TrainSampler


def build(options: Options, model: nn.Module, *, fused: bool) -> Optimizer:
    """The optimizer `--optimizer` over the parameters of `model`; `options` are settled."""
    assert options.lr is not None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = groups_of(options, parameters)
    # torch 2.15 has no fused SGD for tensors that are cut over ranks.
    fused = fused and (options.optimizer == "adamw" or not any(isinstance(part, DTensor) for part in parameters))
    switch = True if fused else None  # None leaves torch its own choice, False would forbid foreach kernels too
    if options.optimizer == "adamw":
        return AdamW(groups, lr=options.lr, fused=switch)
    return SGD(groups, lr=options.lr, momentum=options.momentum, fused=switch)


def groups_of(options: Options, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """The parameters that decay, and apart from them those of one dimension, norms and biases, which don't.

    To pull a norm towards 0 changes what a layer puts out and makes nothing simpler (arXiv 1812.01187, 3.1).
    """
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    decays = options.weight_decay
    groups = [
        {"params": matrices, "weight_decay": decays},
        {"params": others, "weight_decay": decays if options.decay_norms else 0.0},
    ]
    return [group for group in groups if group["params"]]


def highest_lr(lr: float, lr_scale: str, num_micro_batches: int) -> float:
    """The learning rate after its rise: `lr` times the micro-batches of a step, their root, or 1."""
    return lr * {"none": 1.0, "linear": float(num_micro_batches), "sqrt": num_micro_batches**0.5}[lr_scale]


def extent(options: Options, progress: Progress, sampler: TrainSampler) -> tuple[int, int]:
    """Steps of the whole run, and by how many a cosine is further along than they are.

    A run that goes on with another number of ranks has made steps of another size. Its cosine follows the data that
    is used, and ends with the run; with `--max-steps` or `--lr-steps` it follows the steps.
    """
    epoch_steps = sampler.num_samples // sampler.global_batch
    used = progress.epoch * epoch_steps + progress.sample // sampler.global_batch
    left = (options.epochs - progress.epoch - 1) * epoch_steps
    left += (sampler.num_samples - progress.sample) // sampler.global_batch
    num_steps = progress.step + left
    if options.max_steps is not None and options.max_steps < num_steps:
        return options.max_steps, 0
    return num_steps, 0 if options.lr_steps else used - progress.step


def lr_at(options: Options, world_size: int, step: int, num_steps: int, ahead: int = 0) -> float:
    """The learning rate of `step` (from 0): a linear warm-up, then constant, or down half a cosine (arXiv 1608.03983).

    A constant rate does not depend on the end of the run, so that it can be continued beyond. A cosine ends at
    `--lr-steps`, or at the last of the `num_steps`, and is `ahead` of the steps.
    """
    assert options.lr is not None
    highest = highest_lr(options.lr, options.lr_scale, world_size * options.accumulate)
    if step < options.warmup_steps:
        return highest * (step + 1) / options.warmup_steps
    if options.lr_schedule == "constant":
        return highest
    length = (options.lr_steps or num_steps + ahead) - options.warmup_steps
    done = min(1.0, (step + ahead - options.warmup_steps) / length) if length > 0 else 1.0
    return highest * (options.lr_end + (1 - options.lr_end) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The ways of computing that are in effect."""

    bf16: bool
    channels_last: bool
    fused: bool

    @property
    def layout(self) -> torch.memory_format:
        """How images, and the weights that are laid over them, lie in memory."""
        return torch.channels_last if self.channels_last else torch.preserve_format

    def autocast(self, device: torch.device) -> torch.autocast:
        """A context in which the model computes in bfloat16 where that is safe, if it is on."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def __str__(self) -> str:
        words = ["bf16 autocast" if self.bf16 else "fp32"]
        words += ["channels_last"] if self.channels_last else []
        words += ["fused optimizer"] if self.fused else []
        return ", ".join(words)


def choose_precision(options: Options, device: torch.device) -> Precision:
    """What the options ask for; where they leave it open, what the device does in hardware."""
    bf16 = has_bf16(device) if options.bf16 is None else options.bf16
    # On CPUs torch's fused SGD is no faster than the plain one, and wrong where a gradient is not laid out in memory as
    # its weight is.
    fused = options.fused and (options.optimizer != "sgd" or device.type == "cuda")
    return Precision(bf16=bf16, channels_last=options.channels_last, fused=fused)


def has_bf16(device: torch.device) -> bool:
    """True where bfloat16 is computed by hardware: emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16"})
