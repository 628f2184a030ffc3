"""A run, put together: data, model, strategy, loop, and what it leaves."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from train import checkpoint, data, models, optimizer, strategies
from train.data.images import Source
from train.data.loader import open_batches
from train.display import Display
from train.errors import MusterError
from train.faults import agree
from train.loop import Loop, Progress
from train.metrics import StepTimes
from train.options import Options
from train.precision import Precision, choose_precision
from train.runs import Run, choose_run
from train.seeds import seed_of
from train.summary import Log, collect, effective, write_summary
from train.world import World

RESULT_OPTIONS = (
    *("data", "image_size", "num_classes", "num_samples", "on_bad_sample", "batch_size", "accumulate", "seed", "bf16"),
    *("optimizer", "lr", "lr_scale", "warmup_steps", "momentum", "weight_decay", "clip_norm", "seq_len", "vocab_size"),
)
"""Options that change what is learnt: a resumed run warns when they differ."""


def run(strategy_name: str, options: Options, world: World) -> None:
    """Trains as `options` say, on this rank."""
    started = time.perf_counter()
    options = options.settled()
    strategy = strategies.load(strategy_name)
    agree(world, lambda: strategy.check(world, options))
    source = agree(world, lambda: data.open_source(options))
    train, valid = agree(world, lambda: open_batches(source, options, world))
    precision = choose_precision(options, world.device)
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    torch.manual_seed(seed_of(options.seed, "weights"))
    model = agree(world, lambda: models.build(options, source.num_classes, source.size))

    chosen = share_run(world, options, strategy_name)
    settings = effective(options, precision, source, world)
    identity = {"model": options.model, "num_classes": source.num_classes, "optimizer": options.optimizer}
    state = chosen.state
    model = strategy.wrap(model, world, options, precision)
    if state is not None:
        agree(world, lambda: restore_model(strategy.unwrap(model), state, identity, chosen))
    steps = optimizer.build(options, model, fused=precision.fused)
    progress = Progress()
    if state is not None:
        optimizer.restore(steps, state["optimizer"])
        progress = Progress(**state["progress"])
        chosen.notes += differences(state, settings, world)

    display = Display(
        enabled=world.main,
        epochs=options.epochs,
        global_batch=train.order.global_batch * source.targets_of_sample,  # type: ignore[union-attr]
        unit=source.unit,
    )
    display.facts(facts(strategy_name, options, world, precision, source, model, chosen))
    for note in [*chosen.notes, *promised_gpus(os.environ, world)]:
        display.note(note)
    log = Log(chosen.folder, progress.step) if world.main else None

    def save(progress: Progress) -> None:
        agree(world, lambda: save_run(chosen, strategy.unwrap(model), steps, progress, settings, identity, world))

    loop = Loop(
        strategy=strategy,
        model=model,
        optimizer=steps,
        train=train,
        valid=valid,
        world=world,
        options=options,
        precision=precision,
        display=display,
        times=StepTimes(world.device),
        log=log.write if log is not None else lambda record: None,
        save=save,
        progress=progress,
    )
    if loop.finished():
        done = f"{progress.epoch} epochs, {progress.step} steps"
        display.note(f"the run is complete already ({done}); a larger --epochs or --max-steps continues it")
        return
    try:
        loop.fit()
    finally:
        train.close()
        valid.close()
    summary = collect(
        strategy=strategy_name,
        options=settings,
        world=world,
        progress=progress,
        times=loop.times,
        batches=(train, valid),
        source=source,
        folder=chosen.folder,
        resumed_from=chosen.resumed_from,
        seconds=time.perf_counter() - started,
    )
    if world.main:
        write_summary(chosen.folder, summary)
    display.summary(summary)


def share_run(world: World, options: Options, strategy: str) -> Run:
    """The run's folder and checkpoint, chosen by rank 0 and known to all.

    Raises:
        MusterError: on all ranks, where rank 0 can't choose or another can't read the checkpoint.
    """
    own = agree(world, lambda: choose_run(options, strategy) if world.main else None)
    told = None if own is None else [str(own.folder), str(own.resumed_from) if own.resumed_from else None]
    folder, path = world.gather(told)[0]

    def others() -> Run:
        return own or Run(Path(folder), path and Path(path), checkpoint.load(Path(path), check=False) if path else None)

    return agree(world, others)


def restore_model(model: nn.Module, state: dict[str, Any], identity: dict[str, Any], chosen: Run) -> None:
    """Loads the weights of `state` into `model`.

    Raises:
        MusterError: they are those of another model, another number of classes, or another optimizer.
    """
    made_by = state.get("identity", {})
    for name, wanted in identity.items():
        if made_by.get(name) != wanted:
            word = name.replace("_", " ")
            raise MusterError(
                f"the checkpoint is of another {word}: {made_by.get(name)}, this run has {wanted}",
                seen=str(chosen.resumed_from),
                fix=f"give the {word} of the checkpoint, or leave out --resume",
            )
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise MusterError(
            f"the checkpoint does not fit the model: {str(error).splitlines()[-1].strip()}",
            seen=f"{chosen.resumed_from}, --model={identity['model']}",
            fix="give --image-size and the other options of the checkpoint's run, or leave out --resume",
        ) from error


def differences(state: dict[str, Any], settings: dict[str, Any], world: World) -> list[str]:
    """One line naming what makes this run's result differ from that of the run it continues; none if nothing does."""
    before = state["options"] | {"world_size": state["world_size"]}
    now = settings | {"world_size": world.world_size}
    names = [name for name in (*RESULT_OPTIONS, "world_size") if before.get(name) != now[name]]
    if not names:
        return []
    changes = ", ".join(f"{name} {before.get(name)} -> {now[name]}" for name in names)
    return [f"the result will differ from that of an uninterrupted run: {changes}"]


def save_run(
    chosen: Run,
    model: nn.Module,
    steps: Optimizer,
    progress: Progress,
    settings: dict[str, Any],
    identity: dict[str, Any],
    world: World,
) -> None:
    """Writes a checkpoint, on rank 0."""
    if not world.main:
        return
    state = {
        "identity": identity,
        "options": settings,
        "world_size": world.world_size,
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimizer": steps.state_dict(),
    }
    checkpoint.save(chosen.folder, state, step=progress.step, keep=settings["keep_checkpoints"])


def facts(
    strategy: str,
    options: Options,
    world: World,
    precision: Precision,
    source: Source,
    model: nn.Module,
    chosen: Run,
) -> dict[str, str]:
    """What the first lines of a run say."""
    processes = f"{world.world_size} process{'es' if world.world_size > 1 else ''}"
    hosts = ", ".join(world.nodes[:4]) + (f" and {len(world.nodes) - 4} more" if len(world.nodes) > 4 else "")
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    kind = f"{source.num_classes} classes, {source.size} x {source.size} pixels"
    if source.unit == "tokens":
        kind = f"sequences of {source.size} tokens, {source.num_classes} different ones"
    rows = {
        "world": f"{processes} on {hosts} ({strategy}{', ' + world.backend if world.backend else ''})",
        "device": f"{device}, {precision}",
        "model": f"{options.model}, {parameters:.1f} M parameters",
        "data": f"{options.data}: {len(source.train):,} train, {len(source.valid):,} validate, " + kind,
        "batch": f"{options.batch_size * options.accumulate * world.world_size} "
        f"({options.batch_size} x {world.world_size} processes"
        + (f" x {options.accumulate} accumulated)" if options.accumulate > 1 else ")"),
        "run": str(chosen.folder),
    }
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


assert set(RESULT_OPTIONS) <= {field.name for field in fields(Options)}
