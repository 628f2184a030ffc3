"""The options of a training and their checks, defined once for the launcher and for the trainers, without torch.

The command line shows the fields of `Options`, the launcher passes on what the user gave, and the trainer reads the
same arguments back (train/__main__.py). The options of a `--config` file are put before them (config_file.py): of two
values for one option the last counts.
"""

import difflib
import glob
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from muster.arguments import option, to_argv
from muster.errors import MusterError

TRANSFORMERS = ("gpt-tiny", "gpt-small", "gpt-124m", "gpt-1b", "gpt-8b")
"""The models of train/models/gpt.py; here too, as a wrong name must not wait until torch is loaded."""

SOURCES = {
    **dict.fromkeys(("synthetic", "fake", "digits"), False),
    **dict.fromkeys(("cifar10", "imagefolder", "shards", "tokens"), True),
}
"""The data sources (train/data), and whether each needs a folder."""

OF_TOKENS = ("tokens", "synthetic")

LIMIT = 10**9
"""The largest number of tokens, classes, samples, MiB, steps or seconds: far larger ones overflow."""

STRATEGIES = {
    "single": "One process: the reference for every other strategy.",
    "dp": "One process, a thread for each GPU (DataParallel); ddp is faster.",
    "ddp": "A replica of the model on each rank (DistributedDataParallel).",
    "fsdp": "Weights, gradients, optimizer state sharded (fully_shard).",
    "tp": "A transformer's matrices and sequences split over ranks.",
    "pipeline": "A transformer's layers split into stages, one or more a rank.",
}
"""The strategies, each a file in train/parallel, with their help texts."""

IN_ONE_PROCESS = ("single", "dp")
"""Strategies that are started as one process, however many nodes and GPUs there are."""


def is_transformer(model: str) -> bool:
    """True for a transformer of train/models/gpt.py, misspelt ones too; False for a classifier of images."""
    return model.lower().startswith("gpt")


def check_transformer(model: str) -> None:
    """Raises MusterError where there is no transformer called `model`."""
    if model not in TRANSFORMERS:
        raise _unknown("transformer", f"--model={model}", model, TRANSFORMERS, TRANSFORMERS)


def check_classifier(model: str, known: Iterable[str]) -> None:
    """Raises MusterError where `model` is not among the `known` classifiers of images."""
    if model not in (names := list(known)):
        raise _unknown("classification model", f"--model={model}", model, names, ("resnet18", "resnet50", "vit_b_16"))


def _unknown(what: str, seen: str, name: str, known: Iterable[str], usual: Iterable[str], end: str = "") -> MusterError:
    """The error for a `name` that is none of the `known`; it shows similar ones, or the `usual` where none is similar.

    `end` is appended to a data source that needs a folder.
    """
    near = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5) or usual
    words = (shlex.quote(one + end if SOURCES.get(one) else one) for one in near)
    fix = f"{seen.partition('=')[0]}={' or '.join(words)}"
    return MusterError(f"there is no {what} called {name}", seen=seen, fix=fix)


def check_data(data: str, model: str) -> None:
    """Raises MusterError where `data` is no data source, does not fit `model`, or lacks or can't have a folder."""
    name, _, folder = data.partition(":")
    if name not in SOURCES:
        if os.path.exists(os.path.expanduser(data)):
            fix = shlex.quote(f"--data={'tokens' if is_transformer(model) else 'imagefolder'}:{data}")
            raise MusterError("--data needs the name of a data source before the path", seen=f"--data={data}", fix=fix)
        raise _unknown("data source", f"--data={data}", name, SOURCES, SOURCES, f":{folder or 'FOLDER'}")
    if SOURCES[name] != bool(folder):
        wrong, end = ("needs a", ":FOLDER") if SOURCES[name] else ("has no", "")
        raise MusterError(f"the data source {name} {wrong} folder", seen=f"--data={data}", fix=f"--data={name}{end}")
    if is_transformer(model) and name not in OF_TOKENS:
        fix = "--data=tokens:PATH of a text, of a folder with texts, or of a file of tokens; --data=synthetic"
        raise MusterError(f"{model} reads tokens, not images", seen=f"--data={data}", fix=fix)
    if name == "tokens" and not is_transformer(model):
        fix = "--model=gpt-tiny, or another gpt-..."
        raise MusterError(f"{model} reads images, not tokens", seen=f"--data={data}", fix=fix)


