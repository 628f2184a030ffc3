"""The files that a run leaves for people and programs: config.toml, summary.json and metrics.jsonl."""

import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from muster.config import Options
from muster.errors import RESUME, ExitCode, explaining
from muster.paths import installed
from muster.train.checkpoint import manager
from muster.train.checkpoint.run_directory import Run
from muster.train.checkpoint.storage import write_text
from muster.train.data.source import Source
from muster.train.distributed.world import World
from muster.train.models import gpt
from muster.train.optim import Precision
from muster.train.parallel.strategy import loss_of
from muster.train.reporting.metrics import StepTimes, peak_memory_gib
from muster.train.reporting.profile import NAME, Profile
from muster.units import perplexity
from muster.variables import LaunchVariable

FLOPS_BATCH = 2
"""Samples that are counted: batch normalisation refuses a single one whose feature maps have one pixel."""


@dataclass(frozen=True)
class Setup:
    """The facts about a run that its header and its summary show."""

    strategy: str
    options: Options
    world: World
    precision: Precision
    source: Source
    num_parameters: int
    run: Run

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.options.batch_size * self.options.accumulate * self.world.dp_size

    @property
    def targets_of_step(self) -> int:
        """Images or tokens of a step, over all ranks."""
        return self.global_batch * self.source.targets_of_sample

    def settings(self) -> dict[str, Any]:
        """The options, with `auto` and `default` resolved, the size of a sample, and the number of samples."""
        size: dict[str, Any] = {"seq_len" if self.source.unit == "tokens" else "image_size": self.source.size}
        size |= {"train_samples": len(self.source.train), "valid_samples": len(self.source.valid)}
        return asdict(self.options) | asdict(self.precision) | {"device": self.world.device.type, **size}


def command() -> str:
    """The command that the user typed, as far as it is known."""
    return os.environ.get(LaunchVariable.COMMAND) or shlex.join(sys.argv)


