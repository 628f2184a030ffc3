"""Allocation -> Rendezvous: where the ranks meet, under which id, over which interface."""

import contextlib
import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from muster.entrypoint.detect import mpi
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.detect.hostlist import MAX_ID, is_address, short, whole_number
from muster.entrypoint.detect.reader import Reader
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import network
from muster.errors import MusterError

# Above Linux's ephemeral range (32768-60999): the kernel never gives these ports to outgoing connections.
FIRST_PORT, NUM_PORTS = 61000, 4536

ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR", "LWS_LEADER_ADDRESS")
"""Variables with the address of node rank 0: Kubeflow's TrainJob sets the second alone, a LeaderWorkerSet the third."""


@dataclass(frozen=True)
class Rendezvous:
    """The address and port at which the ranks of a launch meet, and the id by which they know each other.

    Attributes:
        master_addr: name or address of node rank 0; on one node the loopback address. None where nothing names it: the
            ranks then find each other by files (file.py beside this), and `by_file` completes this.
        master_port: None where it is picked at the start (one node, nothing asked for), or by `by_file`.
        rdzv_id: the job's id and attempt, so that no start meets the leftovers of an earlier one.
        interface: this host's network interface towards the others; None where it is unknown, as in a recording.
        local_addr: this host's address on it; None on one node.
    """

    master_addr: str | None
    master_port: int | None
    rdzv_id: str
    interface: str | None
    local_addr: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def address(self) -> str:
        """`master_addr`, or a placeholder while it is unknown."""
        return self.master_addr or "ADDRESS-BY-FILE"


def port_of(job_id: str, attempt: int, step: int) -> int:
    """A port for a job's attempt and step: the same on all its nodes, another one for the next attempt or step."""
    digest = hashlib.sha256(job_id.encode(errors="backslashreplace")).digest()
    number = whole_number(job_id, MAX_ID)
    base = int.from_bytes(digest[:4], "big") if number is None else number
    # 619 and 67 share no factor with 4536: attempts and steps of one job and its neighbours do not fall together.
    return FIRST_PORT + (base + 619 * attempt + 67 * step) % NUM_PORTS


def meet(allocation: Allocation, env: Environment, options: LaunchOptions) -> Rendezvous:
    """The rendezvous of `allocation`. In the live environment, names are resolved and routes are looked up.

    Raises:
        MusterError: the address or port of node rank 0 is missing, invalid or contradictory, or does not resolve.
    """
    address, address_source = _address(allocation, env, options)
    port, port_source = _port(allocation, env, options)
    rendezvous = Rendezvous(
        master_addr=address,
        master_port=port,
        rdzv_id=f"{allocation.job_id or 'local'}.{allocation.attempt}",
        interface=None,
        sources={
            "master_addr": address_source,
            "master_port": port_source,
            "rdzv_id": "job id and attempt",
            "interface": "known only on the host itself",
        },
    )
    return _on_this_host(rendezvous, allocation, options) if env.is_live and address else rendezvous


