"""Test connections between nodes: which pairs are tried, what counts as an answer, which node failures point to."""

import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from muster.check.doctor import clock, names, ports, run
from muster.check.doctor.finding import Finding
from muster.check.doctor.network import Place, choose
from muster.check.doctor.ports import STALLED, STRANGER, Facts, Listener, Probe, probe
from muster.check.doctor.run import Report
from muster.check.options import DoctorOptions
from muster.check.ranks import partners
from muster.train.distributed.world import World

SIZES = [2, 3, 7, 32, 33, 64, 65, 100, 300]


def reached(start: int, size: int) -> set[int]:
    """The nodes that `start` is connected to, by any number of steps."""
    seen, new = {start}, [start]
    while new:
        new = [other for node in new for other in partners(node, size) if other not in seen]
        seen |= set(new)
    return seen


@pytest.mark.parametrize("size", SIZES)
def test_every_node_is_connected_to_all_by_a_bounded_number_of_pairs(size):
    looks = [partners(node, size) for node in range(size)]
    assert all(node not in own and len(set(own)) == len(own) for node, own in enumerate(looks))
    # Both directions of each pair.
    assert all(node in looks[other] for node, own in enumerate(looks) for other in own)
    assert len(reached(0, size)) == size
    if size > 32:
        assert max(map(len, looks)) <= 2 * (size - 1).bit_length()
    else:
        assert all(len(own) == size - 1 for own in looks)


def test_alone_there_is_nobody_to_reach():
    assert partners(0, 1) == []


@pytest.fixture
def listener():
    opened = Listener("127.0.0.1", "known")
    yield opened
    opened.close()


def test_a_listener_answers_who_knows_its_secret(listener):
    assert probe("127.0.0.1", listener.port, "known") == ""
    assert probe("127.0.0.1", listener.port, "another") == STRANGER


def test_a_closed_listener_refuses(listener):
    listener.close()
    assert "Connection refused" in probe("127.0.0.1", listener.port, "known")


def test_another_program_at_the_port_is_not_taken_for_the_node():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP, speak: we have all the time in the world\r\n")
                connection.recv(99)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        assert probe("127.0.0.1", server.getsockname()[1], "known") == STRANGER
        thread.join(10)