def check_here(model: str, data: str) -> None:
    """Raises MusterError where torchvision has no such model, or the data are not on this host."""
    known = classifiers()
    if known and not is_transformer(model):
        check_classifier(model, known)
    name, _, folder = data.partition(":")
    path = os.path.expanduser(folder)
    if folder and not os.path.exists(path):
        raise MusterError(
            "the data do not exist, or this user has no access to them",
            seen=f"--data={data} ({path})",
            fix=f"--data={name}:PATH that exists; in a container, see that PATH is bound into it",
        )


def classifiers() -> list[str]:
    """The names of torchvision's classifiers, read from its source without importing it; empty where there are none.

    Source: https://docs.pytorch.org/vision/stable/models.html (its models are registered by `@register_model()`)
    """
    spec = find_spec("torchvision")
    folders = list((spec and spec.submodule_search_locations) or ())
    try:
        texts = [path.read_text(encoding="utf-8") for folder in folders for path in Path(folder, "models").glob("*.py")]
    except (OSError, UnicodeDecodeError):
        return []  # the ranks see it when they load torchvision
    registered = [part for text in texts for part in text.split("\n@register_model()\n")[1:]]
    return sorted(part.partition("def ")[2].partition("(")[0] for part in registered)


def _complete_models(incomplete: str) -> list[str]:
    return [name for name in (*TRANSFORMERS, *classifiers()) if name.startswith(incomplete)]


def _complete_data(incomplete: str) -> list[str]:
    words = (f"{name}:" if has_folder else name for name, has_folder in SOURCES.items())
    return [word for word in words if word.startswith(incomplete)]


def _complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    folder = Path(ctx.params.get("runs_dir") or Options.runs_dir)
    return sorted(path.name for path in folder.glob(f"{glob.escape(incomplete)}*") if path.is_dir())


