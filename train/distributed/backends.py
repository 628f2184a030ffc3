"""The communication backend of the ranks, and the process group of all of them."""

import os
import socket
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from muster.errors import ExitCode, MusterError
from muster.train.distributed.world import World, silent_stdout
from muster.train.health.faults import SharedFault, is_echo
from muster.units import listed
from muster.variables import LaunchVariable


def backend_for(wanted: str, device: torch.device, strategy: str, *, share_gpus: bool = False) -> str:
    """The backend for ranks on devices like `device`, where `--backend` is `wanted`.

    Raises:
        MusterError: this torch does not have it, or it lacks operations that `strategy` needs on these devices.
    """
    fitting = "nccl" if device.type == "cuda" and not share_gpus else "gloo"
    if wanted == "auto":
        wanted = fitting
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    has = ", ".join(name for name, there in known.items() if there) or "none"
    fix = f"--backend={fitting}, or leave it out"
    if not known[wanted]:
        wrong = f"this torch was built without {wanted.upper()}"
        raise MusterError(wrong, seen=f"--backend={wanted}, torch {torch.__version__} has: {has}", fix=fix)
    if wanted == "nccl" and device.type == "cpu":
        raise MusterError("nccl communicates between GPUs only", seen="--backend=nccl, training on the CPU", fix=fix)
    if wanted == "nccl" and share_gpus:
        raise MusterError("nccl needs a GPU for each process", seen="--backend=nccl --share-gpus", fix=fix)
    if wanted != "nccl" and device.type == "cuda" and strategy not in ("single", "dp", "ddp"):
        # Source: https://docs.pytorch.org/docs/stable/distributed.html#backends: on GPUs gloo has broadcast and
        # all_reduce only, which is what ddp needs; what MPI has depends on how it was built.
        wrong = f"the strategy {strategy} gathers and scatters on GPUs, which only nccl is sure to support"
        fix = "leave out --share-gpus" if share_gpus else fix
        raise MusterError(wrong, seen=f"--backend={wanted}, training on GPUs", fix=f"{fix}; ddp works over {wanted}")
    return wanted


def compare_devices(world: World, *, share_gpus: bool = False) -> None:
    """Checks that each rank has a GPU of its own, or that all compute on CPUs.

    Args:
        share_gpus: whether several ranks may have the same GPU.

    Raises:
        SharedFault: on all ranks: some have a GPU and others none, so that they would wait for each other; or two have
            the same one, which NCCL would refuse with an error of its own.
    """
    device = world.device
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu {world.rank}"
    places = world.gather([world.host, name])
    on_cpu = [host for host, name in places if name.startswith("cpu")]
    if 0 < len(on_cpu) < world.world_size:
        raise SharedFault(
            "the ranks do not all have the same kind of device",
            seen=f"CPUs on {listed(on_cpu)}, GPUs for the other ranks",
            fix="ask for as many GPUs on each node as it has ranks, or give --device=cpu",
        )
    for rank, place in enumerate(places):
        first = places.index(place)
        if first != rank and not share_gpus:
            raise SharedFault(
                "two ranks would share one GPU",
                seen=f"ranks {first} and {rank} on {place[0]} both see GPU {place[1]}",
                # Not srun --gpus-per-task=1: NCCL has no direct way to a GPU that a task does not see.
                fix="start one process a GPU, each of which sees all GPUs of its node: one task a node, or "
                "srun --gpu-bind=none",
            )


def compare_fabrics(world: World) -> None:
    """Checks that the launches of all nodes found the same fabric, as NCCL needs it.

    Raises:
        SharedFault: on all ranks: over different fabrics NCCL hangs, or fails with an error of its own.
    """
    hosts = world.hosts_by(os.environ.get(LaunchVariable.FABRIC_FOUND, "tcp"))
    if len(hosts) > 1:
        raise SharedFault(
            "the nodes found different fabrics",
            seen="; ".join(f"{fabric} on {names}" for fabric, names in hosts.items()),
            fix="compare what `muster fabric plan` says on them; or use TCP, at a fraction of the speed: --fabric tcp",
        )


