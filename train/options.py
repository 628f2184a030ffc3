"""Every option of the trainers, once, without torch.

The command line shows these fields, the launcher passes on what the user gave, and the trainer reads the same
arguments back with the same definitions: see arguments.py.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from train.inputs import RUN, SPEED, STRATEGY, TRAINING, Inputs, option

STRATEGIES = ("single", "dp", "ddp", "fsdp", "tp", "pipeline")

IN_ONE_PROCESS = ("single", "dp")
"""Strategies that are started as one process, whatever there is."""


@dataclass(frozen=True, kw_only=True)
class Options(Inputs):
    """What to train, on what (inputs.py), how long; the same for every strategy."""

    epochs: Annotated[int, option(help="Passes over the training data.", panel=TRAINING, min=1)] = 10
    batch_size: Annotated[int, option(help="Samples of one rank in one micro-batch.", panel=TRAINING, min=1)] = 32
    accumulate: Annotated[
        int, option(help="Micro-batches that each rank adds up before one step.", panel=TRAINING, min=1)
    ] = 1
    max_steps: Annotated[int | None, option(help="Stop after this many steps in all.", panel=TRAINING, min=1)] = None
    optimizer: Annotated[
        Literal["sgd", "adamw", "lars"] | None,
        option(
            help="The optimizer. Default: sgd, and adamw for transformers; lars is for very large batches.",
            panel=TRAINING,
        ),
    ] = None
    lr: Annotated[
        float | None,
        option(
            help="Learning rate of one rank. Default: 0.01 with sgd, 0.001 with adamw, 2 with lars.",
            panel=TRAINING,
            min=0.0,
        ),
    ] = None
    lr_scale: Annotated[
        Literal["none", "linear", "sqrt"],
        option(help="How the learning rate grows with the number of micro-batches in a step.", panel=TRAINING),
    ] = "none"
    warmup_steps: Annotated[
        int, option(help="Steps over which the learning rate rises from nearly 0.", panel=TRAINING, min=0)
    ] = 20
    lr_schedule: Annotated[
        Literal["constant", "cosine"],
        option(
            help="The learning rate after its rise: as it is, or down to --lr-end in half a cosine.", panel=TRAINING
        ),
    ] = "constant"
    lr_steps: Annotated[
        int | None,
        option(
            help="The step at which the cosine ends. Default: the last by --epochs or --max-steps.",
            panel=TRAINING,
            min=1,
        ),
    ] = None
    lr_end: Annotated[
        float, option(help="Where the cosine ends, as a share of the learning rate.", panel=TRAINING, min=0.0, max=1.0)
    ] = 0.0
    momentum: Annotated[float, option(help="Momentum of sgd and lars.", panel=TRAINING, min=0.0, max=1.0)] = 0.9
    weight_decay: Annotated[float, option(help="Weight decay.", panel=TRAINING, min=0.0)] = 1e-4
    decay_norms: Annotated[
        bool,
        option("--decay-norms/--no-decay-norms", help="Weight decay on norms and biases too.", panel=TRAINING),
    ] = False
    ema: Annotated[
        float | None,
        option(
            help="Keep a moving average of the weights with this decay (0.9999), which then validates.",
            panel=TRAINING,
            min=0.0,
            max=1.0,
        ),
    ] = None
    label_smoothing: Annotated[
        float,
        option(help="The share of each target that goes to all classes alike.", panel=TRAINING, min=0.0, max=1.0),
    ] = 0.0
    mixup: Annotated[
        float,
        option(
            help="Mix pairs of images, by shares of a beta distribution with this parameter.", panel=TRAINING, min=0.0
        ),
    ] = 0.0
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
    comm_hook: Annotated[
        Literal["none", "bf16", "fp16", "powersgd"],
        option(help="ddp: what gradients become on their way between ranks.", panel=STRATEGY),
    ] = "none"
    powersgd_rank: Annotated[
        int, option(help="ddp: columns of PowerSGD's matrices; fewer send less, and learn less.", panel=STRATEGY, min=1)
    ] = 4
    powersgd_start: Annotated[
        int | None,
        option(help="ddp: steps before PowerSGD, by plain averages. Default: --warmup-steps.", panel=STRATEGY, min=0),
    ] = None
    zero1: Annotated[
        bool, option("--zero1", help="ddp: the optimizer's moments are dealt out to the ranks.", panel=STRATEGY)
    ] = False
    local_sgd: Annotated[
        int | None,
        option(help="ddp: train apart, and average the weights every this many steps.", panel=STRATEGY, min=1),
    ] = None
    local_sgd_start: Annotated[
        int, option(help="ddp: steps before that, by averages of gradients.", panel=STRATEGY, min=0)
    ] = 0
    static_graph: Annotated[
        bool, option("--static-graph", help="ddp: every step uses the same weights in the same order.", panel=STRATEGY)
    ] = False
    bucket_view: Annotated[
        bool,
        option("--bucket-view/--no-bucket-view", help="ddp: gradients lie where they are sent from.", panel=STRATEGY),
    ] = True
    bucket_mb: Annotated[
        int | None,
        option(
            help="ddp: MiB of gradients that are sent at a time. Default: 25, but 1 at first.", panel=STRATEGY, min=1
        ),
    ] = None
    sync_bn: Annotated[
        bool, option("--sync-bn", help="ddp: normalise over the batches of all ranks, on GPUs.", panel=STRATEGY)
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
    compile: Annotated[
        Literal["off", "default", "max-autotune"],
        option(
            help="Compile the model at its first step: default fuses kernels, max-autotune also tries which are the "
            "fastest, and records them as CUDA graphs.",
            panel=SPEED,
        ),
    ] = "off"
    fused: Annotated[bool, option("--fused/--no-fused", help="The fused optimizer kernels.", panel=SPEED)] = True
    deterministic: Annotated[
        bool,
        option(
            "--deterministic",
            help="Only kernels that give the same bits at each run, on GPUs too; on CPUs transformers compute in "
            "double precision, so that the bits are those of every strategy.",
            panel=SPEED,
        ),
    ] = False
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
    track: Annotated[
        Literal["none", "tensorboard", "wandb", "mlflow"],
        option(help="Where the run's numbers go besides metrics.jsonl: one run a job, without network.", panel=RUN),
    ] = "none"
    console: Annotated[
        Literal["rank0", "all"],
        option(
            help="Whose lines the console shows; with all, the host and the rank stand before each. The run's logs/ "
            "has a file of every rank.",
            panel=RUN,
        ),
    ] = "rank0"
    keep_checkpoints: Annotated[
        int, option(help="How many checkpoints stay; the older ones are removed.", panel=RUN, min=1)
    ] = 2
    blocking_save: Annotated[
        bool, option("--blocking-save", help="Write checkpoints while training waits, not behind it.", panel=RUN)
    ] = False
    save_every: Annotated[
        float,
        option(
            help="Minutes from one checkpoint to the next within an epoch; 0: only after each epoch.",
            panel=RUN,
            min=0.0,
        ),
    ] = 30.0
    save_before: Annotated[
        float | None,
        option(
            help="Stop so many minutes before the job's time limit, with a checkpoint and exit code 75. Default: 5, or "
            "a tenth of the limit, in the scripts of `muster job`; 0: never.",
            panel=RUN,
            min=0.0,
        ),
    ] = None
    profile: Annotated[
        bool,
        option(
            "--profile",
            help="Trace some steps of rank 0 into the run's folder, for ui.perfetto.dev; they are not timed.",
            panel=RUN,
        ),
    ] = False
    timeout_s: Annotated[
        int, option(help="Seconds that a collective operation may take before the run is ended.", panel=RUN, min=1)
    ] = 600
    preflight: Annotated[
        bool,
        option(
            "--preflight",
            help="Look at all nodes first, as `muster doctor --quick` does: faults end the run, warnings are said.",
            panel=RUN,
        ),
    ] = False
    hang_timeout: Annotated[
        int | None,
        option(
            help="Seconds in which a rank may stand still; then all write their stacks, and the run ends. 0: for ever. "
            "Default: 4/5 of --timeout-s, and 60 at least.",
            panel=RUN,
            min=0,
        ),
    ] = None

    @property
    def predicts_tokens(self) -> bool:
        """True for a transformer of train/models/gpt.py, misspelt ones too; False for a classifier of images."""
        return self.model.lower().startswith("gpt")

    @property
    def pixels(self) -> int:
        """Pixels a side of the images."""
        return self.image_size or (32 if self.data.partition(":")[0] in ("digits", "cifar10") else 224)

    @property
    def hang_s(self) -> int:
        """Seconds in which a rank may stand still; 0: for ever. By default a hang is told before the time-out of the
        collective in which the other ranks wait."""
        return max(60, self.timeout_s * 4 // 5) if self.hang_timeout is None else self.hang_timeout

    def settled(self) -> "Options":
        """These options, with the defaults that depend on others filled in."""
        optimizer = self.optimizer or ("adamw" if self.predicts_tokens else "sgd")
        lr = {"sgd": 0.01, "adamw": 0.001, "lars": 2.0}[optimizer] if self.lr is None else self.lr
        return replace(self, optimizer=optimizer, lr=lr)
