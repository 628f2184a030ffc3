"""`muster bench --pairwise` under a real Slurm: a slow link and a slow node are named, healthy ones are not.

All links are limited to far less than this machine's processors can send, so that results do not depend on the load.
The limits are token buckets (htb): this kernel may lack netem, and a low rate makes a link as slow as a delay does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

import pytest

from tests.clusters.hosts import Hosts
from tests.clusters.requirements import SLURM_PROGRAMS, program, refuse, require_namespaces, require_programs
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import MUSTER, ONE_THREAD

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NODES = ("node01", "node02", "node03", "node04")

USUAL, SLOW = "400mbit", "30mbit"

BENCH = [MUSTER, "bench", "--pairwise", "--device=cpu", "--nproc-per-node=1", "--max-size=1M", "--iters=5", "--json"]

# Packets to the slow addresses go through a class of their own.
SHAPE = """
{tc} qdisc add dev eth0 root handle 1: htb default 10
{tc} class add dev eth0 parent 1: classid 1:10 htb rate {usual} burst 64k
{tc} class add dev eth0 parent 1: classid 1:20 htb rate {slow} burst 8k
"""
TO = "{tc} filter add dev eth0 parent 1: protocol ip u32 match ip dst {address} flowid 1:20\n"


def script(hosts: Hosts, slow: Sequence[str]) -> str:
    """Gives a node its limits: the usual one, and the low one towards the nodes `slow`."""
    tc = program("tc")
    # Deleting the queue removes the limits of the last test.
    lines = f"{tc} qdisc delete dev eth0 root 2> /dev/null || true\n" + SHAPE.format(tc=tc, usual=USUAL, slow=SLOW)
    return lines + "".join(TO.format(tc=tc, address=hosts.addresses[other]) for other in slow)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Four nodes of one process each."""
    require_programs(*SLURM_PROGRAMS, "tc")
    require_namespaces()
    with SlurmCluster(tmp_path_factory.mktemp("four"), NODES) as cluster:
        done = cluster.hosts.run(NODES[0], ["sh", "-ec", script(cluster.hosts, ())])
        if done.returncode:
            refuse(f"this kernel has no token buckets: {done.stderr}; fix: modprobe sch_htb cls_u32")
        yield cluster


def bench(cluster: SlurmCluster, slow: Mapping[str, Sequence[str]]) -> tuple[int, dict[str, Any]]:
    """The exit code and answer of `muster bench`, where each node in `slow` sends slowly to its list of nodes."""
    for node in NODES:
        cluster.hosts.run(node, ["sh", "-ec", script(cluster.hosts, slow.get(node, ()))], check=True)
    done = cluster.srun("-N4", "--ntasks-per-node=1", *BENCH, env=ONE_THREAD, timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stdout + done.stderr
    return done.returncode, json.loads(lines[0])


def wrongs(found: Mapping[str, Any]) -> list[str]:
    return [each["wrong"].partition(" where")[0] for each in found["against"]]


def test_healthy_links_are_not_slow(four: SlurmCluster) -> None:
    code, found = bench(four, {})
    assert (code, found["verdict"], found["against"]) == (0, "ok", []), found
    assert len(found["pairs"]) == 12
    assert {(row["source"], row["target"]) for row in found["pairs"]} == set(permutations(NODES, 2))


def test_a_slow_node_and_a_slow_link_are_named(four: SlurmCluster) -> None:
    """node04 sends slowly to all; the link between node01 and node02 is slow in both directions."""
    others = ["node01", "node02", "node03"]
    code, found = bench(four, {"node04": others, "node01": ["node02"], "node02": ["node01"]})
    assert (code, found["verdict"]) == (1, "failed"), found
    node, link = wrongs(found)
    assert node.startswith("slow node: node04 sends at 0.00"), found
    assert link.startswith("slow link: node01 - node02, 0.00"), found
