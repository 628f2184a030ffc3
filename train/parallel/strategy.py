"""What a strategy is: how one model becomes one model on many ranks, and how one step's gradients come together.

`Strategy` itself is a single process; subclasses override what is different. `Gradients` computes a step's
micro-batches: their losses, which `Sums` adds up, and their gradients, which parameters and torch's wrappers add up.

In fp32 the order of a sum decides its last bit, and each strategy has an order of its own; a ResNet at its start can
turn a last bit into another path within ten steps. With `--deterministic` on CPUs gradients are therefore added up in
double precision and rounded once: then 4 ranks, 2 ranks that accumulate 2, and 1 process that accumulates 4 train the
same weights, bit for bit.
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
        smoothing: the share of each target that goes to all classes alike.
    """
    if isinstance(outputs, torch.Tensor):
        return cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
    loss = loss_of(outputs[0], targets, smoothing)
    for logits in outputs[1:]:
        if logits is not None:
            loss = loss + AUXILIARY_WEIGHT * loss_of(logits, targets, smoothing)
    return loss


def predictions_of(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The class with the highest score for each target; of several the first one."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    # As argmax, which takes six times as long over many bf16 numbers on CPUs.
    return logits.max(-1).indices


class Sums:
    """Loss, hits and targets (images, or tokens to predict), added up on the device.

    Attributes:
        values: [summed loss, hits, targets], float64.
        num_batches: how many were added.
        first_bad: which of them (from 0) was the first whose loss is no number; -1 for none.
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
        # The mean over no target is no number.
        total = torch.where(num_targets > 0, loss.detach().double() * num_targets, 0.0)
        is_first_bad = ~total.isfinite() & (self.first_bad < 0)
        self.first_bad = torch.where(is_first_bad, self.num_batches, self.first_bad)
        self.num_batches += 1
        self.values += torch.stack((total, hits.double(), num_targets.double()))


class Gradients:
    """How the trainer computes one step's micro-batches: here as the parameters add up gradients by themselves.

    Args:
        divisor: what the loss of a micro-batch is divided by: the micro-batches of a step on this rank, or 1 where
            the strategy divides the sum of gradients.

    Attributes:
        autocast: the context in which the model computes forward.
        smoothing: the share of each target that goes to all classes alike, in training.
        criterion: (outputs, targets, smoothing) -> what is trained on.
        predictions: outputs -> the class or token that is the likeliest for each target.
        waits: takes how long the end of a backward pass waits for other ranks; None where it is no such wait, or not
            only there.
    """

    autocast: AbstractContextManager[object] = nullcontext()
    smoothing = 0.0
    criterion: Callable[..., Tensor] = staticmethod(loss_of)
    predictions: Callable[..., Tensor] = staticmethod(predictions_of)
    waits: Stopwatch | None = None

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def loss(self, outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """What is trained on: the mean over `targets`."""
        return self.criterion(outputs, targets, self.smoothing)

    def begin(self, step: int) -> None:
        """Called before each step; `step` of them are done in all."""

    def compute(self, model: nn.Module, inputs: Tensor, targets: Tensor, sums: Sums) -> None:
        """One micro-batch, forth and back; its loss goes into `sums`."""
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
        """The loss of a batch, into `sums`."""
        outputs = model(inputs)
        sums.add(self.criterion(outputs, targets), self.predictions(outputs), targets)

    def finish(self) -> None:
        """Called after the last micro-batch, when the strategy has done its part: the gradients are complete then."""

    def check(self) -> None:
        """Raises MusterError, on all ranks, where gradients were damaged; called before weights are looked at."""

    def report(self) -> dict[str, Any]:
        """What the summary has of how they were computed; called on all ranks, after the last step."""
        return {}

    def clip(self, model: nn.Module, largest: float) -> None:
        """Shortens all gradients together to the norm `largest`, over all ranks that hold parts of them."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if torch.are_deterministic_algorithms_enabled() and gradients[0].device.type == "cpu":
            # Each strategy adds up in an order of its own: in double precision that changes no bit of the rounded norm.
            gradients = [gradient.double() for gradient in gradients]
        clip_grads_with_norm_(model.parameters(), largest, self.norm_of_all(get_total_norm(gradients)).float())

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm of the gradients on all ranks, of which `norm` is that of this rank's parts."""
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def send_as_one(tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
    """Calls `send` once, on one flat copy of all `tensors` that it changes in place, and copies the result back."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    send(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def timed_backward(loss: Tensor, waits: Stopwatch) -> None:
    """The backward pass from `loss`; `waits` counts the time that DistributedDataParallel waits for buckets at its end.

    Callbacks of that end run in the order in which they were queued: this one at the first gradient, DDP's at the last.
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
    """Takes the gradient out of `parameter`, and adds it to what is `held`, in double precision."""
    assert parameter.grad is not None
    if parameter in held:
        held[parameter] += parameter.grad
    else:
        held[parameter] = parameter.grad.double()
    parameter.grad = None


class ExactGradients(Gradients):
    """Gradients of one step's micro-batches, added up in double precision.

    Attributes:
        num_parts: micro-batches of a step over all ranks: the sum is divided by it.
        held: the sum of each parameter's gradients, which the parameter itself gets at the end of the step.
    """

    def __init__(self, model: nn.Module, num_parts: int) -> None:
        super().__init__(1)
        self.num_parts = num_parts
        self.held: dict[Tensor, Tensor] = {}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(partial(hold, self.held))

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the mean over all micro-batches into the parameters."""
        for parameter, total in self.held.items():
            parameter.grad = (total / self.num_parts).to(parameter.dtype)
        self.held.clear()


class Strategy:
    """One process on one device. Subclasses spread the model over ranks; all of `options` are settled.

    Of a subclass the trainer expects that, on every rank,

    - parameters and buffers are equal when training begins (`wrap`), and the running statistics of batch normalisation
      are plain buffers of the unwrapped module: the trainer makes them the mean over all ranks before they are used;
    - gradients are those of the whole global batch, the mean over all micro-batches (`gradients`), after the last
      micro-batch of a step; those of the others may only add up (`without_sync`);
    - `Gradients.clip` takes the norm over all ranks that hold parts of the model;
    - the loss is known to one rank of those that train on the same data: the others have `reports_loss` False
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
        """Raises MusterError where the world is not one that this strategy can train in. By default any will do."""

    def assign_data(self) -> World:
        """The world, with the part of the data that this rank trains on: by default one of its own."""
        return self.world

    def notes(self) -> list[str]:
        """What a user should know before it trains, a line each."""
        return []

    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        """`model` with its first weights on its devices, and with what brings the gradients of all ranks together."""
        return place(model, self.world.device, precision.layout, self.options.seed)

    def divide(self, optimizer: Optimizer) -> Optimizer:
        """`optimizer`, before its first step, with what this rank is to do of it: by default all that it holds."""
        return optimizer

    def gradients(self, model: nn.Module) -> Gradients:
        """How micro-batches are computed, and their gradients become those of a step."""
        accumulate = self.options.accumulate
        return ExactGradients(model, accumulate) if are_exact(self.world, self.options) else Gradients(accumulate)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module that `wrap` was given."""
        return model

    def without_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """A context for micro-batches whose gradients only add up on this rank, until the first one outside of it."""
        return nullcontext()


def load(name: str, world: World, options: Options) -> Strategy:
    """The strategy called `name`, for this rank; where it is for several and there is one alone, as `single`.

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
