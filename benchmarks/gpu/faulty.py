"""One rank of a training, with a fault in the middle of a step.

    python -m benchmarks.gpu.faulty KIND STEP RANK STRATEGY OPTIONS

The fault KIND, a function below, happens in step STEP (from 1) of rank RANK. `python -m muster.train` gets the rest.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import psutil
import torch

from muster.train import __main__ as trainer
from muster.train.trainer import Trainer

CYCLES = 10**12
"""Cycles of a GPU's clock in about eight minutes."""


def hang(loop: Trainer) -> None:
    """A kernel that does not end; on a CPU, a call."""
    if loop.world.device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(3600)


def wait(loop: Trainer) -> None:
    """Python sleeps, while the other ranks wait in a collective."""
    time.sleep(3600)


def stop(loop: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def term(loop: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def usr1(loop: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def interrupt(loop: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def kill(loop: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def nan(loop: Trainer) -> None:
    """A weight that is NaN."""
    with torch.no_grad():
        next(iter(loop.trained.model.parameters())).fill_(float("nan"))


def memory(loop: Trainer) -> None:
    """An allocation of more memory than any machine has."""
    torch.empty(2**48, device=loop.world.device)


def cublas(loop: Trainer) -> None:
    """All memory of the GPU is taken when cuBLAS asks for its own."""
    held, size = [], 2**30
    while size >= 512:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=loop.world.device))
        except torch.OutOfMemoryError:
            size //= 2
    raised: list[BaseException] = []

    def multiply() -> None:
        # In a new thread, for which cuBLAS makes a new handle.
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                held[-1].view(torch.float32)[:64].view(8, 8).mm(held[-2].view(torch.float32)[:64].view(8, 8))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def device_assert(loop: Trainer) -> None:
    """An index that is out of range, found by the kernel."""
    table = torch.zeros(4, device=loop.world.device)
    table[torch.tensor([10**6], device=loop.world.device)].sum()


def kill_worker(loop: Trainer) -> None:
    """A process that loads data is killed, as by the system when memory runs out."""
    workers = [child for child in psutil.Process().children() if "tracker" not in " ".join(child.cmdline())]
    print(f"kills {workers}", flush=True)
    for worker in workers:
        worker.kill()


def main() -> None:
    kind, step, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    fault: Callable[[Trainer], None] = globals()[kind]
    original = Trainer.train_step

    def step_with_fault(self: Trainer, *arguments: object) -> None:
        if self.progress.step + 1 == step and os.environ.get("RANK", "0") == rank:
            fault(self)
        original(self, *arguments)  # type: ignore[arg-type]

    Trainer.train_step = step_with_fault  # type: ignore[method-assign]
    sys.argv[1:] = sys.argv[4:]
    trainer.main()


if __name__ == "__main__":
    main()
