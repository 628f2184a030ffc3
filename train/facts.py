"""What the first lines of a run say."""

from collections.abc import Mapping

import torch

from train.data.images import Source
from train.options import Options
from train.precision import Precision
from train.runs import Run
from train.world import World


def facts(
    strategy: str,
    options: Options,
    world: World,
    precision: Precision,
    source: Source,
    num_parameters: int,
    chosen: Run,
) -> dict[str, str]:
    """What the first lines of a run say."""
    processes = f"{world.world_size} process{'es' if world.world_size > 1 else ''}"
    hosts = ", ".join(world.nodes[:4]) + (f" and {len(world.nodes) - 4} more" if len(world.nodes) > 4 else "")
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    kind = f"{source.num_classes} classes, {source.size} x {source.size} pixels"
    if source.unit == "tokens":
        kind = f"sequences of {source.size} tokens, {source.num_classes} different ones"
    rows = {
        "world": f"{processes} on {hosts} ({strategy}{', ' + world.backend if world.backend else ''})",
        "device": f"{device}, {precision}",
        "model": f"{options.model}, {num_parameters / 1e6:.1f} M parameters",
        "data": f"{options.data}: {len(source.train):,} train, {len(source.valid):,} validate, " + kind,
        "batch": f"{options.batch_size * options.accumulate * world.num_shares} "
        f"({options.batch_size} x {world.num_shares} {'processes' if world.share is None else 'groups'}"
        + (f" x {options.accumulate} accumulated)" if options.accumulate > 1 else ")"),
        "run": str(chosen.folder),
    }
    if options.train_num_workers or options.valid_num_workers:
        rows["loading"] = (
            f"{options.train_num_workers} workers a rank for training, {options.valid_num_workers} for validation"
        )
    if chosen.resumed_from is not None:
        rows["resumes"] = str(chosen.resumed_from)
    return rows


def promised_gpus(environ: Mapping[str, str], world: World) -> list[str]:
    """A warning where the job was given GPUs that torch does not see."""
    promised = environ.get("CUDA_VISIBLE_DEVICES", "")
    if world.device.type == "cuda" or promised in ("", "-1") or torch.cuda.is_available():
        return []
    return [
        f"TRAINING ON THE CPU: CUDA_VISIBLE_DEVICES={promised} promises GPUs, but torch sees none. "
        "In Apptainer add --nv, in docker --gpus all."
    ]
