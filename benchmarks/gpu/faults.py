"""Part B: a fault is reported, in three lines if the user can fix it, and the run ends with the right exit code.

benchmarks/gpu/faulty.py runs a rank in which a fault happens in the middle of a step.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.casework import TRUE, Ended, Skip, Work, at_least, at_most, case, exactly
from benchmarks.gpu.correctness import TOKENS

STEP = 5
"""The step in which the fault happens."""

LONG = (*TOKENS, "--max-steps=100000", "--epochs=100000", "--log-every=1")
THREE_LINES = {"errors_told": exactly(1, "one error, told once"), "tracebacks": exactly(0)}
SOON_S = at_most(60, "seconds from the start of Python; a job's time is dear")
HANGS = {"exit_code": exactly(1), "says_so": TRUE, "stacks": at_least(1, "files of the run with stacks")}


def faulty(
    work: Work, kind: str, *options: str, strategy: str = "single", rank: int = 0, name: str = "run"
) -> list[str]:
    """The arguments of Python for a rank in which `kind` happens on `rank`."""
    return [
        "-m",
        "benchmarks.gpu.faulty",
        kind,
        str(STEP),
        str(rank),
        *work.train_argv(strategy, *options, name=name)[2:],
    ]


def run(work: Work, kind: str, *options: str, **more: Any) -> Ended:
    """Runs one process in which `kind` happens, to its end."""
    ended = work.python(*faulty(work, kind, *options, **more))
    return Ended(ended.code, ended.output, ended.seconds, work.scratch / more.get("name", "run"))


def run_two(work: Work, kind: str, *options: str) -> list[Ended]:
    """Runs two ranks of ddp until the first ends; `kind` happens in the second."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    started, ranks = time.monotonic(), list[Any]()
    for rank in ("0", "1"):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        ranks.append(work.start(*faulty(work, kind, *options, *sharing(work), strategy="ddp", rank=1), env=env))
    output, _ = ranks[0].communicate()
    seconds = time.monotonic() - started
    ranks[1].kill()
    other, _ = ranks[1].communicate()
    print(output, "--- rank 1:", other, sep="\n", flush=True)
    return [
        Ended(ranks[0].returncode, output, seconds, work.scratch / "run"),
        Ended(ranks[1].returncode, other, seconds),
    ]


def sharing(work: Work) -> tuple[str, ...]:
    """Options by which two ranks train here: over gloo, where they have to share one GPU."""
    if not work.on_gpu:
        return ()
    import torch

    return () if torch.cuda.device_count() >= 2 else ("--share-gpus",)


def told(ended: Ended, *words: str) -> dict[str, Any]:
    """What a user sees, as figures: exit code, errors in our form, tracebacks, and whether all `words` are there."""
    lines = ended.told
    figures: dict[str, Any] = {
        "exit_code": ended.code,
        "errors_told": sum(line.startswith("error: ") for line in lines),
        "tracebacks": sum("Traceback (most recent call last)" in line for line in lines),
        "seconds": ended.seconds,
    }
    return figures | {"says_so": all(word in ended.output for word in words)}


@case(part="B", timeout_s=20, on_cpu=True, expect={**THREE_LINES, "exit_code": exactly(2), "says_so": TRUE})
def out_of_memory(work: Work) -> dict[str, Any]:
    """Torch's allocator has no more: three lines that name the rank and what to turn"""
    return told(run(work, "memory", *LONG), "out of memory on rank 0", "--batch-size")


@case(part="B", timeout_s=30, expect={**THREE_LINES, "exit_code": exactly(2), "says_so": TRUE})
def out_of_memory_cublas(work: Work) -> dict[str, Any]:
    """cuBLAS has no memory for its handle: the same three lines (G12)"""
    return told(run(work, "cublas", *LONG), "out of memory on rank 0")


HOG = """
import sys, time, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(free - 250 * 2**20, dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(600)
"""


@case(part="B", timeout_s=30, expect={**THREE_LINES, "exit_code": at_least(1), "says_so": TRUE})
def out_of_memory_at_start(work: Work) -> dict[str, Any]:
    """Another process has the GPU's memory: told in three lines, not by a traceback of CUDA's (G12)"""
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout is not None
        if hog.stdout.readline() != "held\n":
            raise Skip("no process could take the GPU's memory")
        return told(work.train("single", *LONG), "memory")
    finally:
        hog.kill()
        hog.wait()


@case(
    part="B", timeout_s=40, on_cpu=True,
    expect={**HANGS, "errors_told": exactly(1), "seconds": SOON_S},
    expect_cpu={**HANGS, "errors_told": exactly(1)},
)  # fmt: skip
def hang(work: Work) -> dict[str, Any]:
    """A kernel that does not end: told with the place, stacks in a file, and the process ends"""
    ended = run(work, "hang", *LONG, "--hang-timeout=8")
    return told(ended, "made no progress", "rank 0") | {"stacks": stacks(ended.folder)}


