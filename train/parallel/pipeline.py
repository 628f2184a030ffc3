"""Pipeline parallel: the layers are divided between neighbouring ranks, and micro-batches pass through them.

Each rank has memory for its own layers only. With more ranks than `--pipeline-parallel` there are several pipelines,
which train on different data, and average their gradients as in ddp. Only training uses torch's schedules.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from muster.config import Options
from muster.errors import MusterError
from muster.train.distributed.world import World, open_mesh
from muster.train.models import gpt, place
from muster.train.optim import Precision
from muster.train.parallel.strategy import Gradients, Strategy, Sums, are_exact, hold, send_as_one
from muster.train.reporting.metrics import Stopwatch
from muster.units import plural

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
}


class Pipeline(Strategy):
    """Neighbouring ranks share the layers, and micro-batches pass through them.

    Attributes:
        size: ranks of a pipeline.
        stages_each: stages (groups of layers) of a rank; stage s is on the rank at position s modulo size.
        num_stages: stages of a pipeline, over all its ranks.
        num_microbatches: micro-batches into which a pipeline splits a batch.
        bubble: the share of a step in which a rank waits for others if all stages take equally long (arXiv 2104.04473).
    """

    def __init__(self, world: World, options: Options) -> None:
        super().__init__(world, options)
        self.size = options.pipeline_parallel or world.world_size
        self.stages_each = 2 if options.schedule in ("interleaved", "zero-bubble") else 1
        self.num_stages = self.size * self.stages_each
        self.num_microbatches = options.microbatches or 2 * self.size
        self.bubble = (self.size - 1) / (self.stages_each * self.num_microbatches + self.size - 1)

    @property
    def own_stages(self) -> list[int]:
        """The stages of this rank."""
        return list(range(self.world.rank % self.size, self.num_stages, self.size))

    def check(self) -> None:
        """Raises MusterError where the ranks, the layers or the batch can't be divided as the pipelines need."""
        world, options, size, parts = self.world, self.options, self.size, self.num_microbatches
        world_size, num_layers = world.world_size, gpt.shape_of(options.model).num_layers
        options_seen = f"--model={options.model} --pipeline-parallel={size} --schedule={options.schedule}"
        seen = f"{plural(world_size, 'process')}, {options_seen}"
        if world_size % size:
            raise MusterError(
                f"{plural(world_size, 'process')} can't form pipelines of {size}",
                seen=seen,
                fix="--pipeline-parallel=N, where N divides the processes, or leave it out",
            )
        if world_size == 1 and world.backend is None:
            return  # it trains as single
        if self.num_stages > num_layers:
            raise MusterError(
                f"{num_layers} layers are too few for {self.num_stages} stages",
                seen=seen,
                fix="a smaller --pipeline-parallel, --schedule=1f1b, fewer processes, or a larger model",
            )
        fits = options.batch_size % parts == 0
        if options.schedule == "1f1b":
            fits = fits and (parts == 1 or parts >= size)
        if self.stages_each > 1:
            fits = fits and parts % max(1, parts // size) == 0
        if not fits:
            raise MusterError(
                f"a batch of {options.batch_size} can't be split into {parts} parts for {options.schedule}",
                seen=f"--batch-size={options.batch_size} --microbatches={parts}, pipelines of {size} ranks",
                fix=f"--batch-size={2 * size} or a multiple of it, without --microbatches",
            )

    def assign_data(self) -> World:
        """The world, with the same data for all ranks of a pipeline, the last of which reports the loss."""
        world, size = self.world, self.size
        group, position = divmod(world.rank, size)
        return replace(world, dp=(group, world.world_size // size), reports_loss=position == size - 1)

    def notes(self) -> list[str]:
        """The share of a step in which the ranks wait for each other."""
        most = "at most " if self.options.schedule == "zero-bubble" else ""
        share = f"{most}{self.bubble:.0%}"
        return [f"the {self.size} ranks of a pipeline wait {share} of a step; more --microbatches reduce this"]

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` with the layers, and the ends, of this rank's stages only; all of it, in a world of one."""
        assert isinstance(model, gpt.GPT)
        gpt.keep_stages(model, self.own_stages, self.num_stages)
        return place(model, self.world.device, torch.preserve_format, self.options.seed)

    def gradients(self, model: nn.Module) -> Gradients:
        """Gradients that are computed stage by stage, and averaged over the pipelines."""
        return StagedGradients(model, self)


class TimedStage(PipelineStage):
    """A stage that measures how long it computes, and calls `computed` when it has gradients of a micro-batch."""

    def __init__(self, *args: Any, stage_time: Stopwatch, computed: Callable[[nn.Module], None], **group: Any) -> None:
        super().__init__(*args, **group)
        self.stage_time = stage_time
        self.computed = computed

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The first messages to neighbours in torch 2.10; none for a rank alone: it can't send to itself over gloo."""
        torchs: Any = super()
        return [] if self.group_size == 1 else torchs._get_init_p2p_neighbors_ops()

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.stage_time.running():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.stage_time.running():
            super().backward_one_chunk(*args, **kwargs)
            self.computed(self.submod)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """The part of the backward pass that zero bubble leaves for later."""
        with self.stage_time.running():
            super().backward_weight_one_chunk(*args, **kwargs)
            self.computed(self.submod)


class StagedGradients(Gradients):
    """Passes micro-batches through the stages of a pipeline, and averages the gradients of several pipelines."""

    def __init__(self, model: nn.Module, strategy: Pipeline) -> None:
        super().__init__(1)
        assert isinstance(model, gpt.GPT)
        world, options = strategy.world, strategy.options
        self.model = model
        self.world = world
        self.is_exact = are_exact(world, options)
        self.strategy = strategy
        self.position = world.rank % strategy.size
        mesh = open_mesh(world, data=world.dp_size, stage=strategy.size)
        self.pipeline_group, self.data_group = mesh.get_group("stage"), mesh.get_group("data")
        numbers, count = strategy.own_stages, strategy.num_stages
        self.parts = {number: gpt.stage_of(model, number, count) for number in numbers}
        self.held: dict[Tensor, Tensor] = {}
        self.stage_time, self.schedule_time = Stopwatch(world.device), Stopwatch(world.device)
        options_of_all = {"group": self.pipeline_group, "stage_time": self.stage_time, "computed": self.hold_part}
        stages = [TimedStage(self.parts[n], n, count, world.device, **options_of_all) for n in numbers]
        # Gradients are divided once, at the end, not after each run of the schedule.
        how = {"loss_fn": self.loss, "scale_grads": False}
        # One micro-batch takes the same way in all schedules, but torch's 1F1B wants as many as there are ranks.
        num_microbatches = strategy.num_microbatches
        is_naive = options.schedule == "1f1b" and num_microbatches == 1
        schedule = SCHEDULES["gpipe" if is_naive else options.schedule]
        try:
            self.schedule = schedule(stages[0] if strategy.stages_each == 1 else stages, num_microbatches, **how)
        except ValueError as error:
            # torch 2.10's GPipe wants as many micro-batches as stages, 2.15's does not.
            raise MusterError(
                f"this torch does not support this schedule: {' '.join(str(error).split())}",
                seen=f"torch {torch.__version__} --schedule={options.schedule} --microbatches={num_microbatches}",
                fix=f"--microbatches={strategy.num_stages}",
            ) from error
        self.num_summed = num_microbatches * options.accumulate * world.dp_size

    def begin(self, step: int) -> None:
        # Not in the first step: there torch also finds out which shapes pass from stage to stage.
        self.stage_time.is_counting = self.schedule_time.is_counting = self.world.waits.is_counting

    def compute(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        losses: list[Tensor] = []
        first = (inputs,) if self.position == 0 else ()
        with self.autocast, self.schedule_time.running():
            if self.world.reports_loss:
                outputs = self.schedule.step(*first, target=targets, losses=losses)
                sums.add(torch.stack(losses).mean(), self.predictions(outputs), targets)
            else:
                self.schedule.step(*first)

    def hold_part(self, part: nn.Module) -> None:
        """Moves the gradients that a micro-batch has left in `part` into the sums in `held`, if these are exact."""
        if not self.is_exact:
            return  # parameters add up gradients by themselves
        for parameter in part.parameters():
            if parameter.grad is not None:
                hold(self.held, parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the mean over all micro-batches of all pipelines into the parameters; rounds exact sums here, once."""
        gradients = {p: g for p in self.model.parameters() if (g := self.held.pop(p, p.grad)) is not None}
        if self.world.dp_size > 1:
            with self.world.waits.running():
                send_as_one(list(gradients.values()), lambda flat: dist.all_reduce(flat, group=self.data_group))
        for parameter, gradient in gradients.items():
            parameter.grad = (gradient / self.num_summed).to(parameter.dtype)

    def waits_s(self) -> float | None:
        """Seconds of the schedules outside of stages, and of waits between pipelines; None where none were measured."""
        schedule_s = self.schedule_time.total()
        return schedule_s - self.stage_time.total() + self.world.waits.total() if schedule_s else None

    def report(self) -> dict[str, Any]:
        """The measured share of time in which the ranks wait for each other, and the ideal one, of equal stages."""
        stage_s, schedule_s = self.stage_time.total(), self.schedule_time.total()
        shares = self.world.gather(1 - stage_s / schedule_s if schedule_s else None)
        measured = None if None in shares else round(sum(shares) / len(shares), 4)
        return {"bubble_share": measured, "ideal_bubble_share": round(self.strategy.bubble, 4)}

    def norm_of_all(self, norm: Tensor) -> Tensor:
        squared = norm.double().square()
        dist.all_reduce(squared, group=self.pipeline_group)
        return squared.sqrt().to(norm.dtype)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        """Passes one batch, of any size, from the first stage to the last, which adds its loss to `sums`."""
        x = inputs
        for number in range(self.strategy.num_stages):
            here, there = number % self.strategy.size, (number + 1) % self.strategy.size
            if self.position == here:
                x = self.parts[number](x)
                if number + 1 == self.strategy.num_stages:
                    sums.add(self.criterion(x, targets), self.predictions(x), targets)
                elif there != here:
                    dist.send(x.float(), dist.get_global_rank(self.pipeline_group, there), group=self.pipeline_group)
            elif self.position == there and number + 1 < self.strategy.num_stages:
                x = torch.empty((*inputs.shape, self.model.shape.dim), device=self.world.device)
                dist.recv(x, dist.get_global_rank(self.pipeline_group, here), group=self.pipeline_group)
