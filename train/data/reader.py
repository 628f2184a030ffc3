"""From the numbers of samples to a batch: what runs in the loader's workers."""

import os
import sys
import time
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from muster.train.data.source import BadSample, Samples
from muster.train.order import Draw
from muster.train.preemption import deafen
from muster.train.seeds import seed_of

ORPHANED_S = 2.0
"""For so long a connection that broke may mean that the rank is about to be gone."""


class Batch(NamedTuple):
    """What a loader hands over.

    Attributes:
        inputs: images NCHW, or tokens NT, or files that the device decodes; None where no sample of the batch could be
            read.
        labels: N, or NT.
        bad: name and reason of each sample that could not be read.
    """

    inputs: Any
    labels: torch.Tensor | None
    bad: list[tuple[str, str]]


class Reader(Dataset[Batch]):
    """Reads draws into a batch.

    A sample that can't be read is named in the batch. In training, the next readable one takes its place, so that all
    ranks go on taking the same number of steps; in validation it is left out.
    """

    def __init__(self, samples: Samples, *, seed: int, replace: bool) -> None:
        self.samples = samples
        self.seed = seed
        self.replace = replace

    def __getitems__(self, draws: list[Draw]) -> Batch:
        try:
            whole = None if self.samples.random else self.samples.read_batch([draw.sample for draw in draws])
        except BadSample as error:
            return Batch(None, None, [(error.name, error.reason)])
        if whole is not None:
            return Batch(*whole, [])
        bad: list[tuple[str, str]] = []
        pairs = [pair for draw in draws if (pair := self.read(draw, bad)) is not None]
        if not pairs:
            return Batch(None, None, bad)
        return Batch(torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs]), bad)

    def read(self, draw: Draw, bad: list[tuple[str, str]]) -> tuple[torch.Tensor, int] | None:
        """The sample, or the one in its place; what could not be read is added to `bad`."""
        for distance in range(len(self.samples) if self.replace else 1):
            try:
                return self.read_seeded(Draw((draw.sample + distance) % len(self.samples), draw.epoch))
            except BadSample as error:
                bad.append((error.name, error.reason))
        return None

    def read_seeded(self, draw: Draw) -> tuple[torch.Tensor, int]:
        """The sample, whose augmentation depends on its number and the epoch, and on no worker or rank."""
        if not self.samples.random:
            return self.samples.read(draw.sample)
        with torch.random.fork_rng(devices=[]):
            self.reseed(draw)
            return self.samples.read(draw.sample)

    def reseed(self, draw: Draw) -> None:
        """Seeds what the augmentation of a sample is drawn from."""
        torch.default_generator.manual_seed(seed_of(self.seed, "augment", draw.epoch, draw.sample))

    def num_bytes(self, draw: Draw) -> int:
        """What the sample takes in a batch.

        Raises:
            BadSample: it can't be read.
        """
        return self.read_seeded(draw)[0].nbytes


def begin_worker(worker: int) -> None:
    """Begins a worker: signals are the rank's affair, and a rank that ended while they spoke is no error to show."""
    deafen()
    rank, show = os.getppid(), sys.excepthook

    def show_unless_orphaned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The kernel closes what a process has open before it gives its children another parent.
        end = time.monotonic() + ORPHANED_S
        while isinstance(error, OSError | EOFError) and time.monotonic() < end:
            if os.getppid() != rank:
                return
            time.sleep(0.01)
        show(kind, error, trace)

    sys.excepthook = show_unless_orphaned