def by_file(rendezvous: Rendezvous, allocation: Allocation, env: Environment, options: LaunchOptions) -> Rendezvous:
    """`rendezvous` with the address and port that the ranks agree on by a file in a folder they share.

    Raises:
        MusterError: the folder can't be used, not all ranks came in time, or the ranks contradict each other.
    """
    from muster.entrypoint.rendezvous import file as rendezvous_file

    is_worker = allocation.mode == "worker"
    # The number of ranks that an agent starts may differ from node to node.
    count = f" x {allocation.nproc_per_node} ranks" if is_worker else ", a process on each"
    participant = rendezvous_file.Participant(
        host=socket.gethostname(),
        machine=rendezvous_file.machine(),
        node_rank=allocation.node_rank,
        local_rank=allocation.local_rank,
        tasks_on_node=allocation.tasks_on_node,
        world=f"{allocation.num_nodes} nodes{count}",
    )
    # This launch's identity: a job may start several at once.
    launch = {"hydra": _hydra_launch(env), "openmpi": env.get("PMIX_NAMESPACE", "")}.get(allocation.launcher, "")
    peers = rendezvous_file.Peers(
        folder=Path(options.rendezvous_dir),
        job=launch or f"{rendezvous.rdzv_id}.{allocation.step}",
        is_unique=bool(launch),
        number=allocation.rank if is_worker else allocation.node_rank,
        size=allocation.world_size if is_worker else allocation.num_nodes,
        timeout_s=options.rdzv_timeout,
        participant=participant,
        interface=options.interface,
        # mpirun by ssh starts the processes of its own host with the job's variables, and all others without.
        hint="mpirun gave no scheduler's variables to this host; in a job of PBS pass them on: "
        "mpirun -x PBS_JOBID -x PBS_ENVIRONMENT -x PBS_NODEFILE, or mpirun_rsh -export"
        if allocation.launcher in ("openmpi", "mvapich") and allocation.scheduler == "local"
        else "",
    )
    rendezvous_file.exit_on_terminate()
    address, port = rendezvous_file.meet(peers)
    found = replace(
        rendezvous,
        master_addr=rendezvous.master_addr or address,
        master_port=rendezvous.master_port or port,
        sources={**rendezvous.sources, "master_addr": str(peers.path), "master_port": str(peers.path)},
    )
    return _on_this_host(found, allocation, options)


def refuse_all(refusal: MusterError, env: Environment, options: LaunchOptions) -> None:
    """Publishes why this process can't take part, where the others of its launch would wait for it.

    mpirun ends all ranks when one ends with an error; Hydra does so only once they have called MPI, Flux not at all.
    """
    is_flux = "FLUX_TASK_RANK" in env
    names = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE") if is_flux else (mpi.HYDRA.rank, mpi.HYDRA.size)
    rank, size = (whole_number(env.get(name, "")) for name in names)
    if rank is None or size is None or not env.is_live:
        return
    # The name by which the others meet, in `by_file`.
    launch = f"{env.get('FLUX_JOB_ID')}.0.0" if is_flux else _hydra_launch(env)
    if not launch or options.master_addr or env.get("MASTER_ADDR"):
        return
    from muster.entrypoint.rendezvous import file as rendezvous_file

    timeout_s = min(network.REFUSED_TIMEOUT_S, options.rdzv_timeout)
    peers = rendezvous_file.Peers(Path(options.rendezvous_dir), launch, rank, size, timeout_s, refusal)
    rendezvous_file.exit_on_terminate()
    # An error here is ignored: this process ends with the refusal itself.
    with contextlib.suppress(MusterError):
        rendezvous_file.meet(peers)


def _hydra_launch(env: Environment) -> str:
    """The identity of this launch of mpiexec among others at the same time; empty where it is unknown.

    Intel MPI sets a variable. In MPICH the proxy that starts a host's ranks gets the address at which mpiexec listens:

        hydra_pmi_proxy --control-port node01:41525 --rmk user --launcher ssh ... --proxy-id 1
    """
    with contextlib.suppress(psutil.Error, OSError, ValueError, IndexError):
        for process in psutil.Process().parents():
            if process.name() == "hydra_pmi_proxy":
                words = process.cmdline()
                return words[words.index("--control-port") + 1]
    return env.get("I_MPI_HYDRA_UUID", "")


def needs_file(rendezvous: Rendezvous, allocation: Allocation) -> bool:
    """Whether several processes have to meet, and their address or port has to come from `by_file`."""
    several = allocation.num_nodes > 1 or allocation.tasks_on_node > 1
    return several and (rendezvous.master_addr is None or rendezvous.master_port is None)


