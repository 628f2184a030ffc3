"""Whether the nodes reach each other, pair by pair, on the ports that a training uses."""

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from check.doctor.findings import Finding, Part
from check.doctor.pairs import EPHEMERAL, MEETING, Knock, Node, judge
from check.doctor.peers import of_nodes, own_place, targets, up_to
from check.doctor.probe import FIRST_PORT, NUM_PORTS, Door, knock, open_in_range
from check.options import DoctorOptions
from train.world import World

MOST_AT_ONCE = 64
MOST_ROWS = 2000
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def look(world: World, options: DoctorOptions) -> Part:
    """Which nodes reach which: each listens as gloo and NCCL do, and knocks at the others."""
    doors: list[Door] = []
    own = _open(world, doors) if world.local_rank == 0 else None
    try:
        nodes: list[dict[str, Any]] = of_nodes(world, own)
        if len(nodes) < 2:
            return Part("ports", "one node: nothing to reach")
        knocked = [] if own is None else _knock_at_others(nodes, world.rank, options.quick)
        done = of_nodes(world, knocked, to_all=False)
    finally:
        for door in doors:
            door.close()
    if not world.main:
        return Part("ports")
    seen = [Node(node["host"], node["interface"], node["address"]) for node in nodes]
    deaf = [_deaf(node) for node in nodes if node["wrong"]]
    return _part(seen, [Knock(*one) for of_one in done for one in of_one], deaf)


def ephemeral_range() -> str:
    """The ports that the kernel gives to programs that ask for any."""
    try:
        return "-".join(PORT_RANGE.read_text().split())
    except OSError:
        return "32768-60999"


def _open(world: World, doors: list[Door]) -> dict[str, Any]:
    """What the others have to know to knock at this node, whose doors are added to `doors`."""
    interface, address = own_place()
    secret = secrets.token_hex(16)
    port = os.environ.get("MASTER_PORT", "")
    ports, wrong = {}, "" if address else "no interface leads to the other nodes"
    try:
        if address:
            doors.append(Door(address, 0, secret))
            ports[EPHEMERAL] = doors[-1].port
        # Who has ranks meet elsewhere need not have opened these.
        if address and port.isdecimal() and FIRST_PORT <= int(port) < FIRST_PORT + NUM_PORTS:
            doors.append(open_in_range(address, secret))
            ports[MEETING] = doors[-1].port
    except OSError as error:
        wrong = f"can't listen at {address}: {error}"
    return {
        "rank": world.rank,
        "host": world.host,
        "interface": interface,
        "address": address,
        "secret": secret,
        "ports": ports,
        "wrong": wrong,
    }


def _knock_at_others(nodes: Sequence[dict[str, Any]], rank: int, is_quick: bool) -> list[list[Any]]:
    own = next(index for index, node in enumerate(nodes) if node["rank"] == rank)
    places = [
        (other, kind, port)
        for other in targets(own, len(nodes), up_to(is_quick))
        for kind, port in nodes[other]["ports"].items()
    ]

    def ask(place: tuple[int, str, int]) -> list[Any]:
        other, kind, port = place
        answer = knock(nodes[other]["address"], port, nodes[other]["secret"])
        return [own, other, kind, port, answer.wrong, round(answer.ms, 3)]

    with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
        return list(threads.map(ask, places))


def _deaf(node: dict[str, Any]) -> Finding:
    return Finding(
        "fault",
        "port",
        node["host"],
        f"{node['host']} has no port at which the others could reach it",
        f"{node['wrong']}; interface {node['interface'] or '(none)'}",
        "--interface NAME, with an interface that all nodes have (`ip -brief address`), or unset GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME",
    )


def _part(nodes: Sequence[Node], knocks: Sequence[Knock], deaf: Sequence[Finding]) -> Part:
    fine = [knock for knock in knocks if not knock.wrong]
    pairs = len({(knock.source, knock.target) for knock in knocks})
    says = f"{pairs} ways between {len(nodes)} nodes are open"
    if fine:
        slowest = max(fine, key=lambda knock: knock.ms)
        way = f"{nodes[slowest.source].host} -> {nodes[slowest.target].host}"
        says += f", the slowest answer took {slowest.ms:.1f} ms ({way})"
    rows = [
        [nodes[knock.source].host, nodes[knock.target].host, knock.kind, knock.port, knock.wrong, knock.ms]
        for knock in knocks
    ]
    # What is wrong, then the slowest: of a thousand nodes nobody reads all.
    rows = sorted(rows, key=lambda row: (not row[4], -float(row[5])))[:MOST_ROWS]
    values = {"columns": ["from", "to", "kind", "port", "wrong", "ms"], "rows": rows}
    return Part("ports", says, [*deaf, *judge(nodes, knocks, ephemeral_range())], values)
