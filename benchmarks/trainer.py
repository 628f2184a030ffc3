"""Images or tokens per second of `train ddp`, compared with the loops that users would otherwise choose.

    python benchmarks/trainer.py [--workload resnet18-64 | resnet50-224 | gpt] [--rounds 15] [--record]

All contenders train the same model on the same data, one after the other in each round; each round begins with the
next contender. Ours have processes of their own, which wait while the others' compute. The result is the ratio within a
round, as a change in the machine's other load affects both rates alike. The others' loops are in benchmarks/contenders,
with their own settings; ours run with all of their measuring.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from contenders import OF_IMAGES, OF_TOKENS, Train, Work, build as build_contender
from results import middle, parser, publish, ratios, spread, table
from rounds import trainer_of

from muster.config import Options
from muster.train import data, models
from muster.train.checkpoint.manager import Progress
from muster.train.data.source import Source
from muster.train.distributed.world import World
from muster.train.models.gpt import shape_of
from muster.train.trainer import choose_kernels

EQUAL, BARE, DEFAULTS = "train ddp, fp32", "train ddp, fp32, bare", "train ddp, defaults"
OURS = {EQUAL: {"bf16": False}, BARE: {"bf16": False, "channels_last": False, "fused": False}, DEFAULTS: {}}
"""Ours: in fp32; in fp32 without NHWC and fused kernels, which no other uses by default; with our defaults."""

WANTED_EQUAL, WANTED_DEFAULTS = 1.0, 1.3
NUM_TOKENS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how long a round is: a few seconds for each contender."""

    model: str
    batch_size: int
    steps: int
    data: str
    image_size: int | None = None
    others: tuple[tuple[str, Any], ...] = ()


WORKLOADS = {
    "resnet18-64": Workload(model="resnet18", image_size=64, batch_size=32, steps=6, data="digits"),
    "resnet50-224": Workload(model="resnet50", image_size=224, batch_size=8, steps=1, data="synthetic"),
    # nanoGPT clips its gradients by default, so ours are clipped too.
    "gpt": Workload(model="gpt-small", batch_size=4, steps=4, data="tokens", others=(("clip_norm", 1.0),)),
}


def arguments() -> argparse.Namespace:
    """The options of the command line; those that are left out have the workload's values."""
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--workload", choices=WORKLOADS, default="resnet18-64", help="default: %(default)s")
    options.add_argument("--model", help="another one")
    options.add_argument("--image-size", type=int, help="pixels a side")
    options.add_argument("--vocab-size", type=int, help="different tokens")
    options.add_argument("--batch-size", type=int, help="of one rank")
    options.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    options.add_argument("--steps", type=int, help="of each contender in one round")
    asked = options.parse_args()
    workload = WORKLOADS[asked.workload]
    for name in ("model", "image_size", "batch_size", "steps"):
        if getattr(asked, name) is None:
            setattr(asked, name, getattr(workload, name))
    return asked


def options_of(asked: argparse.Namespace, tokens: str, own: dict[str, Any]) -> Options:
    """The trainer's options: those of the workload, and `own`."""
    workload = WORKLOADS[asked.workload]
    name = f"tokens:{tokens}" if workload.data == "tokens" else workload.data
    common = {"model": asked.model, "image_size": asked.image_size, "vocab_size": asked.vocab_size, "data": name}
    sizes = {"batch_size": asked.batch_size, "max_steps": asked.steps, "num_samples": 4096}
    return Options(**common, **sizes, **dict(workload.others), **own).settled()


