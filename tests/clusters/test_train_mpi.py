"""`train` under Open MPI and MPICH: by ssh, by an agent in its place, inside Slurm; and launches that are refused."""

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clusters.hello import FOUR, hello, said
from tests.clusters.mpi import MpiHosts, hydra, hydra_command, openmpi, openmpi_command
from tests.clusters.slurm import SlurmCluster
from tests.clusters.weights import ONE_THREAD, STEPS, TRAIN, assert_world_of_four, lines_of_error

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

Launch = Callable[..., Any]
Weights = dict[str, torch.Tensor]

# mpirun passes on only the variables that options name; Hydra passes on all.
GIVEN = {openmpi: ["-x", "OMP_NUM_THREADS"], hydra: []}
LAUNCHERS = [pytest.param(openmpi, id="openmpi"), pytest.param(hydra, id="hydra")]
ONE = [pytest.param(openmpi, id="openmpi", marks=pytest.mark.long), pytest.param(hydra, id="hydra")]
"""The same for tests of which one launcher is enough in `make test-all`."""
BOTH = ("node01", "node02")


def left_in(folder: Path) -> list[str]:
    """The names of files that a rendezvous has left in `folder`."""
    return [path.name for path in folder.glob(".muster-*")]


@pytest.mark.parametrize("launch", LAUNCHERS)
def test_a_process_for_each_rank_by_ssh(mpi_hosts: MpiHosts, four_ranks: Weights, launch: Launch) -> None:
    name = f"worker-{launch.__name__}"
    argv = [TRAIN, "ddp", *STEPS, f"--name={name}"]
    done = launch(mpi_hosts, argv, *GIVEN[launch], env=ONE_THREAD, timeout=400)
    assert "2 nodes x 2 = 4 ranks" in done.stderr
    assert_world_of_four(mpi_hosts.shared / "runs" / name, four_ranks, BOTH)
    assert left_in(mpi_hosts.shared) == []


@pytest.mark.parametrize("launch", ONE)
def test_a_process_for_each_node_by_an_agent(mpi_hosts: MpiHosts, four_ranks: Weights, launch: Launch) -> None:
    name = f"agent-{launch.__name__}"
    meeting = mpi_hosts.shared / f"meeting-{name}"
    meeting.mkdir()
    argv = [TRAIN, "ddp", *STEPS, "--nproc-per-node=2", f"--name={name}", f"--rendezvous-dir={meeting}"]
    one_each = dict.fromkeys(BOTH, 1)
    launch(mpi_hosts, argv, *GIVEN[launch], ranks=one_each, agent=mpi_hosts.agent, env=ONE_THREAD, timeout=400)
    assert_world_of_four(mpi_hosts.shared / "runs" / name, four_ranks, BOTH)
    assert left_in(meeting) == []


@pytest.mark.parametrize(
    ("command", "given"),
    [
        pytest.param(openmpi_command, ["-x", "OMP_NUM_THREADS"], id="openmpi"),
        pytest.param(hydra_command, [], id="hydra", marks=pytest.mark.long),
    ],
)
def test_inside_slurm(
    mpi_in_slurm: SlurmCluster, four_ranks: Weights, command: Callable[..., list[str]], given: list[str]
) -> None:
    name = f"mpi-{command.__name__}"
    argv = command([TRAIN, "ddp", *STEPS, f"--name={name}"], *given)
    done = mpi_in_slurm.salloc("-N2", "--ntasks-per-node=2", *argv, env=ONE_THREAD, timeout=400, check=True)
    assert "muster: slurm job" in done.stderr
    # Slurm lists the hosts, so that the ranks meet without a file.
    assert "meeting on node01:" in done.stderr
    assert_world_of_four(mpi_in_slurm.shared / "runs" / name, four_ranks, BOTH)
    mpi_in_slurm.idle()


