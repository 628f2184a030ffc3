"""Bus bandwidths over one gloo group: those of `muster bench` compared with those of a loop written by hand.

Two ranks on this machine call the same collectives, timed in two ways in the order A B, B A: by bench, and by hand,
with the clock read before and after a loop. Only figures of the same round are compared.
"""

import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from results import middle, parser, publish, ratios, spread, table

from muster.check.bench.collectives import shown
from muster.check.bench.sweep import Row, Sweep
from muster.check.options import BenchOptions
from muster.check.ranks import join, leave, with_device
from muster.train.distributed.backends import open_group
from muster.train.distributed.world import World, close_group

RANKS = 2
SIZES = (64 << 10, 1 << 20, 16 << 20)
BENCH, BY_HAND = "muster bench", "by hand"
WANTED = 0.05
"""How far the median ratio may be from 1."""


def all_reduce(size: int) -> tuple[Callable[[], object], float]:
    """A call on a message of `size` bytes, and the bytes that its bus bandwidth counts."""
    message = torch.zeros(size // 4)
    return lambda: dist.all_reduce(message), size * 2 * (RANKS - 1) / RANKS


def all_gather(size: int) -> tuple[Callable[[], object], float]:
    """The same, where `size` is that of the gathered message."""
    own, whole = torch.zeros(size // 4 // RANKS), torch.zeros(size // 4)
    return lambda: dist.all_gather_into_tensor(whole, own), size * (RANKS - 1) / RANKS


LOOPS = {"all_reduce": all_reduce, "all_gather": all_gather}


def by_hand(name: str, size: int, options: BenchOptions) -> float:
    """The bus bandwidth of the slowest rank, in 10^9 bytes/s."""
    call, carried = LOOPS[name](size)
    for _ in range(options.warmup):
        call()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(options.iters):
        call()
    taken = torch.tensor([(time.perf_counter() - started) / options.iters], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return carried / float(taken) / 1e9


def by_bench(sweep: Sweep, name: str, size: int) -> float:
    """The figure in bench's column busbw."""
    row = Row(name, size, RANKS)
    found = Row(name, size, RANKS, (sweep.time(row),)).busbw
    assert found is not None
    return found


def rank_of(rank: int, port: int, rounds: int, iters: int, path: str) -> None:
    """One of the ranks; the first one writes the figures, by collective and size, as JSON."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    options = BenchOptions(device="cpu", iters=iters)
    world: World = with_device(join(options.timeout_s), options.device, options.backend)
    open_group(world)
    sweep = Sweep(world, options, SIZES, tuple(LOOPS))
    figures: list[tuple[str, int, dict[str, list[float]]]] = []
    for name in LOOPS:
        for size in SIZES:
            found: dict[str, list[float]] = {BENCH: [], BY_HAND: []}
            for turn in range(-1, rounds):
                order = list(found) if turn % 2 else list(found)[::-1]
                for who in order:
                    figure = by_bench(sweep, name, size) if who == BENCH else by_hand(name, size, options)
                    if turn >= 0:  # the first turn of each is not counted
                        found[who].append(figure)
            figures.append((name, size, found))
    if world.main:
        Path(path).write_text(json.dumps(figures))
    close_group()
    leave(world, 0)


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(rounds: int, iters: int) -> list[tuple[str, int, dict[str, list[float]]]]:
    """The figures of both, by collective and size."""
    spawn, port = multiprocessing.get_context("spawn"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures.json")
        ranks = [spawn.Process(target=rank_of, args=(rank, port, rounds, iters, path)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"the ranks ended with {[rank.exitcode for rank in ranks]}")
        return json.loads(Path(path).read_text())


def main() -> None:
    """Measures and prints the table."""
    more = parser(__doc__ or "")
    more.add_argument("--iters", type=int, default=20, help="calls of each loop (default: %(default)s)")
    options = more.parse_args()
    rows, every = [], []
    for name, size, found in measure(options.rounds, options.iters):
        of_rounds = ratios(found[BENCH], found[BY_HAND])
        every += of_rounds
        rows.append([name, shown(size), spread(found[BENCH]), spread(found[BY_HAND]), middle(of_rounds)])
    ratio = statistics.median(every)
    lines = [
        *table([f"{RANKS} ranks, gloo", "message", f"{BENCH}, GB/s", f"{BY_HAND}, GB/s", "ratio"], rows),
        "",
        "Bus bandwidths, in 10^9 bytes/s, are medians (least to most); ratios those of the rounds, with their middle "
        "half.",
        "",
        f"Ratio of all rounds: {middle(every)}; wanted within {WANTED:.0%}: "
        f"{'met' if abs(ratio - 1) <= WANTED else 'MISSED'}.",
    ]
    publish("What bench measures, against a loop by hand", lines, record=options.record)


if __name__ == "__main__":
    main()
