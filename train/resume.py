"""Going on with a run: which one, from which checkpoint, and what that changes."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from train import checkpoint
from train.errors import MusterError
from train.faults import agree
from train.optimizer import highest_lr
from train.options import Options
from train.runs import Run, choose_run, launch_of
from train.state import Keeper, Trained, misfit
from train.world import World

RESULT_OPTIONS = (
    *("data", "image_size", "num_classes", "num_samples", "on_bad_sample", "batch_size", "seed", "bf16"),
    *("optimizer", "lr", "lr_scale", "warmup_steps", "momentum", "weight_decay", "clip_norm", "seq_len", "vocab_size"),
    *("comm_hook", "powersgd_rank", "powersgd_start", "local_sgd", "local_sgd_start", "sync_bn"),
    *("lr_schedule", "lr_end", "decay_norms", "ema", "label_smoothing", "mixup", "decoder"),
)
"""Options that change what is learnt: a resumed run warns when they differ."""

assert set(RESULT_OPTIONS) <= {field.name for field in fields(Options)}


def share_run(world: World, options: Options, strategy: str) -> Run:
    """The run's folder and checkpoint, chosen by rank 0 and known to all.

    Raises:
        MusterError: on all ranks, where rank 0 can't choose or another can't read the checkpoint.
    """
    own = agree(
        world, lambda: choose_run(options, strategy, launch_of(os.environ, os.getppid())) if world.main else None
    )
    told = (
        None
        if own is None
        else [str(own.folder), *map(str, [own.resumed_from, *own.older] if own.resumed_from else [])]
    )
    folder, *paths = world.gather(told)[0]
    candidates = list(map(Path, paths))
    return own or Run(Path(folder), candidates[0] if candidates else None, candidates[1:])


def restore(trained: Trained, chosen: Run, identity: dict[str, Any], keeper: Keeper, world: World) -> dict[str, Any]:
    """What the checkpoint knows besides the tensors, which are in `trained` now.

    A damaged one is passed over for the one before it.

    Raises:
        MusterError: on all ranks, where none is whole, or they are of another model.
    """
    path = chosen.resumed_from
    assert path is not None

    def fitting() -> dict[str, Any]:
        index = checkpoint.head(path)
        fit(index, trained.model, identity, path)
        return index

    try:
        index = agree(world, fitting)
        # Ranks that are as many as then have their own statistics back; others can't tell whose are whose.
        rank = world.rank if index["plain"]["world_size"] == world.world_size else -1
        trained.fill(path, index, rank, keeper.group)
    except MusterError as damage:
        if not checkpoint.is_damage(damage) or not chosen.older:
            raise
        chosen.notes.append(checkpoint.passed_over(path, damage))
        chosen.resumed_from = chosen.older.pop(0)
        return restore(trained, chosen, identity, keeper, world)
    return index["plain"]


def fit(index: dict[str, Any], model: nn.Module, identity: dict[str, Any], path: Path) -> None:
    """Raises MusterError where a checkpoint is of another model, another number of classes, or another optimizer."""
    made_by = index["plain"].get("identity", {})
    for name, wanted in identity.items():
        if made_by.get(name) != wanted:
            word = name.replace("_", " ")
            raise MusterError(
                f"the checkpoint is of another {word}: {made_by.get(name)}, this run has {wanted}",
                seen=str(path),
                fix=f"give the {word} of the checkpoint, or leave out --resume",
            )
    if (reason := misfit(index, model)) is not None:
        raise MusterError(
            f"the checkpoint does not fit the model: {reason}",
            seen=f"{path}, --model={identity['model']}",
            fix="give --image-size and the other options of the checkpoint's run, or leave out --resume",
        )


def differences(state: dict[str, Any], settings: dict[str, Any], world: World) -> list[str]:
    """What makes this run's result differ from that of the run it continues; nothing if nothing does.

    Ranks and `--accumulate` may trade places: what counts is the global batch, and, for the batch normalisation that
    models of images may have, the size of its parts.
    """
    before = state["options"] | {"global_batch": global_batch(state["options"], state["num_shares"])}
    now = settings | {"global_batch": global_batch(settings, world.num_shares)}
    apart = now["local_sgd"] is not None  # how many ranks train apart counts too, and not only their global batch
    before, now = before | {"ranks": apart and state["num_shares"]}, now | {"ranks": apart and world.num_shares}
    lost = ["PowerSGD begins anew: what it still held back of the gradients is lost"]
    notes = lost if now["comm_hook"] == "powersgd" else []
    ignored = ("batch_size",) if now["seq_len"] else ()  # a transformer's samples know nothing of each other
    # A cosine that ends with the run depends on where that is.
    ends = ("epochs", "max_steps") if now["lr_schedule"] == "cosine" and now["lr_steps"] is None else ()
    notes = [*notes, *rescaled(state, settings, world)]
    names = [
        name
        for name in (*RESULT_OPTIONS, "lr_steps", *ends, "global_batch", "ranks")
        if name not in ignored and before.get(name) != now[name]
    ]
    if not names:
        return notes
    changes = ", ".join(f"{name} {before.get(name)} -> {now[name]}" for name in names)
    return [*notes, f"the result will differ from that of an uninterrupted run: {changes}"]


def rescaled(state: dict[str, Any], settings: dict[str, Any], world: World) -> list[str]:
    """What another number of ranks makes of the global batch and the learning rate (docs/elastic.md has the rule)."""
    if state["num_shares"] == world.num_shares:
        return []
    (batch, rate), (new_batch, new_rate) = (
        (global_batch(options, num_shares), highest_lr(Options(**chosen(options)), num_shares))
        for options, num_shares in ((state["options"], state["num_shares"]), (settings, world.num_shares))
    )
    if (batch, rate) == (new_batch, new_rate):
        return []
    ranks = "1 rank" if world.world_size == 1 else f"{world.world_size} ranks"
    return [
        f"goes on with {ranks} instead of {state['world_size']}: global batch {batch} -> {new_batch}, "
        f"learning rate {rate:.4g} -> {new_rate:.4g} (--lr-scale={settings['lr_scale']})"
    ]


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Of the options of a run those that its learning rate depends on."""
    return {name: options[name] for name in ("lr", "lr_scale", "accumulate")}


def global_batch(options: dict[str, Any], num_shares: int) -> int:
    """Samples of a step over all ranks."""
    return options["batch_size"] * options["accumulate"] * num_shares
