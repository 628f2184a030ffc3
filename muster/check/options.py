"""The options of `muster doctor` and `muster bench`. Loads no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from muster.arguments import option

WHAT, ANSWER = "What", "Output"

WAIT = option(help="Seconds that ranks wait for each other.", panel=WHAT, min=1, max=999_999)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `muster doctor`: what it checks, and how it prints the result."""

    quick: Annotated[bool, option("--quick", help="Only the quick checks, as --preflight does.", panel=WHAT)] = False
    checkpoint_dir: Annotated[str, option("--checkpoint-dir", help="The folder for checkpoints.", panel=WHAT)] = "runs"
    device: Annotated[Literal["auto", "cuda", "cpu"], option(help="What trainings will run on.", panel=WHAT)] = "auto"
    timeout_s: Annotated[int, WAIT] = 60
    json: Annotated[bool, option("--json", help="Print JSON, for programs.", panel=ANSWER)] = False


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `muster bench`: what it measures, and the baseline that it compares the figures with."""

    collectives: Annotated[
        str,
        option(
            help="Some of all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send_recv, barrier, "
            "separated by commas; or all.",
            panel=WHAT,
        ),
    ] = "all"
    backend: Annotated[Literal["auto", "nccl", "gloo"], option(help="auto: nccl on GPUs.", panel=WHAT)] = "auto"
    device: Annotated[Literal["auto", "cuda", "cpu"], option(help="Where the buffers are.", panel=WHAT)] = "auto"
    min_size: Annotated[str | None, option(help="The smallest message: 1K, 4M, 1G. Default: 1K.", panel=WHAT)] = None
    max_size: Annotated[str | None, option(help="The largest. Default: 64M on gloo, 1G on nccl.", panel=WHAT)] = None
    factor: Annotated[int, option(help="Factor from one size to the next.", panel=WHAT, min=2)] = 4
    iters: Annotated[int, option(help="Timed calls of each size.", panel=WHAT, min=1)] = 20
    warmup: Annotated[int, option(help="Untimed calls before the timed ones.", panel=WHAT, min=0)] = 5
    pairwise: Annotated[
        bool, option("--pairwise", help="Measure each pair of nodes, to find a slow link or node.", panel=WHAT)
    ] = False
    allow_tcp: Annotated[bool, option("--allow-tcp", help="Accept TCP in place of RDMA.", panel=WHAT)] = False
    timeout_s: Annotated[int, WAIT] = 300
    baseline: Annotated[
        str | None,
        option(
            help="A file of --save-baseline, of the same site and number of nodes and ranks. A row fails if each of 5 "
            "passes is slower than the file's slowest by more than the factor between its slowest and fastest.",
            panel=ANSWER,
        ),
    ] = None
    save_baseline: Annotated[
        str | None,
        option("--save-baseline", help="Measure all in 5 passes, and write them there for --baseline.", panel=ANSWER),
    ] = None
    json: Annotated[bool, option("--json", help="Print JSON, for programs.", panel=ANSWER)] = False
