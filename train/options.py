"""Every option of the trainers, once, without torch.

The command line shows these fields, the launcher passes on what the user gave, and the trainer reads
the same arguments back with the same definitions: `parse(to_argv(options)) == options`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, Literal, get_type_hints

import typer

STRATEGIES = ("single", "dp", "ddp", "fsdp", "tp", "pipeline")

IN_ONE_PROCESS = ("single", "dp")
"""Strategies that are started as one process, whatever there is."""

MODEL, DATA, TRAINING, SPEED, RUN = "Model", "Data", "Training", "Speed", "Run"
STRATEGY = "Strategy"


def option(*names: str, help: str, panel: str, **limits: Any) -> Any:
    """A typer option under the heading `panel` of the help text."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **limits)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, on what, how long; the same for every strategy."""

    model: Annotated[
        str,
        option(
            help="Any classification model of torchvision (resnet18, resnet50, vit_b_16 ...), or a transformer that "
            "predicts the next token: gpt-tiny, gpt-small, gpt-124m, gpt-1b, gpt-8b.",
            panel=MODEL,
        ),
    ] = "resnet18"
    activation_checkpoint: Annotated[
        Literal["none", "selective", "full"],
        option(
            help="What a transformer's layers compute again in the backward pass, to save memory: nothing, all but "
            "matrix products and attention, or all.",
            panel=MODEL,
        ),
    ] = "none"
    data: Annotated[
        str,
        option(
            help="Images: synthetic, fake, digits, cifar10:FOLDER or imagefolder:FOLDER. Tokens: synthetic, or "
            "tokens:PATH of a text, of a folder with texts (both as bytes), or of a .bin, .u16, .u32 or .npy file.",
            panel=DATA,
        ),
    ] = "digits"
    image_size: Annotated[
        int | None, option(help="Pixels a side. Default: 32 for digits and cifar10, else 224.", panel=DATA, min=8)
    ] = None
    seq_len: Annotated[
        int | None, option(help="Tokens of a sequence. Default: the model's context.", panel=DATA, min=2)
    ] = None
    vocab_size: Annotated[
        int | None,
        option(help="Different tokens. Default: 256 of bytes, else as many as the file shows.", panel=DATA, min=2),
    ] = None
    num_classes: Annotated[int, option(help="Classes of the synthetic and fake data.", panel=DATA, min=2)] = 1000
    num_samples: Annotated[
        int, option(help="Training samples of the synthetic and fake data; a tenth more validates.", panel=DATA, min=1)
    ] = 1280
    train_num_workers: Annotated[
        int, option(help="Processes that load training data, for each rank; 0 loads in the trainer.", panel=DATA, min=0)
    ] = 0
    valid_num_workers: Annotated[
        int, option(help="Processes that load validation data, for each rank.", panel=DATA, min=0)
    ] = 0
    on_bad_sample: Annotated[
        Literal["stop", "skip"], option(help="What a sample that can't be read does to the run.", panel=DATA)
    ] = "stop"
    epochs: Annotated[int, option(help="Passes over the training data.", panel=TRAINING, min=1)] = 10
    batch_size: Annotated[int, option(help="Samples of one rank in one micro-batch.", panel=TRAINING, min=1)] = 32
    accumulate: Annotated[
        int, option(help="Micro-batches that each rank adds up before one step.", panel=TRAINING, min=1)
    ] = 1
    max_steps: Annotated[int | None, option(help="Stop after this many steps in all.", panel=TRAINING, min=1)] = None
    optimizer: Annotated[
        Literal["sgd", "adamw"] | None,
        option(help="The optimizer. Default: sgd, and adamw for transformers.", panel=TRAINING),
    ] = None
    lr: Annotated[
        float | None,
        option(help="Learning rate of one rank. Default: 0.01 with sgd, 0.001 with adamw.", panel=TRAINING, min=0.0),
    ] = None
    lr_scale: Annotated[
        Literal["none", "linear", "sqrt"],
        option(help="How the learning rate grows with the number of micro-batches in a step.", panel=TRAINING),
    ] = "none"
    warmup_steps: Annotated[
        int, option(help="Steps over which the learning rate rises from nearly 0.", panel=TRAINING, min=0)
    ] = 20
    momentum: Annotated[float, option(help="Momentum of sgd.", panel=TRAINING, min=0.0, max=1.0)] = 0.9
    weight_decay: Annotated[float, option(help="Weight decay.", panel=TRAINING, min=0.0)] = 1e-4
    clip_norm: Annotated[
        float | None,
        option(help="The largest norm of all gradients together; longer ones are cut to it.", panel=TRAINING, min=0.0),
    ] = None
    seed: Annotated[int, option(help="One seed for all ranks: split, weights, order.", panel=TRAINING, min=0)] = 0
    replicate: Annotated[
        int, option(help="fsdp: groups of ranks, each with a whole model cut over its ranks.", panel=STRATEGY, min=1)
    ] = 1
    cpu_offload: Annotated[
        bool,
        option("--cpu-offload", help="fsdp: weights and moments stay in the host's memory.", panel=STRATEGY),
    ] = False
    tensor_parallel: Annotated[
        int | None,
        option(help="tp: neighbouring ranks that cut each layer between them. Default: all.", panel=STRATEGY, min=1),
    ] = None
    pipeline_parallel: Annotated[
        int | None, option(help="pipeline: neighbouring ranks in a line. Default: all.", panel=STRATEGY, min=2)
    ] = None
    microbatches: Annotated[
        int | None,
        option(help="pipeline: parts of a batch that follow each other. Default: 2 a rank.", panel=STRATEGY, min=1),
    ] = None
    schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved", "zero-bubble"],
        option(help="pipeline: in which order they go there and back.", panel=STRATEGY),
    ] = "1f1b"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], option(help="auto takes a GPU where there is one.", panel=SPEED)
    ] = "auto"
    backend: Annotated[
        Literal["auto", "gloo", "nccl", "mpi"],
        option(help="What the ranks speak through. auto: nccl between GPUs, gloo between CPUs.", panel=SPEED),
    ] = "auto"
    bf16: Annotated[
        bool | None,
        option("--bf16/--no-bf16", help="bfloat16 autocast. Default: on where the hardware has it.", panel=SPEED),
    ] = None
    channels_last: Annotated[
        bool, option("--channels-last/--no-channels-last", help="Images as NHWC in memory.", panel=SPEED)
    ] = True
    fused: Annotated[bool, option("--fused/--no-fused", help="The fused optimizer kernels.", panel=SPEED)] = True
    name: Annotated[
        str | None, option(help="The run's folder below --runs-dir. Default: made of model, data, strategy.", panel=RUN)
    ] = None
    runs_dir: Annotated[str, option(help="Where runs leave their files.", panel=RUN)] = "runs"
    resume: Annotated[
        str | None,
        option(
            help="Continue: 'auto' (or nothing after it) takes the run's latest checkpoint, else a run's folder or a "
            "checkpoint.",
            panel=RUN,
        ),
    ] = None
    keep_checkpoints: Annotated[
        int, option(help="How many checkpoints stay; the older ones are removed.", panel=RUN, min=1)
    ] = 2
    blocking_save: Annotated[
        bool, option("--blocking-save", help="Write checkpoints while training waits, not behind it.", panel=RUN)
    ] = False
    timeout_s: Annotated[
        int, option(help="Seconds that a collective operation may take before the run is ended.", panel=RUN, min=1)
    ] = 600

    @property
    def predicts_tokens(self) -> bool:
        """True for a transformer of train/models/gpt.py, misspelt ones too; False for a classifier of images."""
        return self.model.lower().startswith("gpt")

    def settled(self) -> "Options":
        """These options, with the defaults that depend on others filled in."""
        optimizer = self.optimizer or ("adamw" if self.predicts_tokens else "sgd")
        lr = {"sgd": 0.01, "adamw": 0.001}[optimizer] if self.lr is None else self.lr
        return replace(self, optimizer=optimizer, lr=lr)


