"""Allocation -> Rendezvous: where the ranks meet, under which id, over which interface."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from entrypoint import network
from entrypoint.allocation import Allocation
from entrypoint.environment import Environment
from entrypoint.options import LaunchOptions
from train.errors import MusterError

# Above Linux's ephemeral range (32768-60999): the kernel never hands these ports to a client that happens to be there.
FIRST_PORT, NUM_PORTS = 61000, 4536


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a launch meet.

    Attributes:
        master_addr: name or address of node rank 0; on one node the loopback address.
        master_port: None where it is picked at the start (one node, nothing asked for).
        rdzv_id: the job's id and attempt, so that no start meets the leftovers of an earlier one.
        interface: this host's network interface towards the others; None where only the host itself can tell.
        sources: what gave each value.
    """

    master_addr: str
    master_port: int | None
    rdzv_id: str
    interface: str | None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])


def port_of(job_id: str, attempt: int, step: int) -> int:
    """A port for a job's attempt and step: the same on all its nodes, another one for the next attempt or step."""
    digest = hashlib.sha256(job_id.encode()).digest()
    base = int(job_id) if job_id.isascii() and job_id.isdigit() else int.from_bytes(digest[:4], "big")
    # 619 and 67 share no factor with 4536: attempts and steps of one job and its neighbours do not fall together.
    return FIRST_PORT + (base + 619 * attempt + 67 * step) % NUM_PORTS


def meet(allocation: Allocation, env: Environment, options: LaunchOptions) -> Rendezvous:
    """The rendezvous of `allocation`. For the live environment names are resolved and routes looked up.

    Raises:
        MusterError: several nodes and no way to know where node rank 0 is, or its name leads nowhere.
    """
    several = allocation.num_nodes > 1
    address, address_source = _address(allocation, env, options)
    port, port_source = _port(allocation, env, options)
    interface, interface_source = None, "only the host itself can tell"
    if env.is_live:
        if several:
            interface = _interface(allocation, address, address_source)
            interface_source = (
                f"the route to {allocation.hosts[1] if _is_master(allocation) and allocation.hosts else address}"
            )
        else:
            interface, interface_source = network.LOOPBACK, "one node"
    return Rendezvous(
        master_addr=address,
        master_port=port,
        rdzv_id=f"{allocation.job_id or 'local'}.{allocation.attempt}",
        interface=interface,
        sources={
            "master_addr": address_source,
            "master_port": port_source,
            "rdzv_id": "job id and attempt",
            "interface": interface_source,
        },
    )


def _is_master(allocation: Allocation) -> bool:
    return allocation.node_rank == 0


def _address(allocation: Allocation, env: Environment, options: LaunchOptions) -> tuple[str, str]:
    if options.master_addr:
        return options.master_addr, "--master-addr"
    if allocation.num_nodes == 1:
        return "127.0.0.1", "one node"
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], "MASTER_ADDR, yours"
    if not allocation.hosts:
        raise MusterError(
            f"{allocation.num_nodes} nodes, and no way to know where node rank 0 is",
            seen="no --master-addr and no host list",
            fix="--master-addr HOST, the same on all nodes: name or address of the node with --node-rank 0",
        )
    return allocation.hosts[0], f"the first host of {allocation.sources.get('hosts', 'the host list')}"


def _port(allocation: Allocation, env: Environment, options: LaunchOptions) -> tuple[int | None, str]:
    if options.master_port:
        return options.master_port, "--master-port"
    if allocation.num_nodes > 1 and env.get("MASTER_PORT"):
        value = env["MASTER_PORT"]
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 65536):
            raise MusterError("MASTER_PORT is no port", seen=f"MASTER_PORT={value}", fix="unset MASTER_PORT")
        return int(value), "MASTER_PORT, yours"
    if allocation.num_nodes == 1 and allocation.mode != "worker":
        return None, "picked at the start"
    if allocation.job_id is None:
        return FIRST_PORT, "the default without a job id"
    return (
        port_of(allocation.job_id, allocation.attempt, allocation.step),
        f"job {allocation.job_id}, attempt {allocation.attempt}, step {allocation.step}",
    )


def _interface(allocation: Allocation, master_addr: str, source: str) -> str | None:
    master = network.resolve(master_addr, source)
    if not _is_master(allocation):
        # "localhost" itself is no mistake: several nodes by hand on one machine is how one tries a launch out.
        if network.is_loopback(master) and master_addr not in ("localhost", master):
            raise MusterError(
                f"the master, {master_addr}, resolves to the loopback address {master} on another node",
                seen=source,
                fix=network.FIX_NAME,
            )
        return network.fabric_interface((master,))
    # On the master its own name says little: ask for the way to the next host.
    others = tuple(network.resolve(host, f"host {host}") for host in allocation.hosts[1:2])
    return network.fabric_interface((*others, master))