@pytest.mark.parametrize(
    ("launch", "given"),
    [
        pytest.param(openmpi, ["-x", "MASTER_ADDR=node01"], id="openmpi"),
        pytest.param(hydra, ["-genv", "MASTER_ADDR", "node01"], id="hydra"),
    ],
)
def test_a_given_address_needs_no_shared_folder(mpi_hosts: MpiHosts, launch: Launch, given: list[str]) -> None:
    argv = hello(mpi_hosts.shared, "--rendezvous-dir=/none")
    assert said(launch(mpi_hosts, argv, *given, timeout=400).stdout) == FOUR


# As in a container with process ids of its own: nothing distinguishes one launch of Hydra from another.
HIDDEN = ["unshare", "--pid", "--fork", "--mount-proc"]


def test_files_of_an_earlier_launch_are_not_used(mpi_hosts: MpiHosts) -> None:
    """Another server now listens on the port in the old file."""
    stale = mpi_hosts.shared / ".muster-local.0.0-4"
    stale.mkdir(0o700)
    address = mpi_hosts.hosts.addresses["node01"]
    left = {"address": address, "port": 22, "id": "0" * 32}
    (stale / "host").write_text(json.dumps(left) + "\n")
    assert said(hydra(mpi_hosts, [*HIDDEN, *hello(mpi_hosts.shared)], timeout=400).stdout) == FOUR
    assert left_in(mpi_hosts.shared) == []


def two_at_once(hosts: MpiHosts, launch: Launch, *prefix: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs two launches of four ranks at once: each rank adds 1 in one launch, and 100 in the other."""
    with ThreadPoolExecutor(2) as pool:
        argvs = [[*prefix, *hello(hosts.shared, "--rdzv-timeout=30", number=number)] for number in (1, 100)]
        return list(pool.map(lambda argv: launch(hosts, argv, check=False, timeout=400), argvs))


@pytest.mark.parametrize("launch", ONE)
def test_two_launches_at_once_in_one_folder(mpi_hosts: MpiHosts, launch: Launch) -> None:
    one, hundred = two_at_once(mpi_hosts, launch)
    assert said(one.stdout) == FOUR, one.stderr
    assert said(hundred.stdout) == [line.replace("4.0", "400.0") for line in FOUR], hundred.stderr
    assert left_in(mpi_hosts.shared) == []


def test_two_launches_that_cannot_be_told_apart_are_never_mixed(mpi_hosts: MpiHosts) -> None:
    done = two_at_once(mpi_hosts, hydra, *HIDDEN)
    worlds = [said(one.stdout) for one in done]
    assert {*worlds[0], *worlds[1]} <= {*FOUR, *(line.replace("4.0", "400.0") for line in FOUR)}
    for one, world in zip(done, worlds, strict=True):
        assert (one.returncode == 0) == (len(world) == 4), one.stderr
        assert len(world) == 4 or "another launch of 4" in one.stderr, one.stderr
    assert left_in(mpi_hosts.shared) == []


@pytest.mark.parametrize(
    ("launch", "options", "ranks"),
    [
        pytest.param(openmpi, ["--map-by", "node"], None, id="openmpi-in-turns"),
        pytest.param(hydra, ["-ppn", "1"], None, id="hydra-in-turns"),
        pytest.param(openmpi, [], {"node01": 1, "node02": 3}, id="openmpi-uneven"),
        pytest.param(hydra, [], {"node01": 1, "node02": 3}, id="hydra-uneven"),
    ],
)
def test_unsupported_layouts_of_ranks_are_refused_everywhere(
    mpi_hosts: MpiHosts, launch: Launch, options: list[str], ranks: dict[str, int] | None
) -> None:
    done = launch(mpi_hosts, [TRAIN, "ddp", *STEPS], *options, ranks=ranks, check=False, timeout=400)
    assert done.returncode == 2
    lines = lines_of_error(done.stderr)
    assert "the ranks don't lie in blocks" in lines[0] or "different numbers of processes" in lines[0]
    assert "Traceback" not in done.stderr
    assert left_in(mpi_hosts.shared) == []
