"""`train scale`: the same training on 1, 2, 4 ... ranks of this machine, one after the other, and their report."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from entrypoint import detection, launchers, processes, resources, schedulers
from entrypoint.allocation import Hosts
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions, ScaleOptions
from train.arguments import to_argv
from train.combinations import check as check_combination
from train.errors import MusterError
from train.options import Options

STEPS = 60
"""Steps of each run where nothing is said: enough for a median, and few enough to wait for."""

MOST_RANKS_ON_CPUS = 8

SET_BY_US = ("nnodes", "node_rank", "nproc_per_node", "spawn")

GROUPS = {"tp": "tensor_parallel", "pipeline": "pipeline_parallel"}
"""Strategies whose ranks work on one batch in groups, by the option for the size of a group."""


@dataclass(frozen=True)
class Plan:
    """Runs to be made.

    Attributes:
        kind: `weak` or `strong`.
        worlds: their numbers of ranks, ascending.
        folder: what holds them, each as wN.
        commands: what follows `train` in each run's command.
        variables: what each run gets in its environment besides.
        cores: those of this machine; None where the runs use GPUs.
        threads: of each rank; None where the runs use GPUs.
        notes: one line for each thing that the user should know.
    """

    kind: str
    worlds: tuple[int, ...]
    folder: Path
    commands: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str]
    cores: int | None
    threads: int | None
    notes: tuple[str, ...]

    def script(self) -> str:
        """Lines for a shell that would do the same."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.variables.items()]
        lines = [shlex.join(["train", *words]) for words in self.commands]
        return "\n".join([*exports, *lines, shlex.join(["muster", "report", str(self.folder)])])


def plan(
    env: Environment, scale: ScaleOptions, options: LaunchOptions, training: Options, typed: Sequence[str]
) -> Plan:
    """The runs that `train scale` makes in this place.

    Raises:
        MusterError: the options can't go together, a batch can't be divided, or this is a job of several nodes.
    """
    _check(scale, options, training)
    job, _ = schedulers.detect(env)
    passed = to_argv(replace(options, dry_run=False, env_file=None))
    steps = training.max_steps or STEPS
    notes: list[str] = []
    if training.epochs == _default("epochs"):
        # An epoch has at least a step: as many epochs are enough for any world.
        training = replace(training, epochs=steps)
    elif training.max_steps is None:
        notes.append(f"each run ends after {STEPS} steps, or --epochs={training.epochs}: --max-steps sets the number")
    training = replace(training, max_steps=steps)
    folder = Path(training.runs_dir) / (training.name or _default_name(scale.strategy, training))
    if job and (job.num_nodes or 1) > 1 and launchers.detect(env, job)[0] is None:
        raise _refusal(env, job, scale, passed, training, folder, typed)
    allocation = detection.allocate(env, options, typed)
    tasks = sum(allocation.ranks_per_node) if allocation.mode == "worker" else allocation.num_nodes
    if tasks > 1:
        once = "srun --nodes=1 --ntasks=1 " if allocation.launcher == "srun" else ""
        raise MusterError(
            f"train scale starts its runs itself, and {allocation.launcher} started it {tasks} times",
            seen=f"{allocation.sources['num_nodes']}, {allocation.sources.get('tasks_on_node', 'one task a node')}",
            fix=f"start it once: {once}{shlex.join(typed)}",
        )
    cores = resources.cores(env, allocation.cpus_on_node)
    uses_gpus = allocation.gpus_seen > 0 and training.device != "cpu"
    most = allocation.gpus_seen if uses_gpus else min(cores or 2, MOST_RANKS_ON_CPUS)
    group = _group(scale, training) or 1
    worlds = scale.worlds or _doubled(most, group)
    if not worlds:
        smaller = f"{_flag(scale)}={most}, or " if most > 1 else ""
        raise MusterError(
            f"a group of {group} ranks is more than the ranks of this machine",
            seen=f"{_flag(scale)}={group}, {most} {'GPU' if uses_gpus else 'core'}{'s' if most > 1 else ''} to use",
            fix=f"{smaller}{'--device=cpu ' if uses_gpus else ''}--world {group},{2 * group}",
        )
    threads, variables = None, dict[str, str]()
    if not uses_gpus:
        threads, said = _threads(env, cores or 1, worlds[-1])
        notes.append(said)
        variables = {} if "OMP_NUM_THREADS" in env else {"OMP_NUM_THREADS": str(threads)}
    return Plan(
        kind="strong" if scale.strong else "weak",
        worlds=worlds,
        folder=folder,
        commands=tuple(
            (scale.strategy, f"--nproc-per-node={world}", *passed, *to_argv(_training(scale, training, folder, world)))
            for world in worlds
        ),
        variables=variables,
        cores=None if uses_gpus else cores,
        threads=threads,
        notes=tuple(notes),
    )


def _check(scale: ScaleOptions, options: LaunchOptions, training: Options) -> None:
    """Returns if the options go together, and all worlds have a batch of their own."""
    for name in SET_BY_US:
        value = getattr(options, name)
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise MusterError(
                f"train scale says itself how many processes there are, and {flag} does too",
                seen=f"{flag}={value}",
                fix="--world 1,2,4 in its place",
            )
    if training.resume is not None:
        raise MusterError(
            "train scale makes new runs, and continues none", seen=f"--resume={training.resume}", fix="leave it out"
        )
    if training.name is not None and (training.name in ("", ".", "..") or "/" in training.name):
        raise MusterError(
            "the runs' name is one folder name", seen=f"--name={training.name}", fix="--name=NAME --runs-dir=FOLDER"
        )
    check_combination(scale.strategy, training)
    group = _group(scale, training) or 1
    bad = [world for world in scale.worlds if world % group]
    if bad:
        raise MusterError(
            f"{bad[0]} rank{'s' if bad[0] > 1 else ''} can't be divided into groups of {group}",
            seen=f"{_flag(scale)}={group}, --world={scale.world}",
            fix=f"--world {','.join(map(str, _doubled(-(-scale.worlds[-1] // group) * group, group)))}",
        )
    for world in scale.worlds:
        _training(scale, training, Path(), world)


