"""A run, put together: data, model, strategy, loop, and what it leaves."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from train import combinations, compilation, data, deadline, heap, logs, models, optimizer, strategies, trackers
from train.data.loader import open_agreed
from train.display import Display
from train.ema import MovingAverage
from train.errors import MusterError
from train.facts import facts, promised_gpus
from train.faults import agree
from train.interval import Interval
from train.loop import Loop
from train.measure.energy import Energy
from train.measure.profile import Profile
from train.metrics import StepTimes
from train.notice import Notice, Preempted
from train.options import Options
from train.precision import choose_precision
from train.progress import Progress, is_complete
from train.resume import differences, restore, share_run
from train.seeds import seed_of
from train.state import Keeper, Statistics, Trained
from train.summary import Log, collect, command, effective, write_summary
from train.trackers import Tracker
from train.vitals import ENDING
from train.world import World


def run(strategy_name: str, options: Options, world: World) -> None:
    """Trains as `options` say, on this rank."""
    started = time.perf_counter()
    options = options.settled()
    strategy = strategies.load(strategy_name, world)
    agree(world, lambda: combinations.check(strategy_name, options))
    agree(world, lambda: strategy.check(world, options))
    agree(world, lambda: compilation.check(options, world.device))
    agree(world, lambda: trackers.check(options))
    limit = agree(world, lambda: deadline.find(options.save_before, os.environ if world.main else {}))
    grace = agree(world, lambda: deadline.grace(os.environ, limit.deadline))
    world = strategy.share(world, options)
    source = data.open_shared(options, world)
    train, valid = open_agreed(source, options, world)
    options = replace(options, train_num_workers=train.num_workers, valid_num_workers=valid.num_workers)
    precision = choose_precision(options, world.device)
    choose_kernels(options, world)
    torch.manual_seed(seed_of(options.seed, "weights"))
    model = agree(world, lambda: models.build(options, source.num_classes, source.size))

    chosen = share_run(world, options, strategy_name)
    world.vitals.folder = logs.folder(chosen.folder, world.host, os.environ)
    logs.open_log(chosen.folder, world, command(), all_ranks=options.console == "all")
    settings = effective(options, precision, source, world)
    identity = {"model": options.model, "num_classes": source.num_classes, "optimizer": options.optimizer}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = strategy.wrap(model, world, options, precision)
    steps = strategy.divide(optimizer.build(options, model, fused=precision.fused), world, options)
    inner = strategy.unwrap(model)
    compilation.compile_model(inner, options)
    average = None if options.ema is None else MovingAverage(inner, options.ema)
    trained = Trained(model=inner, optimizer=steps, average=average)
    progress, notice = Progress(), Notice(limit.deadline)
    keeper = Keeper(chosen.folder, world, keep=options.keep_checkpoints, in_background=not options.blocking_save)
    if chosen.resumed_from is not None:
        before = restore(trained, chosen, identity, keeper, world)
        progress = Progress(**before["progress"])
        world.vitals.step = progress.step
        chosen.notes += differences(before, settings, world)

    display = Display(
        enabled=world.main,
        epochs=options.epochs,
        global_batch=train.order.global_batch * source.targets_of_sample,  # type: ignore[union-attr]
        unit=source.unit,
    )
    display.facts(facts(strategy_name, options, world, precision, source, num_parameters, chosen))
    for note in [
        *strategy.notes(world, options),
        *compilation.notes(options),
        *source.notes,
        *train.notes,
        *valid.notes,
        *chosen.notes,
        *promised_gpus(os.environ, world),
        *limit.notes,
    ]:
        display.note(note)
    log = Log(chosen.folder, progress.step) if world.main else None
    check = deadline.GraceCheck(grace, display.note)
    if log is not None and log.save_s is not None:
        check(log.save_s)

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

    if is_complete(progress, options):
        done = f"{progress.epoch} epochs, {progress.step} steps"
        display.note(f"the run is complete already ({done}); a larger --epochs or --max-steps continues it")
        return
    with agree(world, lambda: open_tracker(options, world, chosen.folder, progress.step, settings, display)) as tracker:

        def record(values: dict[str, Any]) -> None:
            if log is not None:
                log.write(values)
                tracker.write(values)

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
            times=StepTimes(
                world.device,
                energy=Energy(world.device),
                started=started - (0.0 if log is None else log.seconds),
            ),
            log=record,
            save=save,
            progress=progress,
            notice=notice,
            interval=Interval(60 * options.save_every if world.main else 0.0),
        )
        if options.profile:
            # Hooks that name a part would have a compiled model compiled again.
            named, num_steps = inner if options.compile == "off" else None, loop.num_steps - progress.step
            loop.times.profile = Profile(chosen.folder, num_steps, named, world.device, main=world.main)

        def told(step: int, seconds: float) -> None:
            if log is not None:
                log.write({"kind": "checkpoint", "step": step, "save_s": round(seconds, 3)})
                check(seconds, loop.times.seconds[-1] if loop.times.seconds else 0.0)

        keeper.told = told
        notice.listen()
        fit(loop, keeper)
        if loop.warned and not is_complete(progress, options):
            raise Preempted(progress.step, notice.heard)
        summary = collect(
            strategy=strategy_name,
            options=options,
            settings=settings,
            loop=loop,
            num_parameters=num_parameters,
            folder=chosen.folder,
            resumed_from=chosen.resumed_from,
            seconds=time.perf_counter() - started,
        )
        summary |= loop.gradients.report()
        if world.main:
            write_summary(chosen.folder, summary)
            tracker.write({"kind": "run", **{name: summary[name] for name in summary.keys() - {"options"}}})
    display.summary(summary)


def fit(loop: Loop, keeper: Keeper) -> None:
    """Trains to the end, and until the last checkpoint is written."""
    heap.collect_again()
    try:
        with told_if_not_deterministic():
            loop.fit()
        loop.world.vitals.at(ENDING)
        keeper.wait()
    except MusterError:
        keeper.close()
        raise
    finally:
        loop.train.close()
        loop.valid.close()


def open_tracker(
    options: Options, world: World, folder: Path, step: int, settings: dict[str, Any], display: Display
) -> Tracker:
    """The tracker of the run, on the one rank that writes; on the others it writes nothing."""
    if not world.main:
        return Tracker(None, display.note)
    return trackers.open_tracker(options, folder, step, settings, display.note)


def choose_kernels(options: Options, world: World) -> None:
    """Takes the fastest kernels, or with `--deterministic` those that give the same bits at each run."""
    if options.deterministic:
        # cuBLAS reads it when it starts (docs.nvidia.com/cuda/cublas, results reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = not options.deterministic
    else:
        heap.keep()


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