def _on_this_host(rendezvous: Rendezvous, allocation: Allocation, options: LaunchOptions) -> Rendezvous:
    """`rendezvous` with this host's interface and address, and on the master with a master address that resolves."""
    if options.interface:
        interface, source = options.interface, "--interface"
    elif allocation.num_nodes == 1:
        interface, source = network.LOOPBACK, "one node"
    else:
        # The others' names need the master's suffix, which may lead to another network.
        hosts = tuple(with_suffix(host, options.address_suffix) for host in allocation.hosts)
        rendezvous, interface = _route(rendezvous, allocation, hosts)
        source = "the route to the master" if allocation.node_rank else "the route to the other nodes"
    own = network.address_of(interface) if allocation.num_nodes > 1 else None
    return replace(rendezvous, interface=interface, local_addr=own, sources={**rendezvous.sources, "interface": source})


def _route(rendezvous: Rendezvous, allocation: Allocation, hosts: tuple[str, ...]) -> tuple[Rendezvous, str | None]:
    name, source = rendezvous.master_addr or "", rendezvous.sources["master_addr"]
    if allocation.node_rank:
        master = network.resolve(name, source)
        # "localhost" itself is no mistake: a launch of several nodes can be tried out by hand on one machine.
        if network.is_loopback(master) and name not in ("localhost", master):
            raise MusterError(
                f"the master, {name}, resolves to the loopback address {master} on another node",
                seen=source,
                fix=network.FIX_NAME,
            )
        return rendezvous, network.fabric_interface((master,))
    others: tuple[str, ...] = ()
    # The next host's name only serves to find the interface towards the others; without it, the default route does.
    with contextlib.suppress(MusterError):
        others = tuple(network.resolve(host, f"host {host}") for host in hosts[1:2])
    try:
        # The master's own name leads to the interface towards the others, unless it is a loopback address here: then
        # the route to the next host does.
        return rendezvous, network.fabric_interface((network.resolve(name, source), *others))
    except MusterError:
        # The master's own name may not resolve on the master: its address is used instead.
        interface = network.fabric_interface(others)
        if (own := network.address_of(interface)) is None:
            raise
        sources = {**rendezvous.sources, "master_addr": f"{source}; {name} does not resolve on itself"}
        return replace(rendezvous, master_addr=own, sources=sources), interface


def _address(allocation: Allocation, env: Environment, options: LaunchOptions) -> tuple[str | None, str]:
    if options.master_addr:
        return _checked("--master-addr", options.master_addr, allocation, env), "--master-addr"
    if allocation.num_nodes == 1:
        return "127.0.0.1", "one node"
    for name in ADDRESSES:
        if env.get(name):
            return _checked(name, env[name], allocation, env), f"{name}, {_setter(allocation)}"
    if allocation.hosts:
        source = f"the first host of {allocation.sources.get('hosts', 'the host list')}"
        fix = f"--node-rank 0 on {allocation.hosts[0]}; or on all nodes: --master-addr {env.host}"
        if allocation.node_rank == 0 and Reader(env, fix).own_index(allocation.hosts, source):
            wrong = f"node rank 0 is on {env.host}, and the other nodes look for it on {allocation.hosts[0]}"
            raise MusterError(wrong, seen=f"{allocation.sources['node_rank']}; {source}", fix=fix)
        if options.address_suffix:
            return with_suffix(allocation.hosts[0], options.address_suffix), f"{source} + {options.address_suffix}"
        return allocation.hosts[0], source
    if allocation.launcher == "manual":
        raise MusterError(
            f"{allocation.num_nodes} nodes, and the address of node rank 0 is unknown",
            seen="no --master-addr and no host list",
            fix="--master-addr HOST, the same on all nodes: name or address of the node with --node-rank 0",
        )
    return None, f"a file in --rendezvous-dir={options.rendezvous_dir}"


