"""What a checkpoint holds: how far a run is, and the tensors that training changes, by name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from muster.config import Options
from muster.train import checkpoint
from muster.train.checkpoint import State

Statistics = dict[str, Tensor]
"""Running statistics of batch normalisation, by name."""


@dataclass
class Progress:
    """How far a run is: what a checkpoint holds besides the tensors.

    Attributes:
        epoch: epochs that are complete.
        sample: samples of the epoch under way that are used already: all of them where it is yet to be validated.
        step: steps of the optimizer in all.
        sums: summed loss, hits and targets of the epoch under way, over all ranks.
        history: one record an epoch.
    """

    epoch: int = 0
    sample: int = 0
    step: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    best_accuracy: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def is_complete(progress: Progress, options: Options) -> bool:
    """True once `--epochs` or `--max-steps` are reached, and the result is validated."""
    if progress.epoch >= options.epochs:
        return True
    if options.max_steps is None or progress.step < options.max_steps:
        return False
    # A warning may have come between the last step and the end of the validation.
    is_validated = bool(progress.history) and progress.history[-1]["step"] == progress.step
    return is_validated or progress.step > options.max_steps


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What training changes.

    Attributes:
        model: as its strategy has spread it, without the strategy's wrapper.
    """

    model: nn.Module
    optimizer: Optimizer

    def parameters(self) -> dict[str, Tensor]:
        """What the optimizer trains, by name, in its order."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {names[parameter]: parameter for group in self.optimizer.param_groups for parameter in group["params"]}

    def statistics(self) -> Statistics:
        """The running statistics, which differ from rank to rank while an epoch is under way."""
        return {name: buffer for name, buffer in self.model.named_buffers() if buffer.is_floating_point()}

    def state(self) -> State:
        """Weights, buffers and moments; of a model that is cut over ranks, this rank's parts."""
        weights = self.model.state_dict()  # first: a model that is cut lets go of what it has gathered
        moments = {
            name: {key: value for key, value in self.optimizer.state[parameter].items() if isinstance(value, Tensor)}
            for name, parameter in self.parameters().items()
        }
        return {"model": weights, "optimizer": {"state": moments}}

    def fill(self, path: Path, index: State, rank: int, group: dist.ProcessGroup | None) -> None:
        """Loads the checkpoint at `path`; the optimizer keeps the hyperparameters it has.

        A rank's own statistics are taken where the checkpoint has them; else they are the mean over the ranks.

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
        own = {
            name: torch.empty_like(tensor)
            for name, tensor in self.statistics().items()
            if f"statistics/{rank}/{name}" in index["tensors"]
        }
        _, tensors = checkpoint.split({**wanted, "statistics": {str(rank): own}})
        checkpoint.load_into(path, index, {name: tensor.detach() for name, tensor in tensors.items()}, group)
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