def test_a_link_that_drops_large_messages_is_reported(monkeypatch):
    """A program that reads only the first message stands for a link with another MTU."""
    monkeypatch.setattr(ports, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(ports.sign("known", connection.recv(16)))
                ended.wait(30)

        threading.Thread(target=answer, daemon=True).start()
        assert probe("127.0.0.1", server.getsockname()[1], "known") == STALLED
        ended.set()


def test_a_port_that_drops_is_called_so(monkeypatch):
    """A connection that times out stands for a firewall."""

    def late(*args: object, **kwargs: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", late)
    assert probe("127.0.0.1", 1, "known") == "timed out"


def places(size):
    return [Place(number, f"n{number}", (), "eth0", f"10.0.0.{number}") for number in range(size)]


def probes(*failed: tuple[int, int], size: int = 5, wrong="timed out"):
    """The probes of all of `size` nodes to each other; those in the directions `failed` have failed."""
    ways = permutations(range(size), 2)
    return [Probe(f"n{one}", f"n{other}", 40000, wrong if (one, other) in failed else "") for one, other in ways]


WHERE = f" on ports {ports.ephemeral_range()}, on which gloo and NCCL listen"


def findings(size: int, seen: list[Probe]) -> list[Finding]:
    """The findings on `size` nodes that made the probes `seen`."""
    return ports.findings(
        {
            place.host: [Facts(place, "", tuple(one for one in seen if one.source == place.host))]
            for place in places(size)
        }
    )


def found(*failed, size=5, **more):
    return [
        (finding.level, finding.about, finding.host, finding.wrong.removesuffix(WHERE))
        for finding in findings(size, probes(*failed, size=size, **more))
    ]


def test_nothing_is_wrong_where_all_answer():
    assert found() == []


def test_one_way_that_is_closed():
    assert found((1, 2)) == [("failed", "port", "n1 -> n2", "n1 does not reach n2")]


def test_a_pair_that_is_closed_both_ways_is_one_finding():
    assert found((1, 2), (2, 1)) == [("failed", "port", "n1 <-> n2", "n1 and n2 do not reach each other")]
    assert found((0, 1), (1, 0), size=2) == [("failed", "port", "n0 <-> n1", "n0 and n1 do not reach each other")]


def test_two_pairs_without_a_node_in_common():
    assert [host for _, _, host, _ in found((0, 1), (2, 3))] == ["n0 -> n1", "n2 -> n3"]


def test_a_node_that_nobody_reaches_is_named_alone():
    into = [(other, 3) for other in (0, 1, 2, 4)]
    out = [(3, other) for other in (0, 1, 2, 4)]
    assert found(*into) == [("failed", "port", "n3", "n3 can't be reached from n0, n1, n2, n4")]
    assert found(*out) == [("failed", "port", "n3", "n3 does not reach n0, n1, n2, n4")]
    assert found(*into, *out) == [("failed", "port", "n3", "n3 and n0, n1, n2, n4 do not reach each other")]
    assert found((0, 2), (1, 2), size=3)[0][2] == "n2"


@pytest.mark.parametrize(("size", "cut_off"), [(4, (2, 3)), (8, (2, 3)), (32, (0, 9)), (32, (5, 6, 7))])
def test_nodes_that_are_cut_off_are_named_and_not_their_pairs(size, cut_off):
    failed = [way for way in permutations(range(size), 2) if set(way).intersection(cut_off)]
    each = findings(size, probes(*failed, size=size))
    assert [finding.host for finding in each] == [f"n{number}" for number in cut_off]
    assert all(finding.wrong.endswith(f" do not reach each other{WHERE}") for finding in each)


def test_nodes_of_which_none_is_the_odd_one_are_pairs():
    triangle = [host for _, _, host, _ in found(*permutations((0, 1, 2), 2), size=5)]
    assert triangle == ["n0 <-> n1", "n0 <-> n2", "n1 <-> n2"]
    halves = [way for way in permutations(range(4), 2) if (way[0] < 2) != (way[1] < 2)]
    assert len(found(*halves, size=4)) == 4


def test_a_node_that_some_do_not_reach_and_a_pair_beside_it():
    wrong = [wrong for *_, wrong in found((0, 3), (1, 3), (4, 3), (1, 2))]
    assert wrong == ["n3 can't be reached from n0, n1, n4", "n1 does not reach n2"]


def test_ports_that_are_closed_between_all_are_one_finding():
    everywhere = list(permutations(range(5), 2))
    assert found(*everywhere) == [("failed", "port", "", "no node reaches any other")]


def test_what_stalls_is_told_apart_from_what_is_closed():
    ((level, about, host, wrong),) = found((1, 2), wrong=STALLED)
    assert (level, about, host) == ("failed", "mtu", "n1 -> n2")
    assert "with large messages" in wrong


def test_many_nodes_of_which_one_is_cut_off():
    odd = random.Random(5).randrange(100)
    seen = [
        Probe(f"n{node}", f"n{other}", 1, "timed out" if odd in (node, other) else "")
        for node in range(100)
        for other in partners(node, 100)
    ]
    assert [finding.host for finding in findings(100, seen)] == [f"n{odd}"]


INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["10.1.0.5", "fd00::5"], "ib1": ["10.2.0.5"]}


def test_the_chosen_interface_and_without_one_the_way_to_the_master():
    assert choose({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth0"}, INTERFACES) == ("ib0", "10.1.0.5")
    assert choose({"GLOO_SOCKET_IFNAME": "hsn0,ib1"}, INTERFACES) == ("ib1", "10.2.0.5")
    assert choose({"MASTER_ADDR": "127.0.0.1"}, INTERFACES) == ("lo", "127.0.0.1")
    assert choose({}, {}) == ("", "")
    # With an interface that does not exist, gloo does not start.
    assert choose({"GLOO_SOCKET_IFNAME": "hsn0", "MASTER_ADDR": "127.0.0.1"}, INTERFACES) == ("", "")


def test_more_nodes_than_may_all_look_at_each_other(monkeypatch):
    """Threads of this process stand for the ranks; their store is in its memory."""
    size, ranks_a_node = 36, 2
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    store = HashStore()

    hosts = tuple(f"n{number // ranks_a_node}" for number in range(size * ranks_a_node))

    def rank(number: int) -> Report:
        world = World(
            rank=number,
            local_rank=number % ranks_a_node,
            world_size=len(hosts),
            store=store,
            host=hosts[number],
            hosts=hosts,
            timeout_s=90,
        )
        report = Report()
        run.examine(world, DoctorOptions(), (names, ports, clock), report)
        return report

    with ThreadPoolExecutor(len(hosts)) as threads:
        first, *others = threads.map(rank, range(len(hosts)))
    assert first.findings == []
    ways = sum(len(partners(node, size)) for node in range(size))
    assert first.parts[1].says == f"all {ways} connections between {size} nodes are open"
    assert sum(len(told["ports"]["probes"]) for told in first.facts if told["ports"]) == ways
    assert first.parts[2].says.startswith(f"the clocks of {size} nodes agree to")
    assert all(not report.parts for report in others)
