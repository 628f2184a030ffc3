"""Names that resolve to wrong addresses, on some nodes or on all."""

import threading
import time

import pytest

from muster.check.doctor import names
from muster.check.doctor.finding import Finding
from muster.check.doctor.names import Facts, Lookup, look_up
from muster.check.doctor.network import Place


def nodes(size):
    return [
        Place(rank, f"n{rank}", (f"10.0.0.{rank}", f"10.1.0.{rank}"), "eth0", f"10.0.0.{rank}") for rank in range(size)
    ]


def led(looker, target, *addresses, wrong="", took_s=0.0):
    """The node `looker`, and its lookup of the name of node `target`."""
    return looker, Lookup(f"n{target}", list(addresses), wrong, took_s)


def all_right(size):
    return [led(looker, target, f"10.0.0.{target}") for looker in range(size) for target in range(size)]


def own(rank, *addresses):
    """A node's lookup of its own name."""
    return led(rank, rank, *addresses)


def findings(size: int, lookups: list[tuple[int, Lookup]], is_interface_set: bool = True) -> list[Finding]:
    """The findings on `size` nodes that made these `lookups`."""
    return names.findings(
        {
            place.host: [Facts(place, tuple(one for rank, one in lookups if rank == place.rank), is_interface_set)]
            for place in nodes(size)
        }
    )


def found(*args, **kwargs):
    return [(finding.level, finding.about, finding.host) for finding in findings(*args, **kwargs)]


def test_names_that_lead_to_any_address_of_their_node():
    lookups = [*all_right(3), led(0, 1, "10.1.0.1"), led(1, 2, "192.0.2.7", "10.0.0.2")]
    assert found(3, lookups) == []


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "192.0.2.1"])
def test_an_own_name_that_others_could_not_use(address):
    (finding,) = findings(3, [own(0, "10.0.0.0"), own(1, address), own(2, "10.1.0.2")])
    assert (finding.level, finding.host) == ("warning", "n1")
    assert finding.seen == f"its own name resolves to {address}"


def test_a_wrong_own_name_is_a_failure_where_gloo_uses_it():
    assert found(2, [own(0, "10.0.0.0"), own(1, "127.0.1.1")], is_interface_set=False) == [("failed", "name", "n1")]
    assert found(2, [own(0, "10.0.0.0"), own(1)]) == [("warning", "name", "n1")]


def test_a_wrong_own_name_is_a_failure_on_the_one_node_where_gloo_uses_it():
    """The interface of the other node is set, which changes nothing."""
    told = {
        place.host: [Facts(place, (Lookup(place.host, ["10.0.0.0"] if is_set else ["127.0.1.1"]),), is_set)]
        for place, is_set in zip(nodes(2), (True, False), strict=True)
    }
    (finding,) = names.findings(told)
    assert (finding.level, finding.host) == ("failed", "n1")


def test_the_same_on_all_nodes_is_one_finding():
    assert found(3, [own(rank, "127.0.1.1") for rank in range(3)]) == [("warning", "name", "n0, n1, n2")]


def test_a_name_that_leads_astray_on_one_node_names_that_node():
    lookups = [led(looker, target, f"10.0.0.{target}") for looker in range(3) for target in range(3) if looker != 2]
    lookups += [led(2, 0, "10.0.0.0"), led(2, 1, "10.0.0.99")]
    (finding,) = findings(3, lookups)
    assert (finding.level, finding.host) == ("warning", "n2")
    assert finding.seen == "n1 resolves to 10.0.0.99, but its address is 10.0.0.1"


def test_a_name_that_leads_astray_everywhere_is_one_finding():
    lookups = [led(0, 1, "10.0.0.99"), led(2, 1, "10.0.0.99"), led(0, 2, "10.0.0.2"), led(1, 2, "10.0.0.2")]
    assert found(3, lookups) == [("warning", "name", "n0, n2")]


def test_a_name_that_only_its_own_container_resolves_is_no_fault():
    unknown = [led(0, 1, wrong="Name or service not known"), led(2, 1, wrong="Name or service not known")]
    assert found(3, unknown) == []
    assert found(3, [unknown[0], led(2, 1, "10.0.0.1")]) == [("warning", "name", "n0")]


def test_the_name_of_an_address_only_counts_by_its_time(monkeypatch):
    """A training does not use this name; but torch looks it up, so it must not take long."""

    def back(place: tuple[str, int], flags: int) -> tuple[str, str]:
        time.sleep(0.2 if place[0] == "10.0.0.1" else 0)
        return "another", "0"

    monkeypatch.setattr(names, "addresses_of", lambda name: (["10.0.0.7"], ""))
    monkeypatch.setattr(names.socket, "getnameinfo", back)
    first, second = look_up(nodes(2))
    assert first.addresses == second.addresses == ["10.0.0.7"]
    assert 0.2 <= second.took_s < names.LIMIT_S  # look_up waited for the slow name


def test_slow_lookups_are_told_with_their_time():
    (finding,) = findings(2, [led(0, 1, "10.0.0.1", took_s=4.2)])
    assert (finding.level, finding.host) == ("warning", "n0")
    assert "n1 took 4.2 s on n0" in finding.seen


def test_names_without_an_answer_do_not_hold_up_the_others(monkeypatch):
    """A lookup that waits stands for a dead name server."""
    released = threading.Event()

    def resolve(name):
        if name == "n1":
            released.wait()
        return ["10.0.0.7"], ""

    monkeypatch.setattr(names, "addresses_of", resolve)
    monkeypatch.setattr(names.socket, "getnameinfo", lambda place, flags: ("", ""))
    began = time.monotonic()
    first, second, third = look_up(nodes(3), 1.0)
    assert time.monotonic() - began < 30
    released.set()
    assert (first.addresses, second.addresses, third.addresses) == (["10.0.0.7"], [], ["10.0.0.7"])
    assert (second.wrong, second.took_s) == ("no answer within 1 s", 1.0)
    assert first.took_s < 1.0
