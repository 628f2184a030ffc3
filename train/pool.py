"""Ranks on this machine, started quickly: torch is loaded once, by a server that forks a process for each rank."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

from train.errors import FAILED, MusterError

GRACE_S = 20
"""Seconds in which ranks end by themselves when one of them has failed."""

LOADED = ["train.process", "train.arguments", *(f"train.strategies.{name}" for name in ("ddp", "tp", "pipeline"))]


def run_ranks(argv: Sequence[str], num_ranks: int, output: Path, deadline_s: float) -> None:
    """Runs the trainer with `argv` in `num_ranks` processes; what they print goes to files that begin with `output`.

    Raises:
        MusterError: one failed, or was not over in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    port = free_port()
    ranks = [
        context.Process(target=become, args=(list(argv), rank, num_ranks, port, f"{output}-{rank}"))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    end = monotonic() + deadline_s
    try:
        running = list(ranks)
        while running and monotonic() < end:
            wait([rank.sentinel for rank in running], end - monotonic())
            running = [rank for rank in running if rank.exitcode is None]
            if any(rank.exitcode for rank in ranks):
                end = min(end, monotonic() + GRACE_S)
    finally:
        late = [rank for rank in ranks if rank.exitcode is None]
        for rank in late:
            rank.kill()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        said = [line for rank in range(num_ranks) for line in Path(f"{output}-{rank}").read_text().splitlines()]
        codes = "not over in time" if late else f"exit codes {[rank.exitcode for rank in ranks]}"
        first = next((line for line in said if "rror" in line), codes)
        seen = f"{num_ranks} ranks of: train {' '.join(argv)}"
        raise MusterError(f"it failed: {first.strip()}", seen=seen, fix="run it alone", code=FAILED)


def become(argv: list[str], rank: int, num_ranks: int, port: int, output: str) -> None:
    """Makes this process a rank of the trainer."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    # Not the world of a job's step, of which the program that started this may be a rank.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    from train.__main__ import main

    sys.argv = ["train", *argv]
    main()


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
