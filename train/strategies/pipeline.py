"""Pipeline parallel: the layers are dealt out to neighbouring ranks, and micro-batches pass through them.

Each rank builds its own layers only. With more ranks than `--pipeline-parallel` there are several lines, which train on
different data, and average their gradients as by ddp.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from train.combinations import Pipelines, check_pipeline
from train.models import gpt, place
from train.options import Options
from train.parallel.gradients import Gradients
from train.parallel.stages import StagedGradients
from train.precision import Precision
from train.world import World


def check(world: World, options: Options) -> None:
    """Raises MusterError where the ranks can't be divided into pipelines, or layers and samples into their parts."""
    check_pipeline(options, world.world_size, gpt.shape_of(options.model).num_layers)


def share(world: World, options: Options) -> World:
    """The same data for the ranks of a pipeline, of which the last knows the loss."""
    group, place = divmod(world.rank, size := Pipelines.of(options, world.world_size).size)
    return replace(world, share=(group, world.world_size // size), counts=place == size - 1)


def notes(world: World, options: Options) -> list[str]:
    """How much of a step the ranks wait for each other."""
    if world.backend is None:
        return []
    plan = Pipelines.of(options, world.world_size)
    most = "at most " if options.schedule == "zero-bubble" else ""
    return [f"{plan.size} ranks in a pipeline wait {most}{plan.bubble:.0%} of a step; more --microbatches lessen it"]


def wrap(model: nn.Module, world: World, options: Options, precision: Precision) -> nn.Module:
    """The layers of `model` that are this rank's, and its ends where they are; all of it, in a world of one."""
    assert isinstance(model, gpt.GPT)
    plan = Pipelines.of(options, world.world_size)
    gpt.keep(model, [gpt.stage_of(model.shape, number, plan.num_stages) for number in plan.stages_of(world.rank)])
    return place(model, world.device, torch.preserve_format, options.seed)


def gradients(model: nn.Module, world: World, options: Options) -> Gradients:
    """Computed stage by stage, and averaged over the pipelines."""
    return StagedGradients(model, world, options)


def unwrap(model: nn.Module) -> nn.Module:
    """`model` as it is."""
    return model


def without_sync(model: nn.Module) -> AbstractContextManager[object]:
    """Nothing to hold back: pipelines meet when all micro-batches are through."""
    return nullcontext()