def stacks(folder: Path) -> int:
    """The number of files of the run that have a Python stack."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 10**7]
    return sum("most recent call first" in path.read_text(errors="replace") for path in files)


@case(
    part="B", timeout_s=40, on_cpu=True,
    expect={**HANGS, "seconds": SOON_S}, expect_cpu=HANGS,
)  # fmt: skip
def hang_in_collective(work: Work) -> dict[str, Any]:
    """A rank stands still while the other waits in a collective: told which of them it is"""
    first, _ = run_two(work, "wait", *LONG, "--hang-timeout=8")
    return told(first, "rank 1", "made no progress") | {"stacks": stacks(first.folder)}


@case(
    part="B", timeout_s=45, on_cpu=True,
    expect={"exit_code": exactly(1), "says_so": TRUE, "seconds": SOON_S},
    expect_cpu={"exit_code": exactly(1), "says_so": TRUE},
)  # fmt: skip
def rank_stopped(work: Work) -> dict[str, Any]:
    """A rank is stopped by SIGSTOP: the other names it"""
    first, _ = run_two(work, "stop", *LONG, "--silence-timeout=10")
    return told(first, "rank 1", "no sign of life")


@case(
    part="B", timeout_s=35, on_cpu=True,
    expect={"exit_code": exactly(1), "says_so": TRUE, "seconds": SOON_S},
    expect_cpu={"exit_code": exactly(1), "says_so": TRUE},
)  # fmt: skip
def rank_killed(work: Work) -> dict[str, Any]:
    """A rank is killed in a step: the other names it, and does not wait for the time-out of a collective"""
    first, _ = run_two(work, "kill", *LONG)
    return told(first, "rank 1")


STOPPED = {"exit_code": exactly(75), **THREE_LINES, "says_so": TRUE}


@case(part="B", timeout_s=40, on_cpu=True, expect={**STOPPED, "resumed": TRUE, "step": exactly(60)})
def sigterm(work: Work) -> dict[str, Any]:
    """SIGTERM in a step: a checkpoint, exit code 75, and --resume goes on"""
    figures = told(run(work, "term", *LONG), "a checkpoint is written")
    more = work.train("single", *TOKENS, "--epochs=100000", "--max-steps=60", "--resume").summary()
    return figures | {"resumed": more["resumed_from"] is not None, "step": more["step"]}


@case(part="B", timeout_s=25, on_cpu=True, expect=STOPPED)
def sigusr1(work: Work) -> dict[str, Any]:
    """SIGUSR1 in a step: a checkpoint, exit code 75"""
    return told(run(work, "usr1", *LONG), "a checkpoint is written")


@case(
    part="B", timeout_s=45, on_cpu=True, expect={"exit_code": exactly(-9), "difference": exactly(0), "step": exactly(8)}
)
def sigkill(work: Work) -> dict[str, Any]:
    """SIGKILL in a step after a checkpoint: --resume trains to the bits of a run that was not killed"""
    from benchmarks.gpu.correctness import weights_in

    options = (*TOKENS, "--deterministic", "--no-bf16", "--max-steps=8")
    work.train("single", *options, "--max-steps=3", name="killed").summary()
    killed = run(work, "kill", *options, "--resume", name="killed")
    step = work.train("single", *options, "--resume", name="killed").summary()["step"]
    work.train("single", *options, name="straight").summary()
    one, other = (weights_in(work.scratch / name) for name in ("straight", "killed"))
    difference = max(float((one[name] - other[name]).abs().max()) for name in one)
    return {"exit_code": killed.code, "difference": difference, "step": step}


@case(part="B", timeout_s=20, on_cpu=True, expect={"exit_code": exactly(130), "tracebacks": exactly(0)})
def interrupted(work: Work) -> dict[str, Any]:
    """Ctrl-C in a step ends it at once, without a traceback"""
    return told(run(work, "interrupt", *LONG))


@case(part="B", timeout_s=20, on_cpu=True, expect={"exit_code": exactly(1), **THREE_LINES, "says_so": TRUE})
def loss_is_nan(work: Work) -> dict[str, Any]:
    """A loss that is no number: told with its step"""
    return told(run(work, "nan", *LONG), "loss is nan", f"step {STEP}")


@case(part="B", timeout_s=30, expect={"exit_code": exactly(1), "says_so": TRUE, "seconds": SOON_S})
def device_assert(work: Work) -> dict[str, Any]:
    """An assertion in a kernel ends the run with exit code 1, and is named"""
    return told(run(work, "device_assert", *LONG), "device-side assert")


@case(
    part="B", timeout_s=35, on_cpu=True,
    expect={"exit_code": exactly(1), **THREE_LINES, "says_so": TRUE, "seconds": SOON_S},
    expect_cpu={"exit_code": exactly(1), **THREE_LINES, "says_so": TRUE},
)  # fmt: skip
def worker_killed(work: Work) -> dict[str, Any]:
    """A process that loads data is killed: told, and nothing waits for its batch"""
    options = ("--model=resnet18", "--data=fake", "--image-size=32", "--num-samples=100000", "--train-num-workers=2")
    return told(run(work, "kill_worker", *options, "--batch-size=8", "--log-every=1"), "that loads data has ended")


@case(part="B", timeout_s=15, on_cpu=True, expect={"exit_code": exactly(2), **THREE_LINES, "says_so": TRUE})
def no_gpu_visible(work: Work) -> dict[str, Any]:
    """--device=cuda where no GPU can be seen: refused in three lines"""
    ended = work.train("single", *TOKENS, "--device=cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    return told(ended, "no GPU can be seen")


@case(part="B", timeout_s=20, expect={"exit_code": exactly(2), "says_so": TRUE})
def two_ranks_one_gpu(work: Work) -> dict[str, Any]:
    """Two ranks that see the same GPU: refused before NCCL does, which has words of its own"""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return told(work.train("ddp", *TOKENS, num_ranks=2, env={"CUDA_VISIBLE_DEVICES": gpu}), "GPU")


@case(part="B", timeout_s=35, num_gpus=2, expect={"exit_code": exactly(1), "says_so": TRUE, "seconds": SOON_S})
def nccl_timeout(work: Work) -> dict[str, Any]:
    """NCCL's own time-out ends two ranks with a sentence, where nobody looks for hangs (G4)"""
    first, _ = run_two(work, "wait", *LONG, "--hang-timeout=0", "--timeout-s=15")
    return told(first, "error: ")
