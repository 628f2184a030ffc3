"""The bases of all strategies: `Strategy` spreads a model over ranks, `Gradients` computes the gradients of a step.

`Strategy` itself is a single process; subclasses override what is different. `Gradients` computes a step's
micro-batches: their losses, which `Sums` adds up, and their gradients, which parameters and torch's wrappers add up.

In fp32 the order of a sum decides its last bit, and each strategy has an order of its own; early in training, a ResNet
can turn a last bit into another course within ten steps. With `--deterministic` on CPUs gradients are therefore
added up in double precision and rounded once: then 4 ranks, 2 ranks that accumulate 2, and 1 process that accumulates 4
train the same weights, bit for bit.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from muster.config import IN_ONE_PROCESS, Options
from muster.errors import MusterError
from muster.train.distributed.world import World
from muster.train.models import IGNORED, place
from muster.train.optim import Precision
from muster.train.reporting.metrics import Mark, Stopwatch

AUXILIARY_WEIGHT = 0.3
"""Weight of an auxiliary classifier's loss (inception_v3, googlenet), as in the papers that introduced them."""


def loss_of(outputs: Tensor | tuple[Tensor, ...], targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy over all targets, with the auxiliary classifiers of models that have them.

    Args:
        targets: classes (N) or tokens (NT).
        smoothing: the share of each target that is spread evenly over all classes.
    """
    if isinstance(outputs, torch.Tensor):
        return cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
    loss = loss_of(outputs[0], targets, smoothing)
    for logits in outputs[1:]:
        if logits is not None:
            loss = loss + AUXILIARY_WEIGHT * loss_of(logits, targets, smoothing)
    return loss


def predictions_of(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The class with the highest score for each target; the first of equal ones."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    # The same as argmax, which takes six times as long on large bf16 tensors on CPUs.
    return logits.max(-1).indices


class Sums:
    """Loss, hits and targets (images, or tokens to predict), added up on the device.

    Attributes:
        values: [summed loss, hits, targets], float64.
        num_batches: the number of batches added.
        first_bad: the first of them (from 0) whose loss is not finite; -1 for none.
    """

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(3, dtype=torch.float64, device=device)
        self.num_batches = 0
        self.first_bad = torch.full((), -1, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, predictions: Tensor, targets: Tensor) -> None:
        """Adds a batch with the mean `loss` over those of its `targets` (N or NT) that count."""
        num_targets = (targets != IGNORED).sum()
        hits = (predictions == targets).sum()
        # The mean over no target is NaN.
        total = torch.where(num_targets > 0, loss.detach().double() * num_targets, 0.0)
        is_first_bad = ~total.isfinite() & (self.first_bad < 0)
        self.first_bad = torch.where(is_first_bad, self.num_batches, self.first_bad)
        self.num_batches += 1
        self.values += torch.stack((total, hits.double(), num_targets.double()))


class Gradients:
    """Computes the micro-batches of a step, whose gradients add up in the parameters, as torch does by default.

    Args:
        divisor: the loss of a micro-batch is divided by it: the number of micro-batches of a step on this rank, or 1
            where the strategy divides the sum of gradients.

    Attributes:
        autocast: the context in which the model computes forward.
        smoothing: the share of each target that is spread evenly over all classes, in training.
        criterion: (outputs, targets, smoothing) -> the loss.
        predictions: outputs -> the most likely class or token for each target.
        waits: measures how long the end of a backward pass waits for other ranks; None where there is no such wait, or
            there are waits elsewhere too.
    """

    autocast: AbstractContextManager[object] = nullcontext()
    smoothing = 0.0
    criterion: Callable[..., Tensor] = staticmethod(loss_of)
    predictions: Callable[..., Tensor] = staticmethod(predictions_of)
    waits: Stopwatch | None = None

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def loss(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The loss to train on: the mean over `targets`."""
        return self.criterion(outputs, targets, self.smoothing)

    def begin(self, step: int) -> None:
        """Called before each step; `step` of them are done in all."""

    def compute(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        """Computes one micro-batch, forward and backward, and adds its loss to `sums`."""
        with self.autocast:
            outputs = model(inputs)
            loss = self.loss(outputs, targets)
        scaled = loss / self.divisor
        if self.waits is None:
            scaled.backward()
        else:
            timed_backward(scaled, self.waits)
        sums.add(loss, self.predictions(outputs), targets)

    def waits_s(self) -> float | None:
        """Seconds of all counted steps in which this rank waited for others; None where that is not known."""
        return None if self.waits is None else self.waits.total()

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        """Computes a validation batch, and adds its loss to `sums`."""
        outputs = model(inputs)
        sums.add(self.criterion(outputs, targets), self.predictions(outputs), targets)

    def finish(self) -> None:
        """Called after the last micro-batch of a step: completes its gradients where torch's wrappers have not."""

    def check(self) -> None:
        """Raises MusterError, on all ranks, where gradients were damaged; called before evaluations and checkpoints."""

    def report(self) -> dict[str, Any]:
        """What the summary says about how gradients were computed; called on all ranks, after the last step."""
        return {}

    def clip(self, model: nn.Module, largest: float) -> None:
        """Scales all gradients so that their norm, over all ranks that hold parts of them, is `largest` at most."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if torch.are_deterministic_algorithms_enabled() and gradients[0].device.type == "cpu":
            # Each strategy adds up in an order of its own: in double precision that changes no bit of the rounded norm.
            gradients = [gradient.double() for gradient in gradients]
        clip_grads_with_norm_(model.parameters(), largest, self.norm_of_all(get_total_norm(gradients)).float())

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm of the gradients over all ranks, from `norm`, that of this rank's parts."""
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def send_as_one(tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
    """Calls `send` once, on one flat copy of all `tensors`, which it changes in place; copies the result back."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    send(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def timed_backward(loss: Tensor, waits: Stopwatch) -> None:
    """Runs the backward pass from `loss`; `waits` measures how long DistributedDataParallel then waits for buckets.

    Callbacks at its end run in the order in which they were queued: this one at the first gradient, DDP's at the last.
    """
    begins: list[Mark | None] = []

    def at_first_gradient(_: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
        engine.queue_callback(lambda: begins.append(waits.begin()))

    loss.register_hook(at_first_gradient)
    loss.backward()
    waits.end(begins[0] if begins else None)


def are_exact(world: World, options: Options) -> bool:
    """True where gradients are added up in double precision."""
    return options.deterministic and world.device.type == "cpu"


@torch.no_grad()
def hold(held: dict[Tensor, Tensor], parameter: Tensor) -> None:
    """Removes the gradient from `parameter`, and adds it to the sum in `held`, in double precision."""
    assert parameter.grad is not None
    if parameter in held:
        held[parameter] += parameter.grad
    else:
        held[parameter] = parameter.grad.double()
    parameter.grad = None


class ExactGradients(Gradients):
    """Gradients of one step's micro-batches, added up in double precision.

    Attributes:
        num_summed: micro-batches of a step over all ranks: the sum is divided by it.
        held: the sum of each parameter's gradients; `finish` moves its mean into the parameter.
    """

    def __init__(self, model: nn.Module, num_summed: int) -> None:
        super().__init__(1)
        self.num_summed = num_summed
        self.held: dict[Tensor, Tensor] = {}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(partial(hold, self.held))

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the mean over all micro-batches into the parameters."""
        for parameter, total in self.held.items():
            parameter.grad = (total / self.num_summed).to(parameter.dtype)
        self.held.clear()


class Strategy:
    """One process on one device. Subclasses spread the model over ranks; all of `options` are settled.

    The trainer expects of a subclass that, on every rank,

    - parameters and buffers are equal when training begins (`wrap`), and the running statistics of batch normalisation
      are plain buffers of the unwrapped module: the trainer makes them the mean over all ranks before they are used;
    - after the last micro-batch of a step, gradients are the mean over all micro-batches of the global batch
      (`gradients`); before, they may add up on each rank alone (`without_sync`);
    - `Gradients.clip` takes the norm over all ranks that hold parts of the model;
    - one of the ranks that train on the same data reports the loss: the others have `reports_loss` False
      (`assign_data`);
    - `unwrap(model).state_dict()` has the names of the model as it was built, and tensors or DTensors: a checkpoint of
      one strategy is then read by any other.

    Attributes:
        world: of this rank; from `assign_data` on with the part of the data that it trains on.
    """

    def __init__(self, world: World, options: Options) -> None:
        self.world = world
        self.options = options

    def check(self) -> None:
        """Raises MusterError where this strategy can't train in its world. By default it can in any."""

    def assign_data(self) -> World:
        """The world, with the part of the data that this rank trains on: by default one of its own."""
        return self.world

    def notes(self) -> list[str]:
        """What a user should know before it trains, a line each."""
        return []

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` with its initial weights on its devices, wrapped so that the gradients of all ranks are combined."""
        return place(model, self.world.device, precision.layout, self.options.seed)

    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """`optimizer`, before its first step, with the weights that this rank is to update: by default all of them."""
        return optimizer

    def gradients(self, model: nn.Module) -> Gradients:
        """Makes the object that computes micro-batches, and combines their gradients into those of a step."""
        accumulate = self.options.accumulate
        return ExactGradients(model, accumulate) if are_exact(self.world, self.options) else Gradients(accumulate)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that `wrap` was given."""
        return model

    def without_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """A context for micro-batches whose gradients only add up on this rank, until the first one outside of it."""
        return nullcontext()


def load(name: str, world: World, options: Options) -> Strategy:
    """The strategy called `name`, for this rank; a plain `Strategy` if it is for several ranks and there is one.

    Raises:
        MusterError: it can't train in this world, or is for one process, and there are several, each of which would
            train a model of its own.
    """
    if name in IN_ONE_PROCESS and world.world_size > 1:
        raise MusterError(
            f"the strategy {name} is for one process",
            seen=f"WORLD_SIZE={world.world_size}",
            fix="'train ddp' trains one model with all processes; or start one process",
        )
    module = import_module(f"{__package__}.{name}")
    (kind,) = (
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Strategy) and found.__module__ == module.__name__
    )
    strategy = kind(world, options)
    strategy.check()
    is_alone = world.world_size == 1 and world.backend is None
    return Strategy(world, options) if is_alone and name not in IN_ONE_PROCESS else strategy
