"""`muster doctor` on a network with planted faults: it reports each of them, and nothing else."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from muster.check.doctor.ports import ephemeral_range
from muster.entrypoint.rendezvous.address import FIRST_PORT, NUM_PORTS
from tests.clusters.hosts import Hosts
from tests.clusters.requirements import require_programs
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import MUSTER, ONE_THREAD
from tests.entrypoint.standins import compiled

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MEETING = f"{FIRST_PORT}:{FIRST_PORT + NUM_PORTS - 1}"
EPHEMERAL = ephemeral_range().replace("-", ":")
AHEAD_S = 90

# sitecustomize.py: every Python process of the launch runs it; only ranks have RANK. Rank 1 sends a wrong value.
SPOIL = """
import os
if os.environ.get("RANK") == "1":
    import torch.distributed as dist
    all_gather = dist.all_gather_into_tensor
    def spoilt(got, sent, *args, **kwargs):
        sent[0] += 1
        return all_gather(got, sent, *args, **kwargs)
    dist.all_gather_into_tensor = spoilt
"""


# Only the wall clock is ahead: programs wait by another clock.
AHEAD = f"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {{
    long answer = syscall(SYS_clock_gettime, clock, now);
    if (answer == 0 && clock == CLOCK_REALTIME) now->tv_sec += {AHEAD_S};
    return answer;
}}
"""


class Looked(NamedTuple):
    """The result of `muster doctor`.

    Attributes:
        findings: (level, about, host), sorted.
        said: the exit code and all output.
    """

    code: int
    findings: list[tuple[str, str, str]]
    words: dict[tuple[str, str], str]
    said: str


def doctor(cluster: SlurmCluster, *options: str, before: str = ":", env: Mapping[str, str] = {}) -> Looked:
    """Runs `muster doctor` on three nodes.

    Args:
        cluster: has the nodes.
        options: of `muster doctor`.
        before: a shell line that runs on each node first.
        env: variables for all ranks.
    """
    command = shlex.join([MUSTER, "doctor", "--json", "--device=cpu", "--nproc-per-node=1", *options])
    where = ["-N3", "--ntasks-per-node=1"]
    done = cluster.srun(*where, "bash", "-c", f"{before}\nexec {command}", timeout=400, env={**ONE_THREAD, **env})
    said = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    findings = json.loads(done.stdout)["findings"] if done.stdout.startswith("{") else []
    words = {(one["about"], one["host"]): " | ".join([one["wrong"], one["seen"], one["fix"]]) for one in findings}
    kinds = sorted((one["level"], one["about"], one["host"]) for one in findings)
    return Looked(done.returncode, kinds, words, said)


@contextmanager
def closed(hosts: Hosts, source: str, target: str, ports: str) -> Iterator[None]:
    """Makes `ports` of `target` unreachable from `source`: nothing answers a connection."""
    with dropped(hosts, source, target, "--syn", "--dport", ports):
        yield


@contextmanager
def dropped(hosts: Hosts, source: str, target: str, *which: str) -> Iterator[None]:
    """Drops TCP packets from `source` to `target`: those that `which` matches."""
    rule = ["INPUT", "--protocol", "tcp", "--source", hosts.addresses[source], *which, "--jump", "DROP"]
    hosts.run(target, ["iptables", "--append", *rule], check=True)
    try:
        yield
    finally:
        hosts.run(target, ["iptables", "--delete", *rule], check=True)


@contextmanager
def known_on(cluster: SlurmCluster, host: str, name: str, address: str) -> Iterator[None]:
    """Gives a name another address in the /etc/hosts of one host."""
    path = cluster.workdir / "hosts" / host / "hosts"
    before = path.read_text()
    # Written in place: the host has this very file mounted, and would not see a new one.
    path.write_text(re.sub(rf"^\S+ {re.escape(name)}$", f"{address} {name}", before, flags=re.MULTILINE))
    try:
        yield
    finally:
        path.write_text(before)


def set_ahead(host: str, folder: Path) -> str:
    """A shell line that sets the clock of one host's processes ahead; the kernel's own is the same for all hosts."""
    library = compiled(AHEAD, folder / "ahead.so")
    return f'[ "$(hostname)" != {host} ] || export LD_PRELOAD={shlex.quote(str(library))}'


def test_names_ports_and_a_clock_that_are_wrong_on_one_host_each(slurm3: SlurmCluster, tmp_path: Path) -> None:
    require_programs("iptables")
    before = set_ahead("node01", tmp_path)
    with (
        known_on(slurm3, "node03", "node02", "10.77.0.99"),
        known_on(slurm3, "node02", "node02", "127.0.1.1"),
        closed(slurm3.hosts, "node02", "node03", EPHEMERAL),
        dropped(slurm3.hosts, "node03", "node02", "--match", "length", "--length", "1000:65535"),
    ):
        code, findings, words, said = doctor(slurm3, before=before)
    assert findings == [
        ("failed", "mtu", "node03 -> node02"),
        ("failed", "port", "node02 -> node03"),
        ("warning", "clock", "node01"),
        ("warning", "name", "node02"),
        ("warning", "name", "node03"),
    ], said
    assert code == 2, said
    assert re.search(r"node02 -> node03 10.77.0.4 port \d+: timed out", words["port", "node02 -> node03"])
    ahead = re.search(r"\+(\S+) s on node01", words["clock", "node01"])
    assert ahead, said
    assert abs(float(ahead[1]) - AHEAD_S) < 20, said
    assert "its own name resolves to 127.0.1.1" in words["name", "node02"]
    assert "node02 resolves to 10.77.0.99, but its address is 10.77.0.3" in words["name", "node03"]


def test_a_rank_that_sends_wrong_values(slurm3: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOIL)
    code, findings, words, said = doctor(slurm3, env={"PYTHONPATH": str(tmp_path)})
    assert findings == [("failed", "collective", "node02")], said
    assert code == 2, said
    assert "all_gather gives wrong values: by rank 1 on node02" in words["collective", "node02"]


def test_a_node_that_does_not_reach_the_master_is_named_in_time(slurm3: SlurmCluster) -> None:
    require_programs("iptables")
    with closed(slurm3.hosts, "node03", "node01", MEETING):
        code, _, _, said = doctor(slurm3, "--rdzv-timeout=15", "--timeout-s=15")
    assert code != 0, said
    assert re.search(r"error: node03 did not meet the others at node01:\d+\n.*: timed out", said), said
    assert said.count("nothing listened") == 1, said