def _training(scale: ScaleOptions, training: Options, folder: Path, world: int) -> Options:
    """The options of the run on `world` ranks.

    Raises:
        MusterError: the batch can't be divided, or it is that of all ranks by nature.
    """
    group = _group(scale, training)
    if group is None and not scale.strong:
        flag = _flag(scale)
        raise MusterError(
            f"all ranks of {scale.strategy} work on one batch: there is no batch of a rank to keep",
            seen=f"train scale --strategy {scale.strategy}, without --strong or {flag}",
            fix=f"--strong; or {flag} N, for groups of N ranks",
        )
    shares = world // (group or world)
    batch = training.batch_size
    if scale.strong:
        if batch % shares:
            raise MusterError(
                f"a batch can't be divided by {shares}: --strong gives each rank its part of --batch-size",
                seen=f"--batch-size={batch}, a world of {world}",
                fix=f"--batch-size {-(-batch // shares) * shares}, or other worlds",
            )
        batch //= shares
    return replace(training, batch_size=batch, name=f"w{world}", runs_dir=str(folder))


def _group(scale: ScaleOptions, training: Options) -> int | None:
    """How many ranks work on one batch, and divide every world; None for all of them, as many as there are."""
    return getattr(training, GROUPS[scale.strategy]) if scale.strategy in GROUPS else 1


def _flag(scale: ScaleOptions) -> str:
    """The option for the size of a group."""
    return f"--{GROUPS[scale.strategy].replace('_', '-')}"


def _default(name: str) -> Any:
    return next(field.default for field in fields(Options) if field.name == name)


def _default_name(strategy: str, training: Options) -> str:
    source, _, path = training.data.partition(":")
    words = [training.model, source, Path(path).name, strategy, "scale"]
    return "-".join(safe for word in words if (safe := re.sub(r"[^A-Za-z0-9._]+", "-", word).strip("-.")[:60]))


def _doubled(most: int, group: int = 1) -> tuple[int, ...]:
    """1, 2, 4 ... groups, and as many as there are in `most` ranks: the ranks in them. Empty where not one is."""
    count = most // group
    worlds = [group * 2**power for power in range(count.bit_length())]
    return tuple(dict.fromkeys([*worlds, count * group])) if count else ()


def _threads(env: Environment, cores: int, largest: int) -> tuple[int, str]:
    """Threads of each rank, the same in all worlds, and a line that says so."""
    given = env.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isascii() and given.isdigit() and int(given) else max(1, cores // largest)
    why = "OMP_NUM_THREADS is yours" if given else f"{cores} cores / {largest} ranks"
    said = f"each rank has {threads} thread{'s' if threads > 1 else ''} in all worlds ({why})"
    if largest * threads > cores:
        said += f"; {largest} ranks share {cores} cores: the efficiency then measures the machine's cores"
    return threads, said


def _refusal(
    env: Environment,
    job: Hosts,
    scale: ScaleOptions,
    passed: Sequence[str],
    training: Options,
    folder: Path,
    typed: Sequence[str],
) -> MusterError:
    """What to type in a job of several nodes: each world needs a launch of its own, on so many of them."""
    num_nodes = job.num_nodes or 1
    a_node = processes.per_node(env, LaunchOptions(), job).count
    group = _group(scale, training) or 1
    # Several nodes that hold no broken group: so many at once as make up whole ones.
    at_once = math.lcm(a_node, group) // a_node
    nodes_of = [nodes * a_node for nodes in _doubled(num_nodes, at_once)]
    whole = tuple(dict.fromkeys([*_doubled(a_node, group), *nodes_of]))
    worlds = scale.worlds or whole
    if not whole:
        raise MusterError(
            f"no number of whole nodes of this job divides into groups of {group} ranks",
            seen=f"{_flag(scale)}={group}, {num_nodes} nodes, {a_node} ranks a node",
            fix=f"{_flag(scale)}={a_node}" if a_node > 1 else f"a job of {at_once} nodes",
        )
    wrong = f"{job.scheduler} gave this job {num_nodes} nodes: each world needs a launch of its own, on its nodes"
    seen = f"{job.sources['num_nodes']}, {a_node} ranks a node"
    bad = [world for world in worlds if world > a_node and (world % a_node or world // a_node > num_nodes)]
    if bad:
        return MusterError(
            f"a world of {bad[0]} ranks is not so many whole nodes of this job",
            seen=seen,
            fix=f"--world {','.join(map(str, whole))}",
        )
    if job.scheduler != "slurm":
        return MusterError(
            wrong,
            seen=seen,
            fix=f"in a job of one node: {shlex.join(typed)}; or start `train {scale.strategy} --nnodes N "
            f"--nproc-per-node P --runs-dir {shlex.quote(str(folder))} --name wW` once a world by your launcher on N "
            f"nodes, then muster report {shlex.quote(str(folder))}",
        )
    lines: list[str] = []
    for world in worlds:
        nodes = max(1, world // a_node)
        words = to_argv(_training(scale, training, folder, world))
        here = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "train", scale.strategy]
        lines.append(shlex.join([*here, f"--nproc-per-node={min(world, a_node)}", *passed, *words]))
    return MusterError(wrong, seen=seen, fix=" && ".join([*lines, shlex.join(["muster", "report", str(folder)])]))