def versions() -> dict[str, str | None]:
    """The versions of the software, and the name of the GPU."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": installed("torchvision"),  # which is loaded for images only
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def collect(
    setup: Setup,
    progress: manager.Progress,
    times: StepTimes,
    *,
    waits_s: float | None,
    bad: dict[str, str],
    seconds: float,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """The summary of the run; to be called on all ranks, as each knows only its own times and samples.

    Args:
        waits_s: seconds in which this rank waited for others; None where that is not known.
        bad: this rank's samples that can't be read, with the reason of each.
    """
    options, world, source, run = setup.options, setup.world, setup.source, setup.run
    # dp drives all GPUs of the machine from one process, and one counter is that of one GPU.
    num_devices = torch.cuda.device_count() if setup.strategy == "dp" and world.device.type == "cuda" else 1
    measured = {
        **times.of_this_rank(waits_s),
        "peak_memory_gib": peak_memory_gib(world.device),
        "energy_j": times.energy.joules if times.seconds and num_devices == 1 else None,
        "bad_samples": bad,
    }
    by_rank = world.gather(measured)
    all_bad = {name: reason for rank in by_rank for name, reason in rank["bad_samples"].items()}
    last = progress.history[-1]
    rates = times.summary(setup.targets_of_step, world.world_size, source.unit)
    rate: Any = rates[f"{source.unit}_per_second_per_rank"]
    return {
        "strategy": setup.strategy,
        "model": options.model,
        "data": options.data,
        "device": str(world.device.type),
        "backend": world.backend,
        "world_size": world.world_size,
        "num_nodes": len(world.nodes),
        "hosts": world.nodes,
        "fabric": os.environ.get(LaunchVariable.FABRIC_FOUND) or ("tcp" if len(world.nodes) > 1 else "none"),
        "global_batch": setup.global_batch,
        "num_parameters": setup.num_parameters,
        **rates,
        **compare_ranks(world, by_rank),
        "peak_memory_gib": round(max(rank["peak_memory_gib"] for rank in by_rank), 3),
        **(flops_of(setup, rate, num_devices, note) if world.main else {}),
        **energy_of([rank["energy_j"] for rank in by_rank], len(times.seconds) * setup.targets_of_step, source.unit),
        "step": progress.step,
        "seconds": round(seconds, 3),
        "epochs": progress.history,
        "best_accuracy": progress.best_accuracy,
        "final_accuracy": last["valid_accuracy"],
        **perplexities(progress.history, source.unit),
        "final_train_loss": last["train_loss"],
        "final_valid_loss": last["valid_loss"],
        "bad_samples": [{"name": name, "reason": reason} for name, reason in sorted(all_bad.items())],
        "resumed_from": None if run.resumed_from is None else str(run.resumed_from),
        "folder": str(run.folder),
        "command": command(),
        "options": setup.settings(),
        "versions": versions(),
        **(trace_of(times.profile, note) if world.main else {}),
    }


def results(part: str, sums: list[float], unit: str) -> dict[str, float]:
    """Loss and accuracy from `sums` (summed loss, hits, targets) of a `part`, train or valid; perplexity for tokens."""
    loss, hits, num_targets = sums
    found = {f"{part}_loss": loss / num_targets, f"{part}_accuracy": hits / num_targets}
    return found | ({f"{part}_perplexity": perplexity(loss / num_targets)} if unit == "tokens" else {})


def perplexities(history: list[dict[str, Any]], unit: str) -> dict[str, float]:
    """The best and the last perplexity of the validation; nothing for images."""
    if unit != "tokens":
        return {}
    losses = [epoch["valid_loss"] for epoch in history]
    return {"best_perplexity": perplexity(min(losses)), "final_perplexity": perplexity(losses[-1])}


def compare_ranks(world: World, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """`ranks`, `slowest_rank` and `shares` of a summary.

    Ranks wait for each other in each step, so their steps last equally long. They differ in how much of a step they
    were busy: the slowest waits for nobody.

    Args:
        by_rank: the values of `StepTimes.of_this_rank` on each rank, and its peak memory.
    """
    ranks = [
        {
            "rank": rank,
            "host": host,
            **{name: rounded(own[name]) for name in ("step_s", "busy_s", "data_wait_s")},
            "peak_memory_gib": round(own["peak_memory_gib"], 3),
        }
        for rank, (host, own) in enumerate(zip(world.hosts or (world.host,), by_rank, strict=True))
    ]
    return {
        "ranks": ranks,
        "slowest_rank": slowest_of(ranks),
        "shares": shares_of(by_rank, alone=world.backend is None),
    }


def slowest_of(ranks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank that was busy longest; None with one rank, or where it is not known how long each was busy."""
    if len(ranks) == 1 or any(not rank["busy_s"] for rank in ranks):
        return None
    worst = max(ranks, key=lambda rank: rank["busy_s"])
    median_s = statistics.median(rank["busy_s"] for rank in ranks)
    return {
        "rank": worst["rank"],
        "host": worst["host"],
        "seconds": worst["busy_s"],
        "median_s": round(median_s, 6),
        "ratio": round(worst["busy_s"] / median_s, 4),
    }


def shares_of(by_rank: list[dict[str, Any]], *, alone: bool) -> dict[str, float | None] | None:
    """The shares of the mean step of all ranks; None where no step was timed.

    Time that is neither a wait for data nor for other ranks is `compute`. Where waits for other ranks are not known,
    they are part of it, and `communication` is None.
    """
    total_s = sum(own["step_s"] for own in by_rank)
    if not total_s or any(own["data_wait_s"] is None for own in by_rank):
        return None
    data = sum(own["data_wait_s"] for own in by_rank) / total_s
    waits = [0.0 if alone else own["waits_s"] for own in by_rank]
    communication = None if None in waits else sum(waits) / total_s
    compute = max(0.0, 1 - data - (communication or 0.0))
    return {"data": rounded(data, 4), "compute": rounded(compute, 4), "communication": rounded(communication, 4)}


