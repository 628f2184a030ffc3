"""The optimizer, and the precision in which it is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from muster.config import Options
from muster.train.distributed.world import World


def build(options: Options, model: nn.Module, *, fused: bool) -> Optimizer:
    """Builds the optimizer of `--optimizer` over the trainable parameters of `model`; `options` are settled."""
    assert options.lr is not None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Decay of a norm's weights changes the output of a layer without making it simpler (arXiv 1812.01187, 3.1).
    vectors_decay = options.weight_decay if options.decay_norms else 0.0
    groups: list[dict[str, Any]] = [
        {"params": [part for part in parameters if part.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [part for part in parameters if part.dim() <= 1], "weight_decay": vectors_decay},
    ]
    groups = [group for group in groups if group["params"]]
    # torch 2.15 has no fused SGD for sharded tensors.
    fused = fused and (options.optimizer == "adamw" or not any(isinstance(part, DTensor) for part in parameters))
    switch = True if fused else None  # None leaves the choice to torch, False would rule out foreach kernels too
    if options.optimizer == "adamw":
        return AdamW(groups, lr=options.lr, fused=switch)
    return SGD(groups, lr=options.lr, momentum=options.momentum, fused=switch)


def highest_lr(lr: float, lr_scale: str, num_micro_batches: int) -> float:
    """The learning rate after the warm-up: `lr` times the number of micro-batches of a step, its square root, or 1."""
    return lr * {"none": 1.0, "linear": float(num_micro_batches), "sqrt": num_micro_batches**0.5}[lr_scale]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The precision, memory layout and optimizer kernels of a training."""

    bf16: bool
    channels_last: bool
    fused: bool

    @property
    def layout(self) -> torch.memory_format:
        """The memory layout of images and of the weights of convolutions."""
        return torch.channels_last if self.channels_last else torch.preserve_format

    def autocast(self, device: torch.device) -> torch.autocast:
        """A context in which the model computes in bfloat16 where that is safe; no effect if `bf16` is False."""
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def __str__(self) -> str:
        words = ["bf16 autocast" if self.bf16 else "fp32"]
        words += ["channels_last"] if self.channels_last else []
        words += ["fused optimizer"] if self.fused else []
        return ", ".join(words)


def choose_precision(options: Options, world: World) -> Precision:
    """The precision that the options set; by default bf16, where the devices of all ranks have it in hardware.

    It is the same on all ranks, as they exchange sharded weights and the activations of a pipeline in it.
    """
    # Autocast would replace the double precision in which a transformer computes with --deterministic.
    is_exact = options.deterministic and options.predicts_tokens and world.device.type == "cpu"
    bf16 = all(world.gather(has_bf16(world.device) and not is_exact)) if options.bf16 is None else options.bf16
    # On CPUs torch's fused SGD is no faster than the plain one, and wrong where a gradient is not laid out in memory as
    # its weight is.
    # Its fused AdamW rounds the last few elements of a tensor differently from the others, and the shards of a weight
    # end at other elements than the whole weight.
    is_fit = world.device.type == "cuda" or (options.optimizer != "sgd" and not options.deterministic)
    return Precision(bf16=bf16, channels_last=options.channels_last, fused=options.fused and is_fit)


def has_bf16(device: torch.device) -> bool:
    """True where bfloat16 is computed by hardware: emulated, it is slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported()  # CPUs with AMX have it too
