"""Names that lead astray, on some nodes or on all."""

import threading
import time

import pytest

from muster.check.doctor.names import Lookup, Node, ask_all, findings, line_of, with_listed

HOSTS_FILE = """127.0.0.1 localhost
127.0.1.1 n1.cluster n1  # as Debian's installer sets it
#10.0.0.9 n2
10.0.0.3 N3
"""


def node(rank, *, own=None, listed="", interface="eth0"):
    address = f"10.0.0.{rank}"
    found = Lookup(rank, rank, f"n{rank}", [address] if own is None else own, "", "", 0.0, False)
    return Node(rank, f"n{rank}", listed, [address, f"10.1.0.{rank}"], address, interface, found)


def led(looker, target, *addresses, name="", wrong="", took_s=0.0, is_reverse=False):
    return Lookup(looker, target, name or f"n{target}", list(addresses), wrong, "", took_s, is_reverse)


def all_right(size):
    return [led(looker, target, f"10.0.0.{target}") for looker in range(size) for target in range(size)]


def found(nodes, lookups, master="n0"):
    return [(finding.level, finding.about, finding.host) for finding in findings(nodes, lookups, master)]


def test_names_that_lead_to_any_address_of_their_node():
    lookups = [*all_right(3), led(0, 1, "10.1.0.1"), led(1, 2, "192.0.2.7", "10.0.0.2")]
    assert found([node(0), node(1), node(2)], lookups) == []


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", "192.0.2.1"])
def test_an_own_name_that_others_can_not_use_there(address):
    (finding,) = findings([node(0), node(1, own=[address]), node(2)], all_right(3), "n0")
    assert (finding.level, finding.host) == ("warning", "n1")
    assert f"n1 leads to {address}" in finding.seen
    assert "10.0.0.1 n1" in finding.fix


def test_it_is_a_fault_where_gloo_goes_by_it():
    assert found([node(0), node(1, own=["127.0.1.1"], interface="")], all_right(2)) == [("fault", "name", "n1")]
    assert found([node(0), node(1, own=[])], all_right(2)) == [("warning", "name", "n1")]


def test_the_same_on_all_nodes_is_one_finding():
    nodes = [node(rank, own=["127.0.1.1"]) for rank in range(3)]
    ((level, about, host),) = found(nodes, all_right(3))
    assert (level, about, host) == ("warning", "name", "")


def test_a_name_that_leads_astray_on_one_node_names_that_node():
    lookups = [led(looker, target, f"10.0.0.{target}") for looker in range(3) for target in range(3) if looker != 2]
    lookups += [led(2, 0, "10.0.0.0"), led(2, 1, "10.0.0.99")]
    (finding,) = findings([node(0), node(1), node(2)], lookups, "n0")
    assert (finding.level, finding.host) == ("warning", "n2")
    assert "n1 leads to 10.0.0.99" in finding.seen
    assert "`10.0.0.1 n1`" in finding.fix


def test_a_name_that_leads_astray_everywhere_names_the_node_that_bears_it():
    lookups = [led(0, 1, "10.0.0.99"), led(2, 1, "10.0.0.98"), led(0, 2, "10.0.0.2"), led(1, 2, "10.0.0.2")]
    assert found([node(0), node(1), node(2)], lookups) == [("warning", "name", "n1")]


def test_the_masters_name_is_the_one_that_trainings_go_by():
    assert found([node(0), node(1)], [led(1, 0, "10.0.0.99")]) == [("fault", "name", "n1")]
    assert found([node(0), node(1)], [led(1, 0, "10.0.0.99", name="login")], "login") == [("fault", "name", "n1")]


def test_a_name_that_a_container_has_for_itself_alone_is_nobodys_business():
    nodes = [node(0), node(1), node(2)]
    unknown = [led(0, 1, wrong="Name or service not known"), led(2, 1, wrong="Name or service not known")]
    assert found(nodes, unknown) == []
    assert found(nodes, [unknown[0], led(2, 1, "10.0.0.1")]) == [("warning", "name", "n0")]
    assert found([node(0), node(1, listed="n1")], unknown[:1]) == [("warning", "name", "n0")]


def test_an_address_that_has_another_name_is_nobodys_business():
    """Nothing of a training goes by it; but torch asks for it, so it must not take long."""
    back = led(0, 1, "n2", name="10.0.0.1", is_reverse=True)
    assert found([node(0), node(1), node(2)], [back]) == []
    assert found([node(0), node(1), node(2)], [back._replace(took_s=4.2)]) == [("warning", "name", "n0")]


def test_slow_lookups_are_told_with_their_time():
    (finding,) = findings([node(0), node(1)], [led(0, 1, "10.0.0.1", took_s=4.2)], "n0")
    assert (finding.level, finding.host) == ("warning", "n0")
    assert "n1 took 4.2 s on n0" in finding.seen


def test_the_line_of_a_name():
    assert line_of("n1", HOSTS_FILE) == "/etc/hosts line 2: 127.0.1.1 n1.cluster n1"
    assert line_of("n2", HOSTS_FILE) == ""
    assert line_of("n3", HOSTS_FILE) == "/etc/hosts line 4: 10.0.0.3 N3"


def test_questions_without_an_answer_do_not_hold_up_the_others():
    """In place of a name server that is dead: a question that waits."""
    released = threading.Event()
    began = time.monotonic()
    (first, _), (second, took_s), (third, _) = ask_all([lambda: "one", released.wait, lambda: "three"], 1.0)
    assert time.monotonic() - began < 30
    released.set()
    assert (first, second, third) == ("one", None, "three")
    assert took_s >= 1.0


def test_the_schedulers_names_are_found_in_any_order():
    nodes = [node(0), node(1), node(2)]
    listed = [one.listed for one in with_listed(nodes, ["n2.cluster", "n0.cluster", "n1.cluster"])]
    assert listed == ["n0.cluster", "n1.cluster", "n2.cluster"]
    assert [one.listed for one in with_listed(nodes, ["pod-a", "pod-b", "pod-c"])] == ["pod-a", "pod-b", "pod-c"]
    assert [one.listed for one in with_listed(nodes, ["a", "b"])] == ["", "", ""]