def open_group(world: World, *, has_powersgd: bool = False) -> None:
    """Starts the process group of `world`, by its backend, if it has one.

    Args:
        world: with its device, backend and store.
        has_powersgd: whether PowerSGD compresses the gradients: its second round waits for its third in a thread of
            gloo, which therefore needs two threads.

    Raises:
        MusterError: the backend is MPI, but MPI did not start the ranks; or this host lacks the network interface that
            gloo is to use; or gloo's connections to other ranks fail, as behind a firewall.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.backend is None:
        return
    # torch records the last collectives of each rank, if the buffer has a size before the process group starts.
    # Source: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    if not os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    torchs: Any = dist  # torch has these names without exporting them
    if world.backend == "gloo" and torchs.get_debug_level() == torchs.DebugLevel.DETAIL:
        # The group would be wrapped, and over gloo DistributedDataParallel of torch 2.10 to 2.15 crashes on that.
        torchs.set_debug_level(torchs.DebugLevel.INFO)
    if not has_powersgd and dist.is_gloo_available():
        run_gloo_on_one_thread()
    if world.backend != "mpi":
        check_interfaces(world.host)
    with world.status.connecting(), silent_stdout() if world.backend == "gloo" else nullcontext():
        if world.backend == "mpi":
            open_mpi(world)
            return
        try:
            dist.init_process_group(
                world.backend,
                store=distributed_c10d.PrefixStore("group", world.store),
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=world.timeout_s),
                device_id=world.device if "nccl" in world.backend else None,
            )
        except RuntimeError as error:
            # gloo's connections, at ports that the kernel chooses; `is_echo`: the other rank has failed before.
            if "connectFullMesh" not in str(error) or is_echo(error):
                raise
            raise MusterError(
                "the ranks reach the same store, and can't connect to each other",
                seen=f"gloo: {str(error).splitlines()[0].rpartition('] ')[2]}",  # without the place in its source
                fix="muster doctor, on the same nodes, names ports that are closed; another network: --interface NAME",
                code=ExitCode.FAILED,
            ) from error


def check_interfaces(host: str) -> None:
    """Checks that this host has the network interfaces that gloo is to use; ranks with NCCL have groups of gloo too.

    Raises:
        MusterError: an interface does not exist, or has no address.
    """
    families = (socket.AF_INET, socket.AF_INET6)
    here = [name for name, entries in psutil.net_if_addrs().items() if any(each.family in families for each in entries)]
    text = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if missing := [name for name in text.split(",") if name and name not in here]:
        raise MusterError(
            f"{host} has no network interface {missing[0]} with an address",
            seen=f"GLOO_SOCKET_IFNAME={text}, set by --interface or by the user; there are: {' '.join(here)}",
            fix="--interface NAME, with one that all nodes have; or leave out both the option and the variable",
        )


@cache
def run_gloo_on_one_thread() -> None:
    """Gives each group of gloo that is made from now on one worker thread in place of two.

    The two of torch 2.10 to 2.15 set the name of the last collective without a lock. Names of more than 15 letters, as
    of tensor parallelism, are freed twice: "malloc(): unaligned tcache chunk detected", or a segmentation fault.
    torch has no option for the number of threads, but looks this class up in its module for every group of gloo.
    """
    module: Any = distributed_c10d
    torchs = module.ProcessGroupGloo

    class ProcessGroupGloo(torchs):
        def __init__(self, store: Any, rank: int, size: int, *, timeout: timedelta, **more: Any) -> None:
            options = torchs._Options()
            options._threads = 1
            options._timeout = timeout
            # By default torch's constructor makes these devices itself, with two threads for each.
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            devices = [torchs.create_device(interface=name) for name in names]
            options._devices = devices or [torchs.create_default_device()]
            for name, value in more.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = ProcessGroupGloo


def open_mpi(world: World) -> None:
    """Starts the process group of `world` by MPI, which assigns the ranks itself.

    Raises:
        MusterError: this rank or the world size differs between MPI and the environment.
    """
    dist.init_process_group("mpi", timeout=timedelta(seconds=world.timeout_s))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (world.rank, world.world_size):
        raise MusterError(
            "MPI and the environment count the processes differently",
            seen=f"MPI: rank {rank} of {world_size}; RANK={world.rank} WORLD_SIZE={world.world_size}",
            fix="start each rank by mpirun, one a GPU or process, or leave --backend=mpi out",
        )
