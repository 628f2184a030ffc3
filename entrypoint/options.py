"""The options of a launch, which all launching commands share, and those of `muster run`, `detect`, `env` and `job`."""

import os
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from muster.arguments import option, to_argv
from muster.errors import MusterError

_launch = partial(option, panel="Launch (found automatically in a job)")
_torchrun = partial(option, panel="Launch (torchrun's own, where it starts the ranks)")
_host = partial(option, panel="This site and its network (found automatically)")
_look = partial(option, panel="Look first")
_kubernetes = partial(option, panel="Kubernetes")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The user's options for a launch; those that are None are detected, or have a default."""

    nnodes: Annotated[str | None, _launch(help="Number of nodes; MIN:MAX goes on with fewer when some die.")] = None
    node_rank: Annotated[int | None, _launch(help="Rank of this node, from 0.", min=0)] = None
    nproc_per_node: Annotated[str | None, _launch(help="Processes on each node: a number, gpu, cpu or auto.")] = None
    max_restarts: Annotated[
        int | None,
        _launch(
            help="How often the ranks are started again when one dies; trainings go on from their last checkpoint. "
            "Default: 0, and 3 with --nnodes MIN:MAX.",
            min=0,
        ),
    ] = None
    numa_binding: Annotated[
        Literal["node", "socket", "exclusive", "core-complex"] | None,
        _launch(help="Bind each rank to the cores near its GPU, as torchrun does it; needs GPUs and numactl."),
    ] = None
    spawn: Annotated[int | None, _launch(help="Start this many processes by torch.multiprocessing.", min=1)] = None
    master_addr: Annotated[str | None, _launch(help="Name or address of the node with node rank 0.")] = None
    master_port: Annotated[int | None, _launch(help="Free port on that node.", min=1, max=65535)] = None
    rendezvous_dir: Annotated[
        str,
        _launch(help="Folder that all hosts share, where the ranks find each other if there is no list of the hosts."),
    ] = "."
    address_suffix: Annotated[
        str,
        _launch(
            help="Suffix of the hosts' names on the fabric: i, if host jwb0001 has the name jwb0001i there.",
            envvar="MUSTER_ADDRESS_SUFFIX",
        ),
    ] = ""
    interface: Annotated[
        str | None,
        _launch(
            help="Network interface for NCCL and gloo. Default: the one that leads to the master.",
            envvar="MUSTER_INTERFACE",
        ),
    ] = None
    rdzv_timeout: Annotated[int, _launch(help="Seconds that nodes wait for each other.", min=1, max=999_999)] = 900
    site: Annotated[
        str,
        _host(
            help="Site whose profile gives defaults: its name or file; auto recognises it, off uses none.",
            envvar="MUSTER_SITE",
        ),
    ] = "auto"
    fabric: Annotated[
        str,
        _host(
            help="The network whose libraries come from the host at /host: auto, off, infiniband, slingshot, efa, tcp.",
            envvar="MUSTER_FABRIC",
        ),
    ] = "auto"
    dry_run: Annotated[bool, _look("--dry-run", help="Print the command and its variables; start nothing.")] = False
    env_file: Annotated[str | None, _look(help="Read a recorded environment; implies --dry-run.")] = None
    debug: Annotated[bool, _look("--debug", help="Show tracebacks.")] = False
    debug_distributed: Annotated[
        bool,
        _look(
            "--debug-distributed",
            help="Have torch and NCCL log what they do, and report ranks that call different collectives. Slow.",
        ),
    ] = False

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes, or the largest of MIN:MAX."""
        return self._range()[1]

    @property
    def min_nodes(self) -> int | None:
        """The smallest of MIN:MAX; None where it is one number, or none."""
        return self._range()[0]

    @property
    def nproc_name(self) -> str:
        """The option that gives the number of processes on each node."""
        return "--spawn" if self.spawn else "--nproc-per-node"

    @property
    def num_restarts(self) -> int:
        """The most restarts of the ranks, as given or by default; going on with fewer nodes is a restart too."""
        default = 0 if self.min_nodes is None else 3
        return default if self.max_restarts is None else self.max_restarts

    def _range(self) -> tuple[int | None, int | None]:
        if self.nnodes is None:
            return None, None
        match = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", str(self.nnodes))
        low, high = (int(match[1]) if match and match[1] else None, int(match[2]) if match else 0)
        if high < 1 or (low is not None and not 1 <= low <= high):
            raise MusterError(
                "--nnodes is a number of nodes from 1, or MIN:MAX", seen=f"--nnodes={self.nnodes}", fix="--nnodes 2"
            )
        return low, high


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """The options by which `muster run` starts the user's program; the names are torchrun's."""

    module: Annotated[bool, _launch("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False
    no_python: Annotated[bool, _launch("--no-python", help="SCRIPT is a program, not run by python.")] = False
    framework: Annotated[
        Literal["torch", "jax", "tensorflow"],
        _launch(help="Whose variables are set. For jax and tensorflow SCRIPT is a whole command, run once per task."),
    ] = "torch"


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """Further options of torchrun: the first five are decided by the launch, the others are passed on as they are.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html
    """

    standalone: Annotated[bool, _torchrun("--standalone", help="As --nnodes 1.")] = False
    rdzv_backend: Annotated[
        Literal["static", "c10d"] | None, _torchrun(help="Without effect: nodes meet at the same place with both.")
    ] = None
    rdzv_endpoint: Annotated[str | None, _torchrun(help="HOST:PORT, as --master-addr and --master-port.")] = None
    rdzv_conf: Annotated[str, _torchrun(help="join_timeout=SECONDS or timeout=SECONDS, as --rdzv-timeout.")] = ""
    signals_to_handle: Annotated[
        str, _torchrun(help="Any of SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP, SIGQUIT: all are handled anyway.")
    ] = ""
    rdzv_id: Annotated[str | None, _torchrun(help="Name of this launch. Default: the job's id.")] = None
    local_addr: Annotated[str | None, _torchrun(help="This node's address.")] = None
    role: Annotated[str | None, _torchrun(help="Name of the ranks in torchrun's messages.")] = None
    tee: Annotated[str | None, _torchrun("--tee", "-t", help="3: to the console, by rank, and to --log-dir.")] = None
    redirects: Annotated[str | None, _torchrun("--redirects", "-r", help="3: output to files in --log-dir.")] = None
    log_line_prefix_template: Annotated[str | None, _torchrun(help="Before each line of --tee: '${rank}: '.")] = None
    log_dir: Annotated[str | None, _torchrun(help="Folder of a log for each rank.")] = None
    local_ranks_filter: Annotated[str | None, _torchrun(help="0,2: only these write to the console.")] = None
    logs_specs: Annotated[str | None, _torchrun(help="Name of a plug-in for logs.")] = None
    duplicate_stdout_filters: Annotated[str | None, _torchrun(help="Lines that go to one more file.")] = None
    duplicate_stderr_filters: Annotated[str | None, _torchrun(help="Lines that go to one more file.")] = None
    event_log_handler: Annotated[str | None, _torchrun(help="Name of a plug-in for events.")] = None
    monitor_interval: Annotated[float | None, _torchrun(help="Seconds between checks of the ranks.", min=0.001)] = None
    shutdown_timeout: Annotated[int | None, _torchrun(help="Seconds from SIGTERM to SIGKILL: 30.", min=0)] = None
    start_method: Annotated[Literal["spawn", "fork", "forkserver"] | None, _torchrun(help="For functions only.")] = None
    run_path: Annotated[bool, _torchrun("--run-path", help="Run SCRIPT by runpy.")] = False
    virtual_local_rank: Annotated[
        bool, _torchrun("--virtual-local-rank", help="Each rank sees its own GPU alone, with LOCAL_RANK 0.")
    ] = False

    def passed_on(self) -> tuple[str, ...]:
        """The arguments for torchrun after the launch's own: of a repeated option torchrun takes the last one."""
        decided = ("--standalone", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--signals-to-handle")
        words = (word for word in to_argv(self) if not word.startswith(decided))
        return tuple(word for word in words if word.partition("=")[1:] != ("=", ""))  # an empty value means not given

    def applied(self, options: LaunchOptions) -> LaunchOptions:
        """`options` with the values of torchrun's options that mean the same.

        Raises:
            MusterError: they contradict each other, or the launch.
        """
        if self.standalone:
            if options.num_nodes not in (None, 1):
                raise MusterError(
                    "--standalone is a launch of one node",
                    seen=f"--nnodes={options.nnodes}",
                    fix="leave one of them out",
                )
            options = replace(options, nnodes="1")
        if self.rdzv_endpoint is not None and not self.standalone:
            try:
                place = urlsplit(f"//{self.rdzv_endpoint}")
                host, port = place.hostname, place.port
                if place.netloc != self.rdzv_endpoint:
                    raise ValueError
            except ValueError:
                raise MusterError(
                    "--rdzv-endpoint is HOST:PORT", seen=self.rdzv_endpoint, fix="--rdzv-endpoint node01:29500"
                ) from None
            if port:  # 0 is a free port
                options = replace(options, master_port=options.master_port or port)
            if options.num_nodes not in (None, 1):
                options = replace(options, master_addr=options.master_addr or host)
        for word in filter(None, self.rdzv_conf.split(",")):
            if (seconds := re.fullmatch("(?:join_)?timeout=(0*[1-9][0-9]{0,5})", word)) is None:
                raise MusterError(
                    "only the time-out of --rdzv-conf can be set: the launch decides the rest by the job",
                    seen=f"--rdzv-conf={self.rdzv_conf}",
                    fix="leave it out; for a time-out: --rdzv-timeout SECONDS",
                )
            options = replace(options, rdzv_timeout=int(seconds[1]))
        # torch names a folder after it.
        if not re.fullmatch(rb"[^/]{0,200}", os.fsencode(self.rdzv_id or "")):
            wrong = "--rdzv-id is a name of at most 200 bytes, without /"
            raise MusterError(wrong, seen=f"--rdzv-id={self.rdzv_id}", fix="--rdzv-id NAME, or leave it out")
        handled = {"SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGQUIT"}
        if not set(filter(None, self.signals_to_handle.split(","))) <= handled:
            raise MusterError(
                "not all of these signals are handled",
                seen=f"--signals-to-handle={self.signals_to_handle}",
                fix=f"--signals-to-handle={','.join(sorted(handled))}, or some of them",
            )
        return options


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """The options of `muster detect`."""

    as_json: Annotated[bool, _look("--json", help="Print JSON, for programs.")] = False
    record: Annotated[str | None, _look(help="Write this environment, without secrets, to a new file.")] = None


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """The options of `muster env`, which prints a framework's variables, or container options that pass on a job's."""

    format: Annotated[
        Literal["torch", "jax", "tensorflow"] | None,
        _look(help="The framework that reads the variables. Default: torch."),
    ] = None
    docker_args: Annotated[bool, _look("--docker-args", help="Options for `docker run`.")] = False
    apptainer_args: Annotated[bool, _look("--apptainer-args", help="Options for `apptainer exec`, for eval.")] = False

    def __post_init__(self) -> None:
        given = {"--docker-args": self.docker_args, "--apptainer-args": self.apptainer_args, "--format": self.format}
        names = [name for name, value in given.items() if value]
        if len(names) > 1:
            raise MusterError("muster env takes only one of these", seen=" ".join(names), fix=f"muster env {names[0]}")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options of `muster job`, which describe the job."""

    nodes: Annotated[int, typer.Option(help="Nodes of the job.", min=1, max=100_000)] = 2
    time: Annotated[str, typer.Option(help="Time limit: 1:30:00, 2-12:00:00 or 90m.")] = "1:00:00"
    image: Annotated[str, typer.Option(help="SIF file; for Kubernetes, podman-hpc: name in a registry.")] = "muster.sif"
    account: Annotated[str | None, typer.Option(help="The project that pays.")] = None
    partition: Annotated[str | None, typer.Option(help="Partition or queue. Default: the profile's.")] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs of a node. Default: the profile's.", min=0, max=1000)] = None
    name: Annotated[str, typer.Option(help="The job's name.")] = "muster"
    kind: Annotated[str | None, _kubernetes(help="Which manifest: pytorchjob, jobset or job. Default: job.")] = None
    claim: Annotated[str | None, _kubernetes(help="The PersistentVolumeClaim for runs. Default: muster.")] = None
    device: Annotated[
        list[str] | None,
        _kubernetes(help="A further resource of each pod, for RDMA: rdma/hca_shared_devices_a=1. May be repeated."),
    ] = None
