"""The cost of measuring: the loop behind `train ddp` compared with the same loop without its measuring.

    python benchmarks/measuring.py [--rounds 31] [--record]

Subclasses here leave out the times of steps and of waits for data and for other ranks, and the lines of metrics.jsonl;
a third loop leaves out the sums of loss and accuracy too. The measuring calls of one step are also timed alone, in a
loop that computes nothing: this shows a share that is too small to be seen in whole steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from results import parser, publish, ratios, spread, table
from rounds import Turn, run, trainer_of

from muster.config import Options
from muster.train import trainer as looping
from muster.train.checkpoint.manager import Progress
from muster.train.distributed.world import World
from muster.train.parallel.strategy import Sums, timed_backward
from muster.train.reporting.metrics import StepTimes
from muster.train.reporting.summary import Log
from muster.train.trainer import Trainer

MEASURED, UNTIMED, BLIND = "as it is", "without times and lines", "without loss and accuracy too"
EMPTY_STEPS = 2000


class NoTimes(StepTimes):
    """Measures nothing."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def step(self) -> None:
        pass

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield


class Unmeasured(Trainer):
    """The loop without lines, and without times of waits."""

    def begin(self) -> None:
        super().begin()
        self.gradients.waits = None

    def line_now(self) -> None:
        return None


class NoSums(Sums):
    """Adds up nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.values += 1

    def add(self, loss: torch.Tensor, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        pass


def build(asked: argparse.Namespace, world: World) -> Mapping[str, Turn]:
    """The contenders, on one rank."""
    options = Options(model=asked.model, image_size=asked.image_size, max_steps=asked.steps).settled()
    log = Log(Path(tempfile.mkdtemp()), 0) if world.main else None
    loops = {
        MEASURED: trainer_of(options, world, log=log),
        UNTIMED: trainer_of(options, world, Unmeasured, times=NoTimes(world.device)),
        BLIND: trainer_of(options, world, Unmeasured, times=NoTimes(world.device)),
    }

    def turn(name: str) -> Turn:
        def train(number: int, num_steps: int) -> None:
            looping.Sums = NoSums if name == BLIND else Sums  # type: ignore[misc]
            loops[name].progress = Progress(epoch=number)
            loops[name].train_epoch()

        return train

    return {name: turn(name) for name in loops}


def empty_steps(times: StepTimes, *, waits: bool) -> float:
    """Seconds of a step that calls `times`, and computes nothing but the sum of one number."""
    weight = torch.ones(1, requires_grad=True)
    times.start()
    started = time.perf_counter()
    for step in range(EMPTY_STEPS):
        with times.waiting():
            pass
        loss = weight.sum()
        if waits:
            timed_backward(loss, times.waits)
        else:
            loss.backward()
        times.step()
        if waits and step % 10 == 0:
            times.recent(64, "images")
    return (time.perf_counter() - started) / EMPTY_STEPS


def calls() -> float:
    """Seconds that the measuring of a step takes, without its line of metrics.jsonl; the median of several times."""
    cpu = torch.device("cpu")
    return statistics.median(
        empty_steps(StepTimes(cpu), waits=True) - empty_steps(NoTimes(cpu), waits=False) for _ in range(7)
    )


def main() -> None:
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.set_defaults(rounds=31)
    options.add_argument("--model", default="resnet18", help="default: %(default)s")
    options.add_argument("--image-size", type=int, default=64, help="default: %(default)s")
    options.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    options.add_argument("--steps", type=int, default=22, help="of each contender in one round (default: %(default)s)")
    asked = options.parse_args()
    seconds = run(build, asked)
    rows = []
    for name, own in seconds.items():
        ratio = ratios(seconds[MEASURED], own)
        middle = statistics.quantiles(ratio, n=4)
        each = [taken / asked.steps * 1000 for taken in own]
        rows.append([name, spread(each, 1), spread(ratio), f"{middle[0]:.3f} to {middle[2]:.3f}"])
    header = ["the loop", "ms a step, median (range)", "as it is against it", "middle half of the ratios"]
    step_s = statistics.median(seconds[MEASURED]) / asked.steps
    taken = calls()
    lines = table(header, rows)
    lines += ["", f"The calls by themselves: {taken * 1e6:.0f} µs a step, {taken / step_s:.3%} of one."]
    title = f"Measuring: {asked.model} at {asked.image_size} px, {asked.ranks} gloo ranks, {asked.rounds} rounds of "
    publish(f"{title}{asked.steps} steps", lines, record=asked.record)


if __name__ == "__main__":
    main()
