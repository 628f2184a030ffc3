"""A run, put together: data, model, strategy, loop, and what it leaves."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from muster import config, interruption
from muster.config import Options
from muster.errors import MusterError
from muster.train import compilation, console, data, memory, models, optimizer, preemption, strategies, trackers
from muster.train.checkpoint import CheckpointManager
from muster.train.data.loader import count_cores, open_batches
from muster.train.display import Display, header, promised_gpus
from muster.train.faults import agree
from muster.train.loop import Loop
from muster.train.measure.profile import Profile
from muster.train.metrics import Energy, StepTimes
from muster.train.precision import choose_precision
from muster.train.preemption import Grace, Interval, Notice, Preempted
from muster.train.run_directory import differences, restore, share_run
from muster.train.seeds import seed_of
from muster.train.state import Progress, Statistics, TrainState, is_complete
from muster.train.summary import Log, collect, command, effective, write_config, write_summary
from muster.train.world import ENDING, World


def run(strategy_name: str, options: Options, world: World) -> None:
    """Trains as `options` say, on this rank."""
    started = time.perf_counter()
    given, options = options, options.settled()
    strategy = strategies.load(strategy_name, world)
    agree(world, lambda: config.check(strategy_name, options))
    agree(world, lambda: strategy.check(world, options))
    agree(world, lambda: compilation.check(options, world.device))
    limit = agree(world, lambda: preemption.find(options.save_before, os.environ if world.main else {}))
    grace = agree(world, lambda: preemption.grace(os.environ, limit.deadline))
    world = strategy.share(world, options)
    source = data.open_shared(options, world)
    cores = count_cores(world)
    train, valid = agree(world, lambda: open_batches(source, options, world, cores))
    options = replace(options, train_num_workers=train.num_workers, valid_num_workers=valid.num_workers)
    precision = choose_precision(options, world.device)
    choose_kernels(options, world)
    torch.manual_seed(seed_of(options.seed, "weights"))
    model = agree(world, lambda: models.build(options, source.num_classes, source.size))

    chosen = share_run(world, options, strategy_name)
    world.vitals.compiles = options.compile != "off"
    world.vitals.folder = console.log_folder(chosen.folder, world.host, os.environ)
    console.open_log(chosen.folder, world, command(), all_ranks=options.console == "all")
    if world.main and chosen.resumed_from is None:
        write_config(chosen.folder, strategy_name, given)
    settings = effective(options, precision, source, world)
    identity = {"model": options.model, "num_classes": source.num_classes, "optimizer": options.optimizer}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model = strategy.wrap(model, world, options, precision)
    steps = strategy.divide(optimizer.build(options, model, fused=precision.fused), world, options)
    inner = strategy.unwrap(model)
    compilation.compile_model(inner, options)
    trained = TrainState(model=inner, optimizer=steps)
    progress, notice = Progress(), Notice(limit.deadline, preemption.deaf_until(os.environ))
    manager = CheckpointManager(
        chosen.folder, world, keep=options.keep_checkpoints, in_background=not options.blocking_save
    )
    if chosen.resumed_from is not None:
        before = restore(trained, chosen, identity, manager, world)
        can_resume()
        progress = Progress(**before["progress"])
        world.vitals.step = progress.step
        chosen.notes += differences(before, settings, world)

    display = Display(
        enabled=world.main,
        epochs=options.epochs,
        global_batch=train.order.global_batch * source.targets_of_sample,  # type: ignore[union-attr]
        unit=source.unit,
        log_every=options.log_every,
    )
    display.header(header(strategy_name, options, world, precision, source, num_parameters, chosen))
    for note in [
        *strategy.notes(world, options),
        *(["compiles at the first step, which may take minutes"] if options.compile != "off" else []),
        *source.notes,
        *train.notes,
        *valid.notes,
        *chosen.notes,
        *promised_gpus(os.environ, world),
        *limit.notes,
    ]:
        display.note(note)

    def save(progress: Progress, own: Statistics) -> None:
        plain = {
            "identity": identity,
            "options": settings,
            "world_size": world.world_size,
            "num_shares": world.num_shares,
            "strategy": strategy_name,
        }
        state = {**trained.state(), "statistics": {str(world.rank): own}}
        manager.save({**plain, "progress": asdict(progress), **state}, progress.step)

    if is_complete(progress, options):
        done = f"{progress.epoch} epochs, {progress.step} steps"
        display.note(f"the run is complete already ({done}); a larger --epochs or --max-steps continues it")
        return
    if world.main and chosen.resumed_from is not None:
        # Not before: what can't be continued keeps its options.
        write_config(chosen.folder, strategy_name, given)
    kind = options.track if world.main else "none"
    with agree(
        world, lambda: trackers.open_tracker(kind, chosen.folder, progress.step, settings, display.note)
    ) as tracker:
        log = Log(chosen.folder, progress.step) if world.main else None

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
            has_checkpoint=chosen.resumed_from is not None,
            notice=notice,
            interval=Interval(60 * options.save_every if world.main else 0.0),
        )
        if options.profile:
            # Hooks that name a part would have a compiled model compiled again.
            named, num_steps = inner if options.compile == "off" else None, loop.num_steps - progress.step
            loop.times.profile = Profile(chosen.folder, num_steps, named, world.device, main=world.main)

        def on_saved(step: int, seconds: float) -> None:
            nonlocal grace
            can_resume()
            if log is not None:
                log.write({"kind": "checkpoint", "step": step, "save_s": round(seconds, 3)})
                too_long = grace.note(seconds, loop.times.seconds[-1] if loop.times.seconds else 0.0)
                if too_long is not None:
                    display.note(too_long)
                    grace = Grace(math.inf, "said once")

        manager.on_saved = on_saved
        notice.listen()
        fit(loop, manager)
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


def can_resume() -> None:
    """Notes what to say where Ctrl-C ends this run from now on, here and by its agent."""
    interruption.current.advice = interruption.GOES_ON
    console.leave_word(interruption.CHECKPOINT)


def fit(loop: Loop, manager: CheckpointManager) -> None:
    """Trains to the end, and until the last checkpoint is written."""
    memory.collect_garbage()
    try:
        with told_if_not_deterministic():
            loop.fit()
        loop.world.vitals.at(ENDING)
        manager.wait()
    except MusterError:
        manager.close()
        raise
    finally:
        loop.train.close()
        loop.valid.close()


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
        memory.keep_heap()


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
