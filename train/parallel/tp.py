"""Tensor parallel: each layer's matrices are sharded over neighbouring ranks, which work on the same sequences.

Between the matrices a sequence is sharded too (sequence parallel), so that no rank keeps all of its activations. With
more ranks than `--tensor-parallel` the groups train on different data, and the part of each rank is sharded over the
groups as in fsdp.
"""

import logging
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from muster.errors import MusterError
from muster.train.distributed.world import World, open_mesh
from muster.train.models import IGNORED, gpt, place
from muster.train.optim import Precision
from muster.train.parallel import fsdp
from muster.train.parallel.strategy import ExactGradients, Gradients, are_exact
from muster.units import plural

SEQUENCE = Shard(1)


class TensorParallel(fsdp.FSDP):
    """Neighbouring ranks share each layer's matrices, and work on the same sequences."""

    logits: "ShardedLogits | None" = None

    def check(self) -> None:
        """Raises MusterError where the world can't be divided into groups, or a layer or a sequence within a group."""
        world, options = self.world, self.options
        shape = gpt.shape_of(options.model)
        size = options.tensor_parallel or world.world_size
        numbers = {
            "processes": world.world_size,
            "key-value heads": shape.num_kv_heads,
            "columns of a feed-forward layer": shape.hidden,
            "tokens of a sequence": options.seq_len or shape.context,
        }
        for name, number in numbers.items():
            if number % size:
                raise MusterError(
                    f"{number} {name} can't be divided by {size} ranks",
                    seen=f"--tensor-parallel={size}, {plural(world.world_size, 'process')}, --model={options.model} "
                    f"--seq-len={numbers['tokens of a sequence']}",
                    fix=f"--tensor-parallel={math.gcd(*numbers.values())}, or a divisor of that",
                )

    def assign_data(self) -> World:
        """The world, with the same data for all ranks of a group, the first of which reports the loss."""
        world, options = self.world, self.options
        group, position = divmod(world.rank, size := options.tensor_parallel or world.world_size)
        return replace(world, dp=(group, world.world_size // size), reports_loss=position == 0)

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` with its layers sharded over the ranks of a group, and these shards over the groups."""
        world, options = self.world, self.options
        mesh = open_mesh(world, data=world.dp_size, tensor=world.world_size // world.dp_size)
        assert isinstance(model, gpt.GPT)
        self.logits = shard(model, mesh["tensor"])
        if world.dp_size > 1:
            # It says how the norm for --clip-norm could be reduced in fewer steps, which no user can change.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            fsdp.shard(model, mesh["data"], world, options, precision)
        return place(model, fsdp.storage_device(world, options), torch.preserve_format, options.seed)

    def gradients(self, model: nn.Module) -> Gradients:
        """Gradients averaged over the groups as in fsdp; with one group, added up within it."""
        world, options = self.world, self.options
        if world.dp_size > 1:
            gradients = super().gradients(model)
        elif are_exact(world, options):
            gradients = ExactGroupGradients(model, options.accumulate)
        else:
            gradients = GroupGradients(model, options.accumulate)
        if self.logits is not None:
            # --compile would break its graph at each collective.
            disabled: Any = torch.compiler.disable(self.logits.loss)
            gradients.criterion = disabled
            gradients.predictions = self.logits.predictions
        return gradients


def shard(model: gpt.GPT, group: DeviceMesh) -> "ShardedLogits | None":
    """Shards the matrices of `model` over the ranks of `group`; returns the `ShardedLogits` of its output.

    None where the vocabulary is too small to give each rank a token: then each rank has all logits.
    """
    assert model.output is not None
    logits = ShardedLogits(group, model.output.out_features)
    are_sharded = logits.shard_size * (group.size() - 1) < model.output.out_features
    gathered = parallel.PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),))
    layer = {
        "attention_norm": parallel.SequenceParallel(),
        "attention": gathered,
        "attention.query": parallel.ColwiseParallel(),
        "attention.key": parallel.ColwiseParallel(),
        "attention.value": parallel.ColwiseParallel(),
        "attention.out": parallel.RowwiseParallel(output_layouts=SEQUENCE),
        "feed_forward_norm": parallel.SequenceParallel(),
        "feed_forward": gathered,
        "feed_forward.gate": parallel.ColwiseParallel(),
        "feed_forward.up": parallel.ColwiseParallel(),
        "feed_forward.down": parallel.RowwiseParallel(output_layouts=SEQUENCE),
    }
    ends = {
        "embed": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        "norm": parallel.SequenceParallel(),
        "output": parallel.ColwiseParallel(
            input_layouts=SEQUENCE, output_layouts=Shard(-1) if are_sharded else Replicate()
        ),
    }
    for part in model.layers.values():
        parallel.parallelize_module(part, group, layer)  # type: ignore[arg-type]
    parallel.parallelize_module(model, group, ends)  # type: ignore[arg-type]
    return logits if are_sharded else None


class ShardedLogits:
    """Logits (BTV) whose last dimension is sharded over the ranks of a group: no rank has those of all tokens.

    For the loss of each target the ranks exchange four numbers, in place of the logits of all tokens.

    Source: Megatron-LM, arXiv 1909.08053, section 3

    Attributes:
        num_tokens: the size of the vocabulary.
        shard_size: the number of tokens whose logits a rank has; the last rank may have fewer.
        shard_start: the first of them on this rank.
    """

    def __init__(self, group: DeviceMesh, num_tokens: int) -> None:
        self.group = group.get_group()
        self.num_tokens = num_tokens
        self.shard_size = math.ceil(num_tokens / group.size())
        self.shard_start = self.shard_size * group.get_local_rank()

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy over all `targets` (BT), as `loss_of` has it, from this rank's part of `logits`."""
        is_counted = targets.flatten() != IGNORED
        each = ShardedCrossEntropy.apply(logits.flatten(0, -2), targets.flatten(), smoothing, self)
        return torch.where(is_counted, each, 0.0).sum() / is_counted.sum()

    @torch.no_grad()
    def predictions(self, logits: Tensor) -> Tensor:
        """The token with the highest score for each target; the first of equal ones."""
        local, index = logits.max(-1)
        highest = local.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        found = torch.where(local == highest, index + self.shard_start, self.num_tokens)
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return found


class ShardedCrossEntropy(torch.autograd.Function):
    """The cross-entropy of each target (N), in fp32, or in the precision of the logits where that is higher."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, sharding: ShardedLogits) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = scores.amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, sharding.group)
        scores = scores - highest[:, None]
        is_here = (targets >= sharding.shard_start) & (targets < sharding.shard_start + scores.shape[-1])
        index = torch.where(is_here, targets - sharding.shard_start, 0)[:, None]
        at_target = torch.where(is_here, scores.gather(-1, index)[:, 0], 0.0)
        total = scores.sum(-1)
        probabilities = scores.exp_()  # once they are divided by their sum
        sums = torch.stack((probabilities.sum(-1), at_target, total))
        dist.all_reduce(sums, dist.ReduceOp.SUM, sharding.group)
        normalizer, at_target, total = sums
        ctx.save_for_backward(probabilities.div_(normalizer[:, None]), index, is_here)
        ctx.smoothing, ctx.smoothing_per_token = smoothing, smoothing / sharding.num_tokens
        return normalizer.log() - (1 - smoothing) * at_target - ctx.smoothing_per_token * total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, is_here = ctx.saved_tensors
        at_target = torch.where(is_here, 1 - ctx.smoothing, 0.0).to(probabilities.dtype)
        gradient = (probabilities - ctx.smoothing_per_token).scatter_add(-1, index, -at_target[:, None])
        return gradient * grads[0][:, None], None, None, None


class GroupGradients(Gradients):
    """Gradients of a model that is sharded over one group of ranks."""

    def __init__(self, model: nn.Module, accumulate: int) -> None:
        super().__init__(accumulate)
        self.parameters = list(model.parameters())

    def finish(self) -> None:
        """Adds up the gradients of weights that all ranks have: each rank's come from its part of the sequences."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = reduce_like(parameter.grad, parameter)


class ExactGroupGradients(ExactGradients):
    """Gradients as in GroupGradients, but added up over micro-batches and ranks in double precision."""

    @torch.no_grad()
    def finish(self) -> None:
        for parameter in self.parameters:  # in the same order on all ranks
            if parameter in self.held:
                self.held[parameter] = reduce_like(self.held[parameter], parameter)
        super().finish()


def reduce_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """`gradient` with the placements of `parameter`: partial sums of the ranks are added up."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
