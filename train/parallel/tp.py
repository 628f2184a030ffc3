"""Tensor parallel: each layer's matrices are cut over neighbouring ranks, which work on the same sequences.

Between the matrices a sequence is cut too (sequence parallel), so that no rank keeps all of its activations. With more
ranks than `--tensor-parallel` the groups train on different data, and what a rank has is sharded over them as by fsdp.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from muster.errors import MusterError
from muster.train.distributed.world import World, open_mesh
from muster.train.models import gpt, place
from muster.train.optim import Precision
from muster.train.parallel import fsdp
from muster.train.parallel.strategy import ExactGradients, Gradients, are_exact
from muster.units import processes

SEQUENCE = Shard(1)


class TensorParallel(fsdp.FSDP):
    """Neighbouring ranks share each layer's matrices, and work on the same sequences."""

    def check(self) -> None:
        """Raises MusterError where the groups don't divide the world, or their ranks a layer or a sequence."""
        world, options = self.world, self.options
        shape = gpt.shape_of(options.model)
        size = options.tensor_parallel or world.world_size
        numbers = {
            "processes": world.world_size,
            "heads of keys": shape.num_kv_heads,
            "tokens of a sequence": options.seq_len or shape.context,
        }
        for name, number in numbers.items():
            if number % size:
                raise MusterError(
                    f"{number} {name} can't be divided by {size} ranks",
                    seen=f"--tensor-parallel={size}, {processes(world.world_size)}, --model={options.model}",
                    fix=f"--tensor-parallel={math.gcd(*numbers.values())}, or a divisor of that",
                )

    def share(self) -> World:
        """The same data for the ranks of a group, of which the first counts."""
        world, options = self.world, self.options
        group, place = divmod(world.rank, size := options.tensor_parallel or world.world_size)
        return replace(world, share=(group, world.world_size // size), reports_loss=place == 0)

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` with its layers cut over the ranks of a group, and sharded over the groups."""
        world, options = self.world, self.options
        mesh = open_mesh(world, data=world.dp_size, tensor=world.world_size // world.dp_size)
        cut(model, mesh["tensor"])
        if world.dp_size > 1:
            fsdp.cut(model, mesh["data"], world, options, precision)
        return place(model, fsdp.home_of(world, options), torch.preserve_format, options.seed)

    def gradients(self, model: nn.Module) -> Gradients:
        """Averaged over the groups as by fsdp; of one group, added up there."""
        world, options = self.world, self.options
        if world.dp_size > 1:
            return super().gradients(model)
        if are_exact(world, options):
            return ExactGroupGradients(model, options.accumulate)
        return GroupGradients(model, options.accumulate)


def cut(model: nn.Module, group: object) -> None:
    """Cuts the matrices of `model` over the ranks of `group`."""
    assert isinstance(model, gpt.GPT)
    whole = PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),))
    layer = {
        "attention_norm": SequenceParallel(),
        "attention": whole,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=SEQUENCE),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": whole,
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=SEQUENCE),
    }
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    }
    for part in model.layers.values():
        parallelize_module(part, group, layer)  # type: ignore[arg-type]
    parallelize_module(model, group, ends)  # type: ignore[arg-type]


class GroupGradients(Gradients):
    """Gradients of a model that one group of ranks has between them."""

    def __init__(self, model: nn.Module, accumulate: int) -> None:
        super().__init__(accumulate)
        self.parameters = list(model.parameters())

    def finish(self) -> None:
        """Adds up what each rank's part of the sequences has given a weight that all have."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = whole(parameter.grad, parameter)


class ExactGroupGradients(ExactGradients):
    """The same, added up over micro-batches and ranks in double precision."""

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self.parameters:  # in the same order on all ranks
            if parameter in self.held:
                self.held[parameter] = whole(self.held[parameter], parameter)
        super().finish()


def whole(gradient: Tensor, parameter: Tensor) -> Tensor:
    """`gradient`, cut over the ranks as `parameter` is, where it was a sum of which each has a part."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
