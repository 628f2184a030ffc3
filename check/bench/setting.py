"""Where the ranks are: their devices, backend, site and shape, and the baselines that are of an equal place."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from check.bench import baseline
from check.bench.baseline import Baseline, Setting
from check.options import BenchOptions
from train.backends import backend_for, places
from train.errors import MusterError
from train.faults import agree
from train.world import World, device_for

SITE = "MUSTER_SITE_FOUND"
"""The variable by which the launch tells whose profile it used (entrypoint/starting.py)."""

STRATEGY = "ddp"
"""A strategy that any backend will do for: what a backend lacks is found by asking it."""


def with_device(world: World, options: BenchOptions) -> World:
    """`world` with its device and backend.

    Raises:
        MusterError: on all ranks alike: a GPU is missing, or is another rank's too, or the backend is.
    """
    device = agree(world, lambda: device_for(world, options.device))
    if options.backend == "gloo" and options.device == "auto":
        device = torch.device("cpu")
    backend = agree(world, lambda: backend_for(options.backend, device, STRATEGY))
    world = replace(world, device=device, backend=backend)
    places(world)
    return world


def look(world: World) -> Setting:
    """The setting of all ranks, on all of them."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    gpus = sorted({name for name in world.gather(gpu) if name})
    return Setting(
        site=site(os.environ),
        backend=world.backend or "",
        device=world.device.type,
        nodes=len(world.nodes),
        ranks=tuple(world.hosts.count(host) for host in world.nodes),
        gpus=tuple(gpus),
    )


def site(environ: Mapping[str, str]) -> str:
    """The site's name: the launch's word, the user's, or the cluster's own name; empty where nothing tells."""
    for name in (SITE, "MUSTER_SITE", "SLURM_CLUSTER_NAME"):
        if environ.get(name, "auto") not in ("auto", "off", ""):
            return environ[name]
    return ""


def baselines(world: World, options: BenchOptions, here: Setting) -> Baseline | None:
    """The baseline to hold the figures against, on all ranks; it, and one to be replaced, are of this setting.

    Rank 0 reads the files: other nodes need not see them.

    Raises:
        MusterError: one can't be read, or is of another setting.
    """
    answer: list[object] = [None, None]
    if world.main:
        answer = _read(options, here)
    known, refusal = world.gather(answer)[0]
    if refusal is not None:
        raise MusterError(refusal["wrong"], seen=refusal["seen"], fix=refusal["fix"])
    return baseline.from_json(known, options.baseline or "", "--baseline") if known is not None else None


def _read(options: BenchOptions, here: Setting) -> list[object]:
    """What the baseline's file says, and why it, the one to be replaced, or the folder for results can't be used."""
    text = None
    try:
        if options.pairwise and (options.baseline or options.save_baseline):
            raise MusterError(
                "pairs of nodes are held against each other, not against a baseline",
                seen="--pairwise with --baseline or --save-baseline",
                fix="leave one of them out",
            )
        if options.output is not None:
            baseline.check_writable(Path(options.output, "bench.json"), "--output", "the results")
        if options.save_baseline is not None:
            old = Path(options.save_baseline)
            baseline.check_writable(old, "--save-baseline", "the baseline")
            if os.path.exists(old):
                content = baseline.from_json(baseline.read(old, "--save-baseline"), str(old), "--save-baseline")
                baseline.check_equal(content, here, str(old), "--save-baseline")
        if options.baseline is not None:
            text = baseline.read(Path(options.baseline), "--baseline")
            content = baseline.from_json(text, options.baseline, "--baseline")
            baseline.check_equal(content, here, options.baseline, "--baseline")
    except MusterError as error:
        return [None, {"wrong": error.wrong, "seen": error.seen, "fix": error.fix}]
    return [text, None]