def _checked(name: str, value: str, allocation: Allocation, env: Environment) -> str:
    """Checks and returns `value`, the address of node rank 0 that the option or variable `name` gives.

    Raises:
        MusterError: it is no address, the loopback address of each of several hosts, or that of another node.
    """
    is_option = name.startswith("--")
    fix = f"{name} HOST, a name or an address of node rank 0; a port by --master-port" if is_option else f"unset {name}"
    seen = f"{name}={value[:200]}"
    # An address may have a zone: fe80::1%eth0. One colon alone is HOST:PORT.
    if not re.fullmatch(r"[\w:][\w.:%-]{0,254}", value) or value.count(":") == 1:
        raise MusterError(f"{name} is no host name or address", seen=seen, fix=fix)
    # Several nodes by hand may be on one machine. Older PyTorchJobs give the master's pod such an address.
    is_meant = allocation.launcher == "manual" or (allocation.launcher == "kubernetes" and allocation.node_rank == 0)
    is_loopback = re.fullmatch(r"localhost(\..*)?|127\.[0-9.]+|0\.0\.0\.0|::1?", value) is not None
    if allocation.num_nodes > 1 and is_loopback and not is_meant:
        wrong = f"{name} means each node itself, and {allocation.num_nodes} nodes can't meet there"
        raise MusterError(wrong, seen=seen, fix=fix)
    # Such as $(hostname) in each task, or the job's first node in a step without that node. By hand the user numbers
    # the nodes, and a $SLURM_NODEID that the job script has already expanded makes each of them node rank 0.
    hosts, first = allocation.job.hosts, allocation.hosts[0] if allocation.hosts else value
    if allocation.launcher == "manual":
        seen, fix = f"{allocation.sources['node_rank']} {seen}", f"--node-rank 0 on {value} alone; or {fix}"
        own = Reader(env, fix).own_index(hosts, seen) if allocation.node_rank == 0 else None
        first = value if own is None else hosts[own]
    if short(value) != short(first) and short(value) in map(short, (*allocation.hosts, *hosts)):
        wrong = f"{name} is not {first}, the first node of this launch, where its ranks meet"
        raise MusterError(wrong, seen=f"{seen}; {allocation.sources.get('hosts', '')[:200]}", fix=fix)
    return value


def _setter(allocation: Allocation) -> str:
    # Kubernetes' operators set MASTER_ADDR and MASTER_PORT in each pod; elsewhere nothing but the user does.
    return "the job's" if allocation.scheduler == "kubernetes" else "yours"


def with_suffix(host: str, suffix: str) -> str:
    """The name under which a site's fabric knows `host`: jwb0001.juwels -> jwb0001i.juwels for the suffix i."""
    if is_address(host):
        return host
    first, dot, rest = host.partition(".")
    return f"{first}{suffix}{dot}{rest}"


def _port(allocation: Allocation, env: Environment, options: LaunchOptions) -> tuple[int | None, str]:
    if options.master_port:
        return options.master_port, "--master-port"
    for name in ("MASTER_PORT", "PET_MASTER_PORT"):
        if (value := env.get(name)) and allocation.num_nodes > 1:
            if not (port := whole_number(value, 65535)):
                raise MusterError(f"{name} is no port", seen=f"{name}={value[:200]}", fix=f"unset {name}")
            return port, f"{name}, {_setter(allocation)}"
    if allocation.num_nodes == 1 and allocation.mode != "worker":
        return None, "picked at the start"
    if allocation.job_id is None:
        # A pod has all ports to itself: if a list names the first pod, the default port will do, without a folder.
        is_listed_pod = allocation.launcher == "kubernetes" and bool(allocation.hosts)
        is_given = options.master_addr or any(map(env.get, ADDRESSES))
        if allocation.launcher == "manual" or is_listed_pod or is_given:
            return FIRST_PORT, "the default without a job id"
        return None, f"a file in --rendezvous-dir={options.rendezvous_dir}"
    return (
        port_of(allocation.job_id, allocation.attempt, allocation.step),
        f"job {allocation.job_id}, attempt {allocation.attempt}, step {allocation.step}",
    )