def normalise(argv: Sequence[str]) -> list[str]:
    """`argv` with a bare `--resume` written out as `--resume auto`."""
    words = list(argv)
    for index in range(len(words) - 1, -1, -1):
        last = index + 1 == len(words)
        if words[index] == "--resume" and (last or words[index + 1].startswith("-")):
            words.insert(index + 1, "auto")
    return words


def command(function: Callable[..., None], *groups: type, **extra: inspect.Parameter) -> Callable[..., None]:
    """A callable for `typer.Typer().command()` whose options are the fields of the dataclasses `groups`.

    It calls `function` with one instance of each group, then the parameters of `extra` (arguments, contexts) by name.
    """
    parameters = list(extra.values())
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=default
                )
            )

    def call(**values: Any) -> None:
        instances = [group(**{field.name: values.pop(field.name) for field in fields(group)}) for group in groups]
        function(*instances, **values)

    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def to_argv(options: Any) -> list[str]:
    """The arguments that say what differs from the defaults: what the launcher passes on to the trainer."""
    argv: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv.append(f"--{flag}={value}")
    return argv


def parse(argv: Sequence[str]) -> tuple[str, Options]:
    """The strategy and the options that `argv` (`["ddp", "--epochs=3"]`) stands for.

    Raises:
        typer.TyperException: a strategy, option or value that does not exist.
        SystemExit: with code 0, after --help.
    """
    parsed: list[tuple[str, Options]] = []
    app = typer.Typer(add_completion=False)
    for strategy in STRATEGIES:

        def chosen(options: Options, strategy: str = strategy) -> None:
            parsed.append((strategy, options))

        app.command(strategy)(command(chosen, Options))
    typer.main.get_command(app).main(args=normalise(argv), prog_name="train", standalone_mode=False)
    if not parsed:
        raise SystemExit(0)  # --help has said what it had to say
    return parsed[0]