def rounded(value: float | None, digits: int = 6) -> float | None:
    """`value`, rounded, if it is known."""
    return None if value is None else round(value, digits)


def trace_of(profile: Profile | None, note: Callable[[str], None]) -> dict[str, Any]:
    """The summary's entries on the trace of `--profile`: its path in the run's folder, and the number of its steps."""
    if profile is not None and profile.problem is not None:
        note(profile.problem)
    if profile is None or not profile.num_traced or profile.problem is not None:
        return {"profile": None}
    return {"profile": NAME, "profile_steps": profile.num_traced}


def flops_of(setup: Setup, rate: float | None, num_devices: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Floating-point operations per image or token, per second of a rank (`rate` of these a second), at peak; MFU."""
    options, source = setup.options, setup.source
    peak = peak_flops(setup.world.device, bf16=setup.precision.bf16, convolves=source.unit == "images")
    try:
        of_sample = count_flops(options, source.num_classes, source.size) / source.targets_of_sample
    except Exception as error:  # a model that can't be computed on the meta device: the run must not fail for that
        note(f"the operations of {options.model} could not be counted: {str(error).partition(chr(10))[0]}")
        of_sample = None
    done = None if of_sample is None or rate is None else of_sample * rate
    return {
        "flops_per_sample": of_sample,
        "flops_per_second_per_rank": done,
        "peak_flops_per_second": None if peak is None else num_devices * peak,
        "mfu": None if peak is None or done is None else round(done / (num_devices * peak), 4),
    }


def count_flops(options: Options, num_classes: int, size: int) -> float:
    """Operations of one sample (an image of `size` pixels a side, a sequence of `size` tokens), forward and backward.

    They are those of the model: a multiplication and an addition are two, attention counts as if it were not causal,
    and what activation checkpointing computes again counts once (the model FLOPs of arXiv 2204.02311, appendix B).
    """
    # Here and not above: it loads triton, and only rank 0 counts.
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        if options.predicts_tokens:
            model = gpt.GPT(gpt.shape_of(options.model), num_classes)
            inputs = targets = torch.zeros(FLOPS_BATCH, size, dtype=torch.int64)
        else:
            from muster.train.models import images  # here and not above: see train/models

            model = images.construct(options.model, num_classes, size)
            inputs, targets = torch.empty(FLOPS_BATCH, 3, size, size), torch.zeros(FLOPS_BATCH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(inputs), targets).backward()
    return counter.get_total_flops() / FLOPS_BATCH


class Peak(NamedTuple):
    """The peak rates of a card, in 10^12 dense operations a second.

    Attributes:
        half: bf16 (before Ampere fp16) by tensor cores.
        tf32: TF32 by tensor cores; None where they do not have it.
        single: fp32 without tensor cores.
    """

    half: float
    tf32: float | None
    single: float


# From NVIDIA's datasheets, and the H100's architecture whitepaper. Those of cards since Ampere give their figures with
# sparsity, or both: these are without it, half as much. Of A30, H100 NVL and H200 NVL only bf16 was looked up; TF32 is
# half of it, and fp32 is still to be compared with the datasheet.
CARDS: dict[str, Peak] = {
    r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe": Peak(312, 156, 19.5),  # nvidia-1758950-r4
    r"NVIDIA A30": Peak(165, 82, 10.3),
    r"NVIDIA A40": Peak(149.7, 74.8, 37.4),
    r"NVIDIA A10": Peak(125, 62.5, 31.2),
    # The GPU of GH200 has the 132 multiprocessors of the H100 SXM, and their clock.
    r"NVIDIA H100 80GB HBM3|NVIDIA GH200 (120GB|480GB|144G HBM3e)": Peak(989.4, 494.7, 66.9),
    r"NVIDIA H100 PCIe": Peak(756, 378, 51),
    r"NVIDIA H100 NVL": Peak(835, 417.5, 60),
    r"NVIDIA H200": Peak(989, 494, 67),
    r"NVIDIA H200 NVL": Peak(835.5, 417.5, 60),
    r"NVIDIA B200": Peak(2250, 1100, 75),  # HGX B200
    r"NVIDIA GB200": Peak(2500, 1250, 80),  # GB200 NVL72
    r"NVIDIA L40S": Peak(362.05, 183, 91.6),
    r"NVIDIA L4": Peak(121, 60, 30.3),
    r"(Tesla |NVIDIA )V100-(SXM2|SXM3)-(16|32)GB(-LS)?": Peak(125, None, 15.7),  # us-1165301-r5
    r"(Tesla |NVIDIA )V100-PCIE-(16|32)GB": Peak(112, None, 14),
    r"(Tesla |NVIDIA )V100S-PCIE-32GB": Peak(130, None, 16.4),
    r"(Tesla |NVIDIA )T4": Peak(65, None, 8.1),  # 951643
}
"""The peaks of cards, by patterns of their names, as torch.cuda.get_device_name returns them."""


def peak_flops(device: torch.device, *, bf16: bool, convolves: bool) -> float | None:
    """The peak operations a second of this device; None where they are not known.

    Args:
        convolves: whether most of the model is convolutions, for which torch allows TF32 by default, and not products
            of matrices, for which it does not.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((peak for pattern, peak in CARDS.items() if re.fullmatch(pattern, name)), None)
    if peak is None:
        return None
    tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    if bf16:
        return peak.half * 1e12
    return (peak.tf32 if tf32 and peak.tf32 is not None else peak.single) * 1e12


def energy_of(by_rank: list[float | None], num_targets: int, unit: str) -> dict[str, float | None]:
    """The energy of all ranks' GPUs, and per image or token, in joules; None where that of a rank is not known."""
    known = [own for own in by_rank if own is not None]
    total = sum(known) if known and len(known) == len(by_rank) else None
    each = None if total is None or not num_targets else total / num_targets
    return {"energy_j": None if total is None else round(total, 3), f"energy_j_per_{unit.removesuffix('s')}": each}


def strict_json(values: dict[str, Any]) -> str:
    """`values` as the text of a JSON file; NaN and infinity, which JSON does not have, become null."""
    return json.dumps(json.loads(json.dumps(values), parse_constant=lambda _: None), indent=2) + "\n"


def write_file(path: Path, text: str) -> None:
    """Puts `text` at `path` in the run's folder, whole or not at all.

    Raises:
        MusterError: the disk is full, or the folder is gone.
    """
    with writing(path):
        write_text(path, text)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context that raises MusterError if `path` can't be written, or another training has taken over its folder."""
    fix = f"make room, raise the quota, or see that the file system is up; {RESUME}, if there is one"
    with explaining(f"{path.name} could not be written", seen=path, fix=fix, code=ExitCode.FAILED):
        if manager.is_lost(path.parent):
            raise manager.taken_over(path.parent)
        yield


class Log:
    """metrics.jsonl: a line after each epoch, each checkpoint, and every so many steps.

    Args:
        step: where the run continues; lines of later steps, left by a run that was stopped, are removed.

    Attributes:
        seconds: how long the run has trained already, by the lines that are kept.

    Raises:
        MusterError: the disk is full, or the folder is gone; `write` raises it too.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        self.seconds = 0.0
        kept = []
        with writing(self.path):
            for line in self.path.read_text(errors="replace").splitlines() if self.path.is_file() else []:
                # Leaves out a last line that was cut off when a run was killed, and lines that are not ours.
                with suppress(ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
                    record = json.loads(line)
                    if record["step"] <= step:
                        if record["kind"] == "steps":
                            self.seconds = float(record.get("seconds", self.seconds))
                        kept.append(line)
            write_text(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, record: dict[str, Any]) -> None:
        """Adds a line."""
        with writing(self.path), self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