_model = partial(option, panel="Model")
_data = partial(option, panel="Data")
_training = partial(option, panel="Training")
_fsdp = partial(option, panel="fsdp")
_ddp = partial(option, panel="ddp")
_tp = partial(option, panel="tp")
_pipeline = partial(option, panel="pipeline")
_speed = partial(option, panel="Speed")
_run = partial(option, panel="Run")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a training, those of every strategy included, each with its heading in the help text."""

    model: Annotated[
        str,
        _model(
            help="Any classification model of torchvision (resnet18, resnet50, vit_b_16 ...), or a transformer that "
            "predicts the next token: gpt-tiny, gpt-small, gpt-124m, gpt-1b, gpt-8b.",
            autocompletion=_complete_models,
        ),
    ] = "resnet18"
    activation_checkpoint: Annotated[
        Literal["none", "selective", "full"],
        _model(
            help="What a transformer's layers compute again in the backward pass, to save memory: nothing, all but "
            "matrix products and attention, or all."
        ),
    ] = "none"

    data: Annotated[
        str,
        _data(
            help="Images: synthetic, fake, digits, cifar10:FOLDER, imagefolder:FOLDER, shards:FOLDER "
            "('train pack' makes it) or, for transformers, tokens:PATH. Shards are tar files in webdataset's format. "
            "PATH is a text, a folder with texts (both read as bytes), or a .bin, .u16, .u32 or .npy file.",
            autocompletion=_complete_data,
        ),
    ] = "digits"
    image_size: Annotated[
        int | None, _data(help="Pixels a side. Default: 32 for digits and cifar10, else 224.", min=8, max=100_000)
    ] = None
    seq_len: Annotated[int | None, _data(help="Tokens of a sequence. Default: the model's.", min=2, max=LIMIT)] = None
    vocab_size: Annotated[
        int | None,
        _data(help="Vocabulary size. Default: 256 for bytes, else the file's largest token plus 1.", min=2, max=LIMIT),
    ] = None
    num_classes: Annotated[int, _data(help="Classes of the synthetic and fake data.", min=2, max=LIMIT)] = 1000
    num_samples: Annotated[
        int, _data(help="Synthetic or fake training samples; in addition, a tenth as many validate.", min=1, max=LIMIT)
    ] = 1280
    train_num_workers: Annotated[
        int | None,
        _data(
            help="Processes that load training data, for each rank; 0 loads in the trainer. Default: none on CPUs and "
            "for data in memory, else the rank's share of the cores, up to 16.",
            min=0,
            max=1000,
        ),
    ] = None
    valid_num_workers: Annotated[
        int | None,
        _data(help="Processes that load validation data, for each rank. Default: by the same rule.", min=0, max=1000),
    ] = None
    decoder: Annotated[
        Literal["cpu", "nvjpeg"],
        _data(help="What decodes image files: the loader's workers, or the GPU by nvJPEG (JPEGs only)."),
    ] = "cpu"
    on_bad_sample: Annotated[Literal["stop", "skip"], _data(help="What to do where a sample can't be read.")] = "stop"

    epochs: Annotated[int, _training(help="Passes over the training data.", min=1)] = 10
    batch_size: Annotated[int, _training(help="Samples of one rank in one micro-batch.", min=1)] = 32
    accumulate: Annotated[int, _training(help="Micro-batches that each rank adds up for one step.", min=1)] = 1
    max_steps: Annotated[int | None, _training(help="Stop after this many steps in all.", min=1)] = None
    optimizer: Annotated[
        Literal["sgd", "adamw"] | None, _training(help="The optimizer. Default: sgd, and adamw for transformers.")
    ] = None
    lr: Annotated[
        float | None,
        _training(help="Learning rate, before --lr-scale. Default: 0.01 (sgd), 0.001 (adamw).", min=0.0, max=1e30),
    ] = None
    lr_scale: Annotated[
        Literal["none", "linear", "sqrt"],
        _training(help="How the learning rate grows with the number of micro-batches in a step."),
    ] = "none"
    warmup_steps: Annotated[int, _training(help="Steps of linear learning-rate warm-up.", min=0, max=LIMIT)] = 20
    lr_schedule: Annotated[
        Literal["constant", "cosine"],
        _training(help="The learning rate after warm-up: constant, or half a cosine down to --lr-end."),
    ] = "constant"
    lr_steps: Annotated[
        int | None,
        _training(help="The step at which the cosine ends. Default: the last one of --epochs or --max-steps.", min=1),
    ] = None
    lr_end: Annotated[float, _training(help="The cosine's end, as a fraction of its start.", min=0.0, max=1.0)] = 0.0
    momentum: Annotated[float, _training(help="Momentum of sgd.", min=0.0, max=1.0)] = 0.9
    weight_decay: Annotated[float, _training(help="Weight decay.", min=0.0, max=1e30)] = 1e-4
    decay_norms: Annotated[bool, _training(help="Weight decay on norms and biases too.")] = False
    label_smoothing: Annotated[float, _training(help="Share of a target that all classes get.", min=0.0, max=1.0)] = 0.0
    clip_norm: Annotated[float | None, _training(help="Clip the norm of all gradients to this.", min=0.0)] = None
    seed: Annotated[int, _training(help="Seed of the data split, the weights and the order, for all ranks.", min=0)] = 0

    replicate: Annotated[int, _fsdp(help="Groups of ranks; each group shards one whole model.", min=1)] = 1
    cpu_offload: Annotated[bool, _fsdp(help="Weights and optimizer state stay in the host's memory.")] = False

    comm_hook: Annotated[Literal["none", "bf16", "fp16", "powersgd"], _ddp(help="Compression of gradients.")] = "none"
    powersgd_rank: Annotated[int, _ddp(help="Columns of PowerSGD's matrices; fewer send less, lose more.", min=1)] = 4
    powersgd_start: Annotated[int | None, _ddp(help="Steps of plain averages. Default: --warmup-steps.", min=0)] = None
    zero1: Annotated[bool, _ddp(help="Split the optimizer state over the ranks.")] = False
    bucket_mb: Annotated[
        int | None, _ddp(help="MiB of gradients sent at a time. Default: 25, but 1 for the first.", min=1, max=LIMIT)
    ] = None
    sync_bn: Annotated[bool, _ddp(help="Batch normalisation over all ranks, on GPUs.")] = False

    tensor_parallel: Annotated[int | None, _tp(help="Neighbouring ranks sharing a layer. Default: all.", min=1)] = None

    pipeline_parallel: Annotated[int | None, _pipeline(help="Ranks of a pipeline. Default: all.", min=2)] = None
    microbatches: Annotated[int | None, _pipeline(help="Parts of a batch. Default: 2 for each rank.", min=1)] = None
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zero-bubble"], _pipeline(help="Order of forward and backward passes.")
    ] = "1f1b"

    device: Annotated[Literal["auto", "cpu", "cuda"], _speed(help="auto takes a GPU where there is one.")] = "auto"
    backend: Annotated[
        Literal["auto", "gloo", "nccl", "mpi"],
        _speed(help="What the ranks communicate through. auto: nccl between GPUs, gloo between CPUs."),
    ] = "auto"
    single_rank_group: Annotated[
        bool,
        _speed(
            help="For tests: a single process trains as several do, in a process group of one rank; so NCCL, fsdp and "
            "tp run on one GPU too."
        ),
    ] = False
    share_gpus: Annotated[
        bool,
        _speed(
            help="For tests: a node may have more processes than GPUs, which they share; they communicate through "
            "gloo, as NCCL needs a GPU for each process."
        ),
    ] = False
    bf16: Annotated[bool | None, _speed(help="bfloat16 autocast. Default: on where all devices have it.")] = None
    channels_last: Annotated[bool, _speed(help="Images as NHWC in memory.")] = True
    compile: Annotated[
        Literal["off", "default", "max-autotune"],
        _speed(
            help="Compile the model at its first step; default fuses kernels, max-autotune also tries which are the "
            "fastest, and records them as CUDA graphs."
        ),
    ] = "off"
    fused: Annotated[bool, _speed(help="The fused optimizer kernels.")] = True
    deterministic: Annotated[
        bool,
        _speed(
            help="Use only kernels that give the same bits in each run, on GPUs too. On CPUs, gradients are added up "
            "in double precision, and transformers compute in it, so that every strategy and world size gives the "
            "same bits; tp and pipeline nearly so."
        ),
    ] = False

    name: Annotated[
        str | None,
        _run(
            help="The run's folder below --runs-dir. Default: made of model, data, strategy.",
            autocompletion=_complete_runs,
        ),
    ] = None
    runs_dir: Annotated[str, _run(help="Where runs leave their files.")] = "runs"
    resume: Annotated[
        str | None,
        _run(
            help="Go on from the latest checkpoint, if there is one. With a run's folder or a checkpoint: "
            "go on from that. auto, for job scripts: as without a value, but without a check for a misspelt --name."
        ),
    ] = None
    log_every: Annotated[
        int | None,
        _run(
            help="Steps between lines of metrics.jsonl, and of a console that is no terminal. Default: 10, but 50 "
            "after step 1,000, and fewer in a run of less than 100 steps; on the console 15 seconds.",
            min=1,
        ),
    ] = None
    track: Annotated[
        Literal["none", "tensorboard", "wandb", "mlflow"],
        _run(help="Where metrics go besides metrics.jsonl: as one run of all ranks, by default without network."),
    ] = "none"
    console: Annotated[
        Literal["rank0", "all"],
        _run(
            help="Ranks whose lines the console shows; with all, each line begins with its host and rank. The run's "
            "logs/ has a file for every rank."
        ),
    ] = "rank0"
    keep_checkpoints: Annotated[int, _run(help="How many checkpoints are kept; older ones are removed.", min=1)] = 2
    blocking_save: Annotated[bool, _run(help="Training waits while a checkpoint is written.")] = False
    save_every: Annotated[float, _run(help="Minutes between checkpoints; 0: only after each epoch.", min=0.0)] = 30.0
    save_before: Annotated[
        float | None,
        _run(
            help="Stop this many minutes before the job's time limit, with a checkpoint and exit code 75. Default in "
            "the job scripts, but Slurm's: a tenth of the limit, at most 5; 0: never.",
            min=0.0,
        ),
    ] = None
    profile: Annotated[bool, _run(help="Trace some steps into the run's profile/, for ui.perfetto.dev.")] = False
    timeout_s: Annotated[int, _run(help="Seconds a collective may take; then the run ends.", min=1, max=999_999)] = 600
    preflight: Annotated[
        bool,
        _run(help="Check all nodes first, as `muster doctor --quick` does: failures end the run, warnings are shown."),
    ] = False
    hang_timeout: Annotated[
        int | None,
        _run(
            help="Seconds for which a rank may make no progress; then all ranks write their stacks, and the run ends. "
            "0: no limit. Default: 4/5 of --timeout-s, at least 60.",
            min=0,
            max=LIMIT,
        ),
    ] = None
    silence_timeout: Annotated[
        int | None,
        _run(
            help="Seconds for which a rank may give no sign of life, because it is stopped or its storage hangs; then "
            "the run ends. Default: 300.",
            min=10,
            max=LIMIT,
        ),
    ] = None

    @property
    def predicts_tokens(self) -> bool:
        """True for a transformer of train/models/gpt.py, misspelt ones too; False for a classifier of images."""
        return is_transformer(self.model)

    @property
    def pixels(self) -> int:
        """The width and height of the images, in pixels."""
        return self.image_size or (32 if self.data.partition(":")[0] in ("digits", "cifar10") else 224)

    @property
    def hang_s(self) -> int:
        """Seconds for which a rank may make no progress; 0: for ever. By default a hang is reported before the time-out
        of the collective in which the other ranks wait."""
        return max(60, self.timeout_s * 4 // 5) if self.hang_timeout is None else self.hang_timeout

    def settled(self) -> "Options":
        """These options, with the defaults that depend on others filled in."""
        optimizer = self.optimizer or ("adamw" if self.predicts_tokens else "sgd")
        lr = {"sgd": 0.01, "adamw": 0.001}[optimizer] if self.lr is None else self.lr
        return replace(self, optimizer=optimizer, lr=lr)


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The file of further options. Not in `Options`: a run's own config.toml does not name the file it came from."""

    config: Annotated[
        str | None,
        _run(help="Read options from a TOML file; the command line overrides it. A run's config.toml repeats the run."),
    ] = None