def work_of(options: Options, source: Source, rank: int, ranks: int) -> Work:
    """The model, and this rank's part of the data, for the contenders."""
    train: Any = source.train
    common: dict[str, Any] = {
        "model": options.model,
        "build": lambda: fresh(options, source),
        "size": source.size,
        "num_classes": source.num_classes,
        "batch_size": options.batch_size,
    }
    if source.unit == "tokens":
        shape = shape_of(options.model)
        return Work(**common, tokens_N=train.tokens, shape=(shape.num_layers, shape.num_heads, shape.dim))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (source.mean, source.std))
    images, labels = train.images[rank::ranks], train.labels[rank::ranks]
    times = max(1, -(-options.batch_size // len(labels)))  # few images are repeated until they fill a batch
    images = ((images.float() / 255 - mean) / std).repeat(times, 1, 1, 1)
    return Work(**common, images_NCHW=images, labels_N=labels.repeat(times))


def fresh(options: Options, source: Source) -> torch.nn.Module:
    """The model with its first weights."""
    torch.manual_seed(0)
    model = models.build(options, source.num_classes, source.size)
    return models.place(model, torch.device("cpu"), torch.preserve_format, options.seed)


def our_loop(options: Options, world: World) -> Train:
    """The loop behind `train ddp`, its data and its measuring included."""
    loop = trainer_of(options, world)

    def train(number: int, num_steps: int) -> None:
        loop.progress = Progress(epoch=number)
        loop.train_epoch()

    return train


def contenders_of(asked: argparse.Namespace, tokens: str, world: World, *, ours: bool) -> dict[str, Train]:
    """The contenders of one team, ready to train."""
    options = options_of(asked, tokens, OURS[EQUAL])
    contenders: dict[str, Train] = {}
    if ours:
        choose_kernels(options, world)
        for name, own in OURS.items():
            contenders[name] = our_loop(options_of(asked, tokens, own), world)
    else:
        work = work_of(options, data.open_source(options), world.rank, asked.ranks)
        for name, module in (OF_TOKENS if options.predicts_tokens else OF_IMAGES).items():
            torch.manual_seed(0)
            contenders[name] = build_contender(module, work)
    return contenders


def compete(place: int, asked: argparse.Namespace, folder: str, turns: Barrier) -> None:
    """One rank of one of the two teams, in all rounds; the team's rank 0 saves the seconds, and the CPU seconds of all.

    The teams take turns. Each has its own processes, since our trainer sets how its process handles memory.
    """
    team, rank = divmod(place, asked.ranks)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // asked.ranks))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{team}", rank=rank, world_size=asked.ranks)
    world = World(rank=rank, local_rank=rank, world_size=asked.ranks, backend="gloo")
    others = OF_TOKENS if asked.workload == "gpt" else OF_IMAGES
    names = [*others, *OURS]
    contenders = contenders_of(asked, os.path.join(folder, "tokens.bin"), world, ours=team == 1)
    seconds: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(asked.rounds + 1):  # the first round warms up and does not count
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turns.wait()
            if name in contenders:
                taken = timed(contenders[name], number, asked.steps)
                if number:
                    seconds[name].append(taken)
        if place == 0:
            print(f"\rround {number}/{asked.rounds}", end="" if number < asked.rounds else "\n", file=sys.stderr)
    turns.wait()
    if rank == 0:
        torch.save(seconds, os.path.join(folder, f"result{team}.pt"))
    dist.destroy_process_group()


def timed(train: Train, number: int, steps: int) -> list[float]:
    """Seconds, and processor seconds of all ranks."""
    dist.barrier()
    started, started_cpu = time.perf_counter(), time.process_time()
    train(number, steps)
    own = torch.tensor(time.process_time() - started_cpu)
    dist.all_reduce(own)  # is a barrier too
    return [time.perf_counter() - started, float(own)]


def lines_of(
    seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]], num_samples: int, unit: str
) -> list[str]:
    """The table of the results, and whether ours reach the wanted ratios."""
    rows = []
    for name, own in seconds.items():
        wall = [middle(ratios(own, seconds[ours])) for ours in (EQUAL, DEFAULTS)]
        cpu = [f"{statistics.median(ratios(cpu_seconds[name], cpu_seconds[ours])):.3f}" for ours in (EQUAL, DEFAULTS)]
        rows.append([name, spread([num_samples / taken for taken in own], 1), *wall, *cpu])
    head = ["contender", f"{unit}/s, median (range)", "ours in fp32 / it", "ours at defaults / it", "CPU time", "same"]
    words = (
        "Ratios are medians of the rounds, with their middle half in brackets. The last two columns are ratios of "
        "processor seconds, its by ours in fp32 and at defaults, which other load on the machine touches least."
    )
    lines = [*table(head, rows), "", words, ""]
    for ours, words, wanted in (
        (EQUAL, "At equal precision", WANTED_EQUAL),
        (DEFAULTS, "At defaults", WANTED_DEFAULTS),
    ):
        medians = {name: ratios(own, seconds[ours]) for name, own in seconds.items() if name not in OURS}
        best = min(medians, key=lambda name: statistics.median(medians[name]))
        found = statistics.median(medians[best])
        verdict = "met" if found >= wanted else "MISSED"
        lines.append(f"{words}, against the best of them ({best}): {found:.3f}; wanted {wanted}: {verdict}.  ")
    return lines


def main() -> None:
    asked = arguments()
    predicts_tokens = asked.workload == "gpt"
    with tempfile.TemporaryDirectory() as folder:
        if predicts_tokens:
            vocab = asked.vocab_size = asked.vocab_size or shape_of(asked.model).vocab
            drawn = np.random.default_rng(0).integers(0, vocab, NUM_TOKENS, dtype=np.uint16)
            drawn.tofile(os.path.join(folder, "tokens.bin"))
        turns = torch.multiprocessing.get_context("spawn").Barrier(2 * asked.ranks)
        torch.multiprocessing.spawn(  # pyright: ignore[reportPrivateImportUsage]
            compete, args=(asked, folder, turns), nprocs=2 * asked.ranks, join=True
        )
        results = [torch.load(os.path.join(folder, f"result{team}.pt"), weights_only=True) for team in (0, 1)]
    seconds, cpu_seconds = ({name: [pair[kind] for pair in own] for name, own in (results[0] | results[1]).items()}
                            for kind in (0, 1))  # fmt: skip
    num_samples, size, unit = asked.steps * asked.batch_size * asked.ranks, f"{asked.image_size} px", "images"
    if predicts_tokens:
        context = shape_of(asked.model).context
        num_samples, unit = num_samples * context, "tokens"
        size = f"sequences of {context}, {asked.vocab_size:,} different tokens"
    lines = lines_of(seconds, cpu_seconds, num_samples, unit)
    title = (
        f"Trainer: {asked.model}, {size}, {asked.ranks} gloo ranks, batch {asked.batch_size} a rank, "
        f"{asked.rounds} rounds of {asked.steps} steps"
    )
    busy = f"Load average at the end {os.getloadavg()[0]:.1f}; the contenders themselves are {asked.ranks} of it."
    publish(title, [*lines, busy], record=asked.record)


if __name__ == "__main__":
    main()
