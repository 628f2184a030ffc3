"""Images a second of `train ddp` against the plain loop of PyTorch's DDP tutorial.

    python benchmarks/trainer.py [--model resnet18] [--image-size 64] [--rounds 15] [--record]

Both train the same model on the same digits, in the same processes, one after the other in each round; the order
turns round every other time. What counts is the ratio within a round, which a change in the machine's other load
leaves alone. The plain loop is made after the tutorial's description ("Multi GPU training with DDP"): DDP(model),
DistributedSampler, DataLoader, SGD, fp32, zero_grad, backward, step.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from results import ROOT, parser, publish, ratios, spread, table
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(ROOT))

from train import data, models, optimizer
from train.data.loader import open_batches
from train.display import Display
from train.loop import Loop, Progress
from train.metrics import StepTimes
from train.options import Options
from train.precision import choose_precision
from train.state import Trained
from train.strategies import load
from train.world import World

PLAIN, EQUAL, DEFAULTS = "plain DDP loop", "train ddp, fp32", "train ddp, defaults"

Train = Callable[[int, int], None]
"""Trains: (number of the round, steps)."""


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--model", default="resnet18", help="default: %(default)s")
    options.add_argument("--image-size", type=int, default=64, help="default: %(default)s")
    options.add_argument("--batch-size", type=int, default=32, help="of one rank (default: %(default)s)")
    options.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    options.add_argument("--steps", type=int, default=11, help="of each contender in one round (default: %(default)s)")
    return options.parse_args()


def plain_loop(options: Options, world: World) -> Train:
    """The loop of the tutorial."""
    source = data.open_source(options)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (source.mean, source.std))
    images: Any = source.train
    dataset = TensorDataset((images.images.float() / 255 - mean) / std, images.labels)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=options.batch_size, shuffle=False, sampler=sampler)
    model = DistributedDataParallel(models.build(options, source.num_classes, source.size))
    steps = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
    )

    def train(number: int, num_steps: int) -> None:
        sampler.set_epoch(number)
        for done, (batch, targets) in enumerate(loader):
            if done == num_steps:
                break
            steps.zero_grad()
            loss = cross_entropy(model(batch), targets)
            loss.backward()
            steps.step()

    return train


def our_loop(options: Options, world: World) -> Train:
    """The loop behind `train ddp`, its measuring included."""
    strategy = load("ddp", world)
    source = data.open_source(options)
    train_batches, valid_batches = open_batches(source, options, world)
    precision = choose_precision(options, world.device)
    model = models.build(options, source.num_classes, source.size)
    model = strategy.wrap(model, world, options, precision)
    loop = Loop(
        strategy=strategy,
        model=model,
        trained=Trained(model=strategy.unwrap(model), optimizer=optimizer.build(options, model, fused=precision.fused)),
        train=train_batches,
        valid=valid_batches,
        world=world,
        options=options,
        precision=precision,
        display=Display(enabled=False, epochs=1, global_batch=1),
        times=StepTimes(world.device),
        log=lambda record: None,
        save=lambda progress, own: None,
    )

    def train(number: int, num_steps: int) -> None:
        loop.progress = Progress(epoch=number)
        loop.train_epoch()

    return train


def compete(rank: int, asked: argparse.Namespace, store: str, result: str) -> None:
    """One rank: all rounds of all contenders; rank 0 saves the seconds of each."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // asked.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=asked.ranks)
    world = World(rank=rank, local_rank=rank, world_size=asked.ranks, backend="gloo")
    common: dict[str, Any] = {
        "model": asked.model,
        "image_size": asked.image_size,
        "batch_size": asked.batch_size,
        "max_steps": asked.steps,
    }
    equal = Options(bf16=False, channels_last=False, fused=False, **common).settled()
    contenders: dict[str, Train] = {}
    for name, build, options in [
        (PLAIN, plain_loop, equal),
        (EQUAL, our_loop, equal),
        (DEFAULTS, our_loop, Options(**common).settled()),
    ]:
        torch.manual_seed(0)
        contenders[name] = build(options, world)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, asked.rounds):  # the first round warms up and does not count
        names = list(contenders) if number % 2 else list(reversed(contenders))
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            contenders[name](number + 1, asked.steps)
            dist.barrier()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
        if rank == 0:
            print(f"\rround {number + 1}/{asked.rounds}", end="", file=sys.stderr, flush=True)
    if rank == 0:
        print(file=sys.stderr)
        torch.save(seconds, result)
    dist.destroy_process_group()


def lines_of(seconds: dict[str, list[float]], num_images: int) -> list[str]:
    """The table of the result: for each contender its rate, and its ratio to the plain loop round by round."""
    rows = []
    for name, own in seconds.items():
        rates = [num_images / taken for taken in own]
        ratio = sorted(ratios(seconds[PLAIN], own))
        middle = statistics.quantiles(ratio, n=4) if len(ratio) > 1 else ratio * 3
        rows.append([name, spread(rates, 1), spread(ratio), f"{middle[0]:.3f} to {middle[2]:.3f}"])
    return table(["contender", "images/s, median (range)", "ratio, median (range)", "middle half of the ratios"], rows)


def main() -> None:
    asked = arguments()
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result.pt")
        torch.multiprocessing.spawn(
            compete, args=(asked, os.path.join(folder, "store"), result), nprocs=asked.ranks, join=True
        )
        seconds = torch.load(result, weights_only=True)
    title = (
        f"Trainer: {asked.model} at {asked.image_size} px, {asked.ranks} gloo ranks, batch {asked.batch_size} a rank, "
        f"{asked.rounds} rounds of {asked.steps} steps"
    )
    lines = lines_of(seconds, asked.steps * asked.batch_size * asked.ranks)
    busy = f"Load average at the end {os.getloadavg()[0]:.1f}; the contenders themselves are {asked.ranks} of it."
    publish(title, [*lines, "", busy], record=asked.record)


if __name__ == "__main__":
    main()