SECTIONS: dict[str, str] = {field.name: get_args(field.type)[1].rich_help_panel.lower() for field in fields(Options)}
"""The section of config.toml in which each option stands: a heading of the help text, or the option's strategy."""

STRATEGIES_WITH_OPTIONS = tuple(name for name in STRATEGIES if name in SECTIONS.values())
"""The strategies that have options of their own, which no other strategy takes."""

GUIDE = """\
Which one?  nodes  GPUs a node  when
single      1      1            as the reference for the others
dp          1      several      only to compare with ddp
ddp         any    any          the model fits on one GPU: first choice
fsdp        any    any          it does not fit; many nodes: --replicate
tp          any    2 to 8       gpt-...: a layer is too large for fsdp
pipeline    any    any          gpt-...: many nodes on a slow network
"""
"""When to use which strategy, for the help text."""


def check(strategy: str, options: Options) -> None:
    """Raises MusterError where `options` contradict each other or the strategy, on any number of ranks."""
    for other in STRATEGIES_WITH_OPTIONS:
        flags = typed(options, *(name for name, section in SECTIONS.items() if section == other))
        if flags and strategy != other:
            wrong = f"the strategy {strategy} has no option {flags.partition('=')[0]}"
            raise MusterError(wrong, seen=f"train {strategy} {flags}", fix=f"'train {other} {flags}', or leave it out")
    of_power = ("comm_hook", "powersgd_rank", "powersgd_start")
    if options.comm_hook != "powersgd" and typed(options, *of_power[1:]):
        wrong = "--powersgd-rank and --powersgd-start have no effect without --comm-hook=powersgd"
        raise MusterError(wrong, seen=typed(options, *of_power), fix="--comm-hook=powersgd, or leave them out")
    if strategy in ("tp", "pipeline") and not options.predicts_tokens:
        wrong, flag = f"the strategy {strategy} splits transformers, not {options.model}", f"--model={options.model}"
        fix = f"'train fsdp {flag}', or a transformer: --model=gpt-tiny"
        raise MusterError(wrong, seen=f"train {strategy} {flag}", fix=fix)
    of_end = typed(options, "lr_steps", "lr_end")
    if options.lr_schedule != "cosine" and of_end:
        seen = f"--lr-schedule={options.lr_schedule} {of_end}"
        raise MusterError("--lr-steps and --lr-end need --lr-schedule=cosine", seen=seen, fix="--lr-schedule=cosine")
    if strategy == "dp" and (flag := typed(options, "compile")):
        wrong = "the strategy dp copies the model at each step, and copies can't be compiled"
        raise MusterError(wrong, seen=f"train dp {flag}", fix=f"'train ddp {flag}', which is faster in any case")
    whole = typed(options, "activation_checkpoint", "compile")
    if options.schedule == "zero-bubble" and whole:
        wrong = "the zero-bubble schedule splits the backward pass; that of compiled or recomputed parts can't be split"
        fix = f"--schedule=interleaved, or leave out {whole}"
        raise MusterError(wrong, seen=f"--schedule=zero-bubble {whole}", fix=fix)
    if options.activation_checkpoint != "none" and not options.predicts_tokens:
        wrong, seen = f"activations of {options.model} can't be recomputed", typed(options, "activation_checkpoint")
        raise MusterError(wrong, seen=seen, fix="leave it out, or train a transformer: --model=gpt-tiny")
    if options.clip_norm == 0:
        wrong, fix = "gradients that are clipped to a norm of 0 change no weights", "leave it out to clip nothing"
        raise MusterError(wrong, seen=f"--clip-norm={options.clip_norm}", fix=fix)
    name = None if options.name is None else os.fsencode(options.name)
    if name is not None and (name in (b"", b".", b"..") or b"/" in name or len(name) > 255):
        wrong, fix = "a run's name is one folder name, of at most 255 bytes", "--name=NAME --runs-dir=FOLDER"
        raise MusterError(wrong, seen=f"--name={options.name}", fix=fix)
    if options.predicts_tokens:
        check_transformer(options.model)
    check_data(options.data, options.model)


def unused(options: Options) -> list[str]:
    """A note with the options that were given, but that this model, data or optimizer does not use; or none."""
    names = ["image_size", "num_classes"] if options.predicts_tokens else ["seq_len", "vocab_size"]
    names += [] if options.data in ("synthetic", "fake") else ["num_classes", "num_samples"]
    flags = typed(options, *names, *(["momentum"] if options.optimizer == "adamw" else []))
    here = f"--model={options.model} --data={options.data} --optimizer={options.optimizer}"
    return [f"no effect with {here}: {flags}"] if flags else []


def typed(options: Options, *names: str) -> str:
    """The arguments, as a user types them, for those of the options `names` that differ from their defaults."""
    return " ".join(to_argv(Options(**{name: getattr(options, name) for name in names})))
