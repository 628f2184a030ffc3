"""Tensor parallel: each layer's matrices are cut over neighbouring ranks, which work on the same sequences.

Between the matrices a sequence is cut too (sequence parallel), so that no rank keeps all of its activations. With more
ranks than `--tensor-parallel` the groups train on different data, and what a rank has is sharded over them as by fsdp.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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
from muster.train.models import IGNORED, gpt, place
from muster.train.optim import Precision
from muster.train.parallel import fsdp
from muster.train.parallel.strategy import ExactGradients, Gradients, are_exact
from muster.units import processes

SEQUENCE = Shard(1)


class TensorParallel(fsdp.FSDP):
    """Neighbouring ranks share each layer's matrices, and work on the same sequences."""

    logits: "CutLogits | None" = None

    def check(self) -> None:
        """Raises MusterError where the groups don't divide the world, or their ranks a layer or a sequence."""
        world, options = self.world, self.options
        shape = gpt.shape_of(options.model)
        size = options.tensor_parallel or world.world_size
        numbers = {
            "processes": world.world_size,
            "heads of keys": shape.num_kv_heads,
            "columns of a feed-forward layer": shape.hidden,
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
        assert isinstance(model, gpt.GPT)
        self.logits = cut(model, mesh["tensor"])
        if world.dp_size > 1:
            fsdp.cut(model, mesh["data"], world, options, precision)
        return place(model, fsdp.home_of(world, options), torch.preserve_format, options.seed)

    def gradients(self, model: nn.Module) -> Gradients:
        """Averaged over the groups as by fsdp; of one group, added up there."""
        world, options = self.world, self.options
        if world.dp_size > 1:
            gradients = super().gradients(model)
        elif are_exact(world, options):
            gradients = ExactGroupGradients(model, options.accumulate)
        else:
            gradients = GroupGradients(model, options.accumulate)
        if self.logits is not None:
            # --compile would break its graph at each word to the other ranks.
            disabled: Any = torch.compiler.disable(self.logits.loss)
            gradients.criterion = disabled
            gradients.predictions = self.logits.predictions
        return gradients


def cut(model: gpt.GPT, group: DeviceMesh) -> "CutLogits | None":
    """Cuts the matrices of `model` over the ranks of `group`; returns what knows of the parts of the logits.

    None where there are fewer tokens than would give each rank one: then each rank has all logits.
    """
    assert model.output is not None
    logits = CutLogits(group, model.output.out_features)
    are_cut = logits.most * (group.size() - 1) < model.output.out_features
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
        "output": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1) if are_cut else Replicate()),
    }
    for part in model.layers.values():
        parallelize_module(part, group, layer)  # type: ignore[arg-type]
    parallelize_module(model, group, ends)  # type: ignore[arg-type]
    return logits if are_cut else None


class CutLogits:
    """Scores of the next token (BTV) whose last dimension is cut over the ranks of a group: no rank has all of them.

    Of each target the ranks send each other three numbers, in place of the scores of all tokens.

    Source: Megatron-LM, arXiv 1909.08053, section 3

    Args:
        num_tokens: of the vocabulary.

    Attributes:
        most: scores of one target that a rank has; the last one may have fewer.
    """

    def __init__(self, group: DeviceMesh, num_tokens: int) -> None:
        self.group = group.get_group()
        self.num_tokens = num_tokens
        self.most = math.ceil(num_tokens / group.size())
        self.first = self.most * group.get_local_rank()

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy over all `targets` (BT), as `loss_of` has it, from this rank's part of `logits`."""
        counts = targets.flatten() != IGNORED
        each = CutCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), smoothing, self)
        return torch.where(counts, each, 0.0).sum() / counts.sum()

    @torch.no_grad()
    def predictions(self, logits: Tensor) -> Tensor:
        """The token with the highest score for each target, of several the first one."""
        own, index = logits.max(-1)
        highest = own.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        found = torch.where(own == highest, index + self.first, self.num_tokens)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return found


class CutCrossEntropy(torch.autograd.Function):
    """The cross-entropy of each target (N), in fp32 or as the logits have it, where that is more."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, cut: CutLogits) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = scores.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, cut.group)
        scores = scores - highest[:, None]
        is_here = (targets >= cut.first) & (targets < cut.first + scores.shape[-1])
        place = torch.where(is_here, targets - cut.first, 0)[:, None]
        own = torch.where(is_here, scores.gather(-1, place)[:, 0], 0.0)
        total = scores.sum(-1)
        shares = scores.exp_()
        sums = torch.stack((shares.sum(-1), own, total))
        dist.all_reduce(sums, dist.ReduceOp.SUM, cut.group)
        whole, own, total = sums
        ctx.save_for_backward(shares.div_(whole[:, None]), place, is_here)
        ctx.smoothing, ctx.of_each = smoothing, smoothing / cut.num_tokens
        return whole.log() - (1 - smoothing) * own - ctx.of_each * total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        shares, place, is_here = ctx.saved_tensors
        at_target = torch.where(is_here, 1 - ctx.smoothing, 0.0).to(shares.dtype)
        gradient = (shares - ctx.of_each).scatter_add(-1, place, -at_target[:, None])
        return gradient * grads[0][:, None], None, None, None


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
