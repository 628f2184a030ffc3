"""Fully sharded data parallel: each rank keeps a part of every weight and moment, and gathers what it needs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from muster.config import Options
from muster.errors import MusterError
from muster.train.distributed.world import World, open_mesh
from muster.train.models import blocks_of, place
from muster.train.optim import Precision
from muster.train.parallel.strategy import Gradients, Strategy, are_exact
from muster.units import plural


class FSDP(Strategy):
    """Each rank keeps a part of every weight and moment, and gathers what it needs."""

    def check(self) -> None:
        """Raises MusterError where the world can't be divided into `--replicate` groups of more than one rank."""
        world, options = self.world, self.options
        world_size = world.world_size
        if world_size % options.replicate or options.replicate == world_size > 1:
            raise MusterError(
                f"{plural(world_size, 'process')} can't be divided into {options.replicate} groups of two or more",
                seen=f"--replicate={options.replicate}, {plural(world_size, 'process')}",
                fix="--replicate=1, or fewer groups whose number divides the processes; 'train ddp' for whole models",
            )

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model`, sharded over the ranks layer by layer."""
        world, options = self.world, self.options
        mesh = open_mesh(world, replicate=options.replicate, shard=world.world_size // options.replicate)
        if not next(model.parameters()).is_meta:
            # Already in memory: weights are sharded in the order of their dimensions, so they must be contiguous.
            model = place(model, storage_device(world, options), torch.contiguous_format, options.seed)
        shard(model, mesh if options.replicate > 1 else mesh["shard"], world, options, precision)
        # Each rank now holds its part only, so weights on the meta device get memory and values.
        model = place(model, storage_device(world, options), torch.preserve_format, options.seed)
        # Only weights and moments may stay in the host's memory: nothing would copy buffers (the statistics of batch
        # normalisation) to the device when a layer computes.
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(world.device))
        return model

    def gradients(self, model: nn.Module) -> Gradients:
        """Gradients that fully_shard averages while they are computed; exact sums are divided once, at the end."""
        world, options = self.world, self.options
        # In a group of one, torch 2.15 divides by the factor twice where gradients are summed in double precision.
        if not are_exact(world, options) or world.world_size == 1:
            return Gradients(options.accumulate)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(world.dp_size * options.accumulate)
        return Gradients(1)

    @contextmanager
    def without_sync(self, model: nn.Module) -> Iterator[None]:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
        yield
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)


def storage_device(world: World, options: Options) -> torch.device:
    """The device that keeps a rank's part of the weights."""
    return torch.device("cpu") if options.cpu_offload else world.device


def shard(model: nn.Module, mesh: DeviceMesh, world: World, options: Options, precision: Precision) -> None:
    """Shards `model` over the ranks of `mesh`; where it has two dimensions, the first replicates."""
    # Batch normalisation has no kernel for fp32 running statistics beside bf16 weights.
    computes_bf16 = precision.bf16 and not any(buffer.is_floating_point() for buffer in model.buffers())
    dtypes = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if computes_bf16 else None,
        reduce_dtype=torch.float64 if are_exact(world, options) else torch.float32,
    )
    offload = CPUOffloadPolicy(pin_memory=world.device.type != "cpu") if options.cpu_offload else OffloadPolicy()
    for unit in [*blocks_of(model), model]:
        fully_shard(unit, mesh=mesh, mp_policy=dtypes, offload_policy=offload)
