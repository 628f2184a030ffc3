"""Whether names lead to the nodes that bear them, on all nodes."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from check.doctor.findings import Part
from check.doctor.meeting import listed_nodes
from check.doctor.named import SLOW_S, Found, Named, is_loopback, judge, named
from check.doctor.peers import chosen, of_nodes, own_addresses, plain, targets, up_to
from check.options import DoctorOptions
from train.world import World

HOSTS = Path("/etc/hosts")

LIMIT_S = 10.0
"""A name that has no address by then has none."""


def look(world: World, options: DoctorOptions) -> Part:
    """What the nodes' names lead to on each node, and the addresses back to names."""
    own = _own(world) if world.local_rank == 0 else None
    nodes = [named(node) for node in of_nodes(world, own)]
    if len(nodes) < 2:
        return Part("names", "one node: no name is needed")
    master = os.environ.get("MASTER_ADDR", "")
    if is_loopback(master) or master == "localhost":
        return Part("names", "all ranks are on this machine: no name is needed")
    nodes = with_listed(nodes, listed_nodes())
    looked_up = [] if own is None else _look_up_others(nodes, world.rank, options.quick)
    done = of_nodes(world, looked_up, to_all=False)
    if not world.main:
        return Part("names")
    return _part(nodes, [Found(**found) for of_one in done for found in of_one], master)


def with_listed(nodes: Sequence[Named], listed: Sequence[str]) -> list[Named]:
    """The nodes with the names that the scheduler's list has for them.

    The list is by node_rank, which in an elastic launch need not be the order of ranks.
    """
    if len(listed) != len(nodes):
        return list(nodes)
    hosts = {_short(node.host) for node in nodes}
    return [
        node._replace(listed=next((name for name in listed if _short(name) == _short(node.host)), ""))
        if _short(node.host) in map(_short, listed)
        else node._replace(listed="" if _short(listed[index]) in hosts else listed[index])
        for index, node in enumerate(nodes)
    ]


def ask_all(questions: Sequence[Callable[[], Any]], limit_s: float) -> list[tuple[Any, float]]:
    """(answer, seconds) of each question, all asked at once; None for those without an answer in time.

    The resolver has no deadline of its own: what is late is left behind in a thread. What is slow is asked again, and
    the shorter time counts: the machine may have been busy.
    """
    answers: dict[int, tuple[Any, float]] = {}
    started = time.monotonic()

    def ask(index: int) -> None:
        answers[index] = (questions[index](), time.monotonic() - started)
        if answers[index][1] > SLOW_S:
            again = time.monotonic()
            questions[index]()
            answers[index] = (answers[index][0], min(answers[index][1], time.monotonic() - again))

    threads = [Thread(target=ask, args=(index,), daemon=True) for index in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, started + limit_s - time.monotonic()))
    waited_s = time.monotonic() - started
    return [answers.get(index, (None, waited_s)) for index in range(len(questions))]


def addresses_of(name: str) -> tuple[list[str], str]:
    """(addresses, what is wrong) of a name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], str(error.args[-1] if error.args else error)
    return list(dict.fromkeys(plain(str(entry[4][0])) for entry in found)), ""


def name_of(address: str) -> tuple[list[str], str]:
    """([name, its addresses...], "") of an address; nothing where it has no name."""
    try:
        name = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        return [], ""
    return [name, *addresses_of(name)[0]], ""


def line_of(name: str, text: str) -> str:
    """The line in which /etc/hosts, whose content is `text`, has `name`; empty without one."""
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if name.lower() in (word.lower() for word in words[1:]):
            return f"{HOSTS} line {number}: {' '.join(words)}"
    return ""


def _own(world: World) -> dict[str, Any]:
    interfaces = own_addresses()
    ((own, took_s),) = ask_all([lambda: addresses_of(world.host)], LIMIT_S)
    return {
        "rank": world.rank,
        "host": world.host,
        "listed": "",
        "addresses": [one for of_one in interfaces.values() for one in of_one if not is_loopback(one)],
        "address": chosen(os.environ, interfaces)[1],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "own": _found(world.host, own, took_s, world.rank, world.rank, is_back=False)._asdict(),
    }


def _look_up_others(nodes: Sequence[Named], rank: int, is_quick: bool) -> list[dict[str, Any]]:
    own = next(index for index, node in enumerate(nodes) if node.rank == rank)
    asked: list[tuple[str, int, bool]] = []
    for other in targets(own, len(nodes), up_to(is_quick)):
        asked += [(name, other, False) for name in nodes[other].names()]
        asked += [(nodes[other].address, other, True)] if nodes[other].address else []
    master = os.environ.get("MASTER_ADDR", "")
    if own != 0 and master not in nodes[0].names():
        asked.append((master, 0, False))
    answers = ask_all([_question(name, is_back) for name, _, is_back in asked], LIMIT_S)
    return [
        _found(name, answer, took_s, rank, nodes[other].rank, is_back=is_back)._asdict()
        for (name, other, is_back), (answer, took_s) in zip(asked, answers, strict=True)
    ]


def _question(name: str, is_back: bool) -> Callable[[], Any]:
    return lambda: name_of(name) if is_back else addresses_of(name)


def _found(name: str, answer: Any, took_s: float, looker: int, target: int, *, is_back: bool) -> Found:
    late: tuple[list[str], str] = ([], f"no answer within {LIMIT_S:.0f} s")
    found, wrong = late if answer is None else answer
    try:
        line = line_of(name, HOSTS.read_text(errors="replace"))
    except OSError:
        line = ""
    return Found(looker, target, name, found, wrong, "" if is_back else line, round(took_s, 3), is_back)


def _short(name: str) -> str:
    return name.partition(".")[0].lower()


def _part(nodes: Sequence[Named], found: Sequence[Found], master: str) -> Part:
    slowest = max(found, key=lambda one: one.took_s, default=None)
    says = f"{len(found)} lookups of {len(nodes)} nodes lead where they should"
    values = {} if slowest is None else {"slowest lookup (s)": slowest.took_s, "of": slowest.name}
    return Part("names", says, judge(nodes, found, master), values)
