"""The tests' MPI launchers themselves: real ranks on fake hosts, by ssh, by an agent, inside a scheduler's job."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.deadline import wait_for
from tests.clusters.grid_engine import GridEngineCluster
from tests.clusters.mpi import MpiHosts, hydra, hydra_command, openmpi, openmpi_command
from tests.clusters.processes import processes_in
from tests.clusters.slurm import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.long]

Launch = Callable[..., Any]

# Each rank prints: host, rank, size, local rank, local size.
OPENMPI = "$OMPI_COMM_WORLD_RANK $OMPI_COMM_WORLD_SIZE $OMPI_COMM_WORLD_LOCAL_RANK $OMPI_COMM_WORLD_LOCAL_SIZE"
HYDRA = "$PMI_RANK $PMI_SIZE $MPI_LOCALRANKID $MPI_LOCALNRANKS"
LAUNCHERS = [pytest.param(openmpi, OPENMPI, id="openmpi"), pytest.param(hydra, HYDRA, id="hydra")]
COMMANDS = [pytest.param(openmpi_command, OPENMPI, id="openmpi"), pytest.param(hydra_command, HYDRA, id="hydra")]

BLOCK = ["node01 0 4 0 2", "node01 1 4 1 2", "node02 2 4 0 2", "node02 3 4 1 2"]


def _say(variables: str) -> list[str]:
    return ["sh", "-c", f"echo $(hostname) {variables}"]


def _by_rank(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if line.startswith("node")]
    return sorted(lines, key=lambda line: int(line.split()[1]))


@pytest.mark.parametrize(("launch", "variables"), LAUNCHERS)
def test_two_ranks_a_host_by_ssh(mpi_hosts: MpiHosts, launch: Launch, variables: str) -> None:
    assert _by_rank(launch(mpi_hosts, _say(variables)).stdout) == BLOCK


@pytest.mark.parametrize(("launch", "variables"), LAUNCHERS)
def test_two_ranks_a_host_by_an_agent(mpi_hosts: MpiHosts, launch: Launch, variables: str) -> None:
    before = len(mpi_hosts.agent_calls)
    assert _by_rank(launch(mpi_hosts, _say(variables), agent=mpi_hosts.agent).stdout) == BLOCK
    # The first host needs no agent: mpirun is there already.
    assert mpi_hosts.agent_calls[before:] == ["node02"]


@pytest.mark.parametrize(
    ("launch", "variables", "option"),
    [pytest.param(openmpi, OPENMPI, "--map-by node", id="openmpi"), pytest.param(hydra, HYDRA, "-ppn 1", id="hydra")],
)
def test_ranks_dealt_out_in_turn(mpi_hosts: MpiHosts, launch: Launch, variables: str, option: str) -> None:
    seen = _by_rank(launch(mpi_hosts, _say(variables), *option.split()).stdout)
    assert seen == ["node01 0 4 0 2", "node02 1 4 0 2", "node01 2 4 1 2", "node02 3 4 1 2"]


@pytest.mark.parametrize(("launch", "variables"), LAUNCHERS)
def test_uneven_hosts(mpi_hosts: MpiHosts, launch: Launch, variables: str) -> None:
    seen = _by_rank(launch(mpi_hosts, _say(variables), ranks={"node01": 1, "node02": 3}).stdout)
    assert seen == ["node01 0 4 0 1", "node02 1 4 0 3", "node02 2 4 1 3", "node02 3 4 2 3"]


@pytest.mark.parametrize(("launch", "variables"), LAUNCHERS)
def test_a_host_whose_own_name_is_loopback(
    mpi_cluster: Callable[..., MpiHosts], launch: Launch, variables: str
) -> None:
    hosts = mpi_cluster(["node01", "node02"], own_name_is_loopback=True)
    assert _by_rank(launch(hosts, _say(variables)).stdout) == BLOCK


@pytest.mark.parametrize(("command", "variables"), COMMANDS)
@pytest.mark.parametrize("within", ["salloc", "sbatch"])
def test_inside_slurm(
    mpi_in_slurm: SlurmCluster, command: Callable[..., list[str]], variables: str, within: str
) -> None:
    options = ["-N2", "--ntasks-per-node=2"]
    argv = command(_say(variables))
    if within == "salloc":
        output = mpi_in_slurm.salloc(*options, *argv, check=True).stdout
    else:
        output = mpi_in_slurm.sbatch(shlex.join(argv), *options, timeout=400).output
    assert _by_rank(output) == BLOCK
    mpi_in_slurm.idle()


@pytest.mark.parametrize(("command", "variables"), COMMANDS)
def test_inside_grid_engine(
    grid_engine2: GridEngineCluster, mpi_hosts: MpiHosts, command: Callable[..., list[str]], variables: str
) -> None:
    job = grid_engine2.qsub(shlex.join(command(_say(variables))), "-pe", "two", "4", timeout=400)
    first = job.accounts[0].host
    (other,) = {"node01", "node02"} - {first}
    assert _by_rank(job.output) == [f"{first} 0 4 0 2", f"{first} 1 4 1 2", f"{other} 2 4 0 2", f"{other} 3 4 1 2"]
    grid_engine2.idle()


@pytest.mark.parametrize(("launch", "variables"), LAUNCHERS)
def test_a_failed_rank_fails_the_launch(mpi_hosts: MpiHosts, launch: Launch, variables: str) -> None:
    rank = variables.split()[0]
    # Hydra may write to a proxy that is gone already: SIGPIPE ends it then, and the launch with it.
    code = "(3|-13)" if launch is hydra else "3"
    with pytest.raises(RuntimeError, match=rf"on node01 ended with {code};"):
        launch(mpi_hosts, ["sh", "-c", f"exit $((3 * ({rank} == 3)))"])


@pytest.mark.parametrize(("launch", "variables"), LAUNCHERS)
def test_a_deadline_ends_the_ranks_on_all_hosts(mpi_hosts: MpiHosts, launch: Launch, variables: str) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)waited 2 s for `mpi.*it wrote:.*node02 2 4"):
        launch(mpi_hosts, ["sh", "-c", f"echo $(hostname) {variables}; sleep 60"], timeout=2)
    for host in mpi_hosts.names:
        wait_for(f"{host} to be without ranks", lambda host=host: not mpi_hosts.processes(host), timeout_s=20)


def test_two_at_once_and_nothing_is_left(mpi_cluster: Callable[..., MpiHosts], mpi_hosts: MpiHosts) -> None:
    before = _machine()
    other = mpi_cluster(mpi_hosts.names)
    namespaces = other.hosts.namespaces()
    assert _by_rank(openmpi(other, _say(OPENMPI)).stdout) == BLOCK
    assert _by_rank(openmpi(mpi_hosts, _say(OPENMPI)).stdout) == BLOCK
    # Each has keys of its own, and neither has the machine's.
    keys = {(cluster.hosts.home / ".ssh" / "id_ed25519").read_text() for cluster in (other, mpi_hosts)}
    assert len(keys) == 2
    other.hosts.popen("node01", openmpi_command(["sleep", "90"], "--host", "node01:1,node02:1"))
    wait_for("a rank on node02", lambda: [p for p in other.processes("node02") if p.name == "sleep"], timeout_s=20)
    other.hosts.close()
    assert processes_in(namespaces) == []
    assert _machine() == before


def _machine() -> list[str]:
    """What MPI and ssh could leave on the machine: mounts, session folders, keys."""
    left = [*Path("/tmp").glob("ompi.*"), *Path("/tmp").glob("pmix*"), *Path("/dev/shm").glob("ompi.*")]
    keys = [f"{path} {path.stat().st_mtime}" for path in Path.home().glob(".ssh/*")]
    return sorted([*Path("/proc/self/mountinfo").read_text().splitlines(), *map(str, left), *keys])
