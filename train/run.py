"""A run, put together: data, model, strategy, loop, and what it leaves."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

import torch

from train import combinations, data, models, optimizer, strategies
from train.data.images import Source
from train.data.loader import open_batches
from train.display import Display
from train.ema import MovingAverage
from train.errors import MusterError
from train.faults import agree
from train.loop import Loop, Progress
from train.metrics import StepTimes
from train.options import Options
from train.precision import Precision, choose_precision
from train.resume import differences, restore, share_run
from train.runs import Run
from train.seeds import seed_of
from train.state import Keeper, Statistics, Trained
from train.summary import Log, collect, effective, write_summary
from train.world import World


def run(strategy_name: str, options: Options, world: World) -> None:
    """Trains as `options` say, on this rank."""
    started = time.perf_counter()
    options = options.settled()
    strategy = strategies.load(strategy_name, world)
    agree(world, lambda: combinations.check(strategy_name, options))
    agree(world, lambda: strategy.check(world, options))
    world = strategy.share(world, options)
    source = agree(world, lambda: data.open_source(options))
    train, valid = agree(world, lambda: open_batches(source, options, world))
    precision = choose_precision(options, world.device)
    choose_kernels(options, world)
    torch.manual_seed(seed_of(options.seed, "weights"))
    model = agree(world, lambda: models.build(options, source.num_classes, source.size))

    chosen = share_run(world, options, strategy_name)
    settings = effective(options, precision, source, world)
    identity = {"model": options.model, "num_classes": source.num_classes, "optimizer": options.optimizer}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = strategy.wrap(model, world, options, precision)
    steps = strategy.divide(optimizer.build(options, model, fused=precision.fused), world, options)
    inner = strategy.unwrap(model)
    average = None if options.ema is None else MovingAverage(inner, options.ema)
    trained = Trained(model=inner, optimizer=steps, average=average)
    progress = Progress()
    keeper = Keeper(chosen.folder, world, keep=options.keep_checkpoints, in_background=not options.blocking_save)
    if chosen.resumed_from is not None:
        before = restore(trained, chosen, identity, keeper, world)
        progress = Progress(**before["progress"])
        chosen.notes += differences(before, settings, world)

    display = Display(
        enabled=world.main,
        epochs=options.epochs,
        global_batch=train.order.global_batch * source.targets_of_sample,  # type: ignore[union-attr]
        unit=source.unit,
    )
    display.facts(facts(strategy_name, options, world, precision, source, num_parameters, chosen))
    for note in [*strategy.notes(world, options), *chosen.notes, *promised_gpus(os.environ, world)]:
        display.note(note)
    log = Log(chosen.folder, progress.step) if world.main else None

    def save(progress: Progress, own: Statistics) -> None:
        plain = {
            "identity": identity,
            "options": settings,
            "world_size": world.world_size,
            "num_shares": world.num_shares,
            "strategy": strategy_name,
        }
        state = {**trained.state(), "statistics": {str(world.rank): own}}
        keeper.save({**plain, "progress": asdict(progress), **state}, progress.step)

    loop = Loop(
        strategy=strategy,
        model=model,
        trained=trained,
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
        with told_if_not_deterministic():
            loop.fit()
        keeper.wait()
    except MusterError:
        keeper.close()
        raise
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
    summary |= loop.gradients.report()
    if world.main:
        write_summary(chosen.folder, summary)
    display.summary(summary)


def choose_kernels(options: Options, world: World) -> None:
    """Takes the fastest kernels, or with `--deterministic` those that give the same bits at each run."""
    if options.deterministic:
        # cuBLAS reads it when it starts (docs.nvidia.com/cuda/cublas, results reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = not options.deterministic


@contextmanager
def told_if_not_deterministic() -> Iterator[None]:
    """A context in which torch's refusal to compute by a kernel that is not deterministic is a user's error."""
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error) or not torch.are_deterministic_algorithms_enabled():
            raise
        raise MusterError(
            str(error).partition(", but")[0], seen="--deterministic", fix="another model, or leave out --deterministic"
        ) from error


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
