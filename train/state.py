"""A training's tensors by name, and the checkpoints of a run that is under way."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from train import checkpoint
from train.checkpoint import State
from train.ema import MovingAverage
from train.errors import MusterError
from train.faults import SharedFault
from train.vitals import CHECKPOINT
from train.world import World, open_side_group

WAIT_S = 60
"""Seconds that a run which fails waits for the checkpoint it has begun."""


Statistics = dict[str, Tensor]
"""Running statistics of batch normalisation, by name."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training changes.

    Attributes:
        model: as its strategy has spread it, without the strategy's wrapper.
        average: of the model's weights; None without `--ema`.
    """

    model: nn.Module
    optimizer: Optimizer
    average: MovingAverage | None = None

    def parameters(self) -> dict[str, Tensor]:
        """What the optimizer trains, by name, in its order."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[parameter]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}

    def statistics(self) -> Statistics:
        """The running statistics, which differ from rank to rank while an epoch is under way, and averages of them."""
        kept = {name: buffer for name, buffer in self.model.named_buffers() if buffer.is_floating_point()}
        averaged = {} if self.average is None else {f"ema {name}": self.average.state[name] for name in kept}
        return kept | averaged

    def state(self) -> State:
        """Weights, buffers, moments and averages; of a model that is cut over ranks, this rank's parts."""
        weights = self.model.state_dict()  # first: a model that is cut lets go of what it has gathered
        moments = {
            name: {key: value for key, value in self.optimizer.state[parameter].items() if isinstance(value, Tensor)}
            for name, parameter in self.parameters().items()
        }
        averages = {} if self.average is None else {"ema": dict(self.average.state)}
        return {"model": weights, "optimizer": {"state": moments}, **averages}

    def fill(self, path: Path, index: State, rank: int, group: dist.ProcessGroup | None) -> None:
        """Loads the checkpoint at `path`; the optimizer keeps the hyperparameters it has.

        An average that the checkpoint has not begins with its weights. A rank's own statistics are taken where the
        checkpoint has them; else they are the mean over the ranks.

        Raises:
            MusterError: on all ranks, where the checkpoint is damaged.
        """
        parameters = self.parameters()
        moments: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        for place, entry in index["tensors"].items():
            kind, _, rest = place.partition("/state/")
            name, _, key = rest.rpartition("/")
            if kind == "optimizer" and name in parameters:
                like = parameters[name]
                # Of the weight's own shape, and cut as it is; or a number, such as that of Adam's steps.
                whole = list(like.shape) == entry["shape"]
                moments[name][key] = torch.zeros_like(like) if whole else torch.zeros(entry["shape"])
        wanted: State = {"model": self.model.state_dict(), "optimizer": {"state": moments}}
        has_average = any(place.startswith("ema/") for place in index["tensors"])
        if self.average is not None and has_average:
            wanted["ema"] = self.average.state
        own = {
            name: torch.empty_like(tensor)
            for name, tensor in self.statistics().items()
            if f"statistics/{rank}/{name}" in index["tensors"]
        }
        _, tensors = checkpoint.split({**wanted, "statistics": {str(rank): own}})
        checkpoint.load_into(path, index, {name: tensor.detach() for name, tensor in tensors.items()}, group)
        if self.average is not None and not has_average:
            self.average.begin()
        for name, tensor in self.statistics().items():
            tensor.copy_(own.get(name, tensor))
        numbers = {name: number for number, name in enumerate(parameters)}
        state = {numbers[name]: values for name, values in moments.items() if values}
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def misfit(index: State, model: nn.Module) -> str | None:
    """Why the checkpoint's weights are not those of `model`; None if they are."""
    own = {f"model/{name}": list(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = {name: entry["shape"] for name, entry in index["tensors"].items() if name.startswith("model/")}
    for name in sorted(own if getattr(model, "is_part", False) else own | saved):
        if own.get(name) != saved.get(name):
            return f"{name.partition('/')[2]} is {saved.get(name, 'missing')} there, and {own.get(name, 'none')} here"
    return None


class Keeper:
    """Writes the checkpoints of a run, on all ranks together.

    Args:
        keep: how many stay.
        in_background: the ranks go on while they write; a failure is known at the next checkpoint, or at the end.

    Attributes:
        told: is called for each checkpoint that is complete, in another thread, with its step and the seconds it took.
    """

    def __init__(self, run: Path, world: World, *, keep: int, in_background: bool) -> None:
        self.run = run
        self.keep = keep
        self.in_background = in_background
        self.vitals = world.vitals
        # A group of its own: what the ranks say to each other in the background must not mix with the training's.
        self.group = open_side_group(world)
        self.under_way: Future[Any] | None = None
        self.step = 0
        self.told: Callable[[int, float], None] = lambda step, seconds: None

    def save(self, state: State, step: int) -> None:
        """Begins a checkpoint of `state`, which may change as soon as this returns.

        Raises:
            MusterError: on all ranks, where this one, or the one that was begun before, could not be written.
        """
        self.vitals.at(CHECKPOINT)
        self.wait()
        self.step, started = step, time.perf_counter()
        plain, tensors = checkpoint.split(state)
        writer = checkpoint.writer(self.run, plain, step, self.keep)
        begun: Any = async_save(tensors, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
        ended: Future[Any] = Future()
        begun.add_done_callback(lambda future: self._end(future, ended, time.perf_counter() - started))
        self.under_way = ended
        if not self.in_background:
            self.wait()

    def _end(self, begun: Future[Any], ended: Future[Any], seconds: float) -> None:
        """Tells of what was begun, before anybody who waits for it goes on."""
        error = begun.exception()
        if error is not None:
            ended.set_exception(error)
            return
        try:
            self.told(self.step, seconds)
        finally:
            ended.set_result(None)

    def wait(self, limit_s: float | None = None) -> None:
        """Returns when what was begun is complete.

        Raises:
            MusterError: on all ranks, where it could not be written.
        """
        under_way, self.under_way = self.under_way, None
        if under_way is None:
            return
        try:
            under_way.result(limit_s)
        except CheckpointException as error:
            told = checkpoint.not_written(self.run, self.step, error)
            raise SharedFault(told.wrong, seen=told.seen, fix=told.fix, code=told.code) from error

    def close(self) -> None:
        """Gives what was begun a while to complete, where the run ends for another reason."""
        with suppress(MusterError, RuntimeError, TimeoutError):  # that reason is what is told
            self.wait(WAIT_S)
