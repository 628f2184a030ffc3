"""Where ranks meet: addresses and ports, and how each describes itself to the others where no list names the hosts."""

import socket
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from muster.entrypoint import recording
from muster.entrypoint.environment import Environment
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address as rendezvous, file as rendezvous_file, network
from muster.entrypoint.rendezvous.file import Peers
from muster.errors import MusterError
from tests.entrypoint.recorded import FOLDERS, detect


@pytest.fixture
def peers_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Environment, LaunchOptions], Peers]:
    """Finds the `Peers` by which a process of `env` would meet the others; it does not wait for them."""

    def find(env: Environment, options: LaunchOptions) -> Peers:
        asked: list[Peers] = []

        def meet(peers: Peers) -> tuple[str, int]:
            asked.append(peers)
            return "127.0.0.1", 4711

        monkeypatch.setattr(rendezvous_file, "meet", meet)
        monkeypatch.setattr(rendezvous_file, "exit_on_terminate", lambda: None)
        allocation = detect(env, options)
        meeting = rendezvous.by_file(rendezvous.meet(allocation, env, options), allocation, env, options)
        assert meeting.master_addr == "127.0.0.1"
        assert meeting.master_port is not None
        return asked[0]

    return find


def hydra(rank: int, size: int, local_rank: int, local_size: int) -> Environment:
    names = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": local_rank, "MPI_LOCALNRANKS": local_size}
    return Environment({name: str(value) for name, value in names.items()}, host="b")


def world_of(peers: Peers) -> str:
    assert not isinstance(peers.participant, MusterError)
    return peers.participant.world


def test_a_rank_of_its_own_meets_as_a_rank_and_an_agent_as_a_node(peers_of: Callable[..., Peers]) -> None:
    rank = peers_of(hydra(3, 4, 1, 2), LaunchOptions())
    assert (rank.number, rank.size) == (3, 4)
    assert world_of(rank) == "2 nodes x 2 ranks"
    agent = peers_of(hydra(1, 2, 0, 1), LaunchOptions(nproc_per_node="4"))
    assert (agent.number, agent.size) == (1, 2)
    # The number of ranks that torchrun starts may differ from node to node.
    assert world_of(agent) == "2 nodes, a process on each"


def test_a_process_of_mpirun_without_a_job_is_told_of_the_variables_that_mpirun_left_behind(
    peers_of: Callable[..., Peers],
) -> None:
    """mpirun has started it by ssh, on the second node of a PBS job."""
    folder = FOLDERS / "pbs"
    rank = recording.load(next(folder.glob("pbs_mpi_ompi-tmrsh.rank2.*")))
    alone = {name: value for name, value in rank.items() if not name.startswith("PBS_")}
    assert "-x PBS_JOBID" in peers_of(Environment(alone, host="pbsn2"), LaunchOptions()).hint
    assert not peers_of(hydra(3, 4, 1, 2), LaunchOptions()).hint


def test_launches_of_one_job_are_told_apart_where_their_launcher_has_a_name_for_each(
    peers_of: Callable[..., Peers],
) -> None:
    plain = peers_of(hydra(1, 2, 0, 1), LaunchOptions(nproc_per_node="1"))
    assert not plain.is_unique
    for file, name in (
        ("mpi_own/ompi_one_a_node.node02.1.env", "PMIX_NAMESPACE"),
        ("mpi_own/intel_mpi_one_a_node.node02.1.env", "I_MPI_HYDRA_UUID"),
    ):
        recorded = recording.load(FOLDERS / file)
        named = peers_of(recorded, LaunchOptions(nproc_per_node="1"))
        assert (named.job, named.is_unique) == (recorded[name], True)


def test_the_address_at_which_all_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the named interface, else of the default route, else of the first that is up: docker's idle one is not."""

    def address(text: str, family: int = socket.AF_INET) -> object:
        return SimpleNamespace(family=family, address=text)

    found = {"lo": [address("127.0.0.1")], "eth0": [address("10.0.0.5")], "ib0": [address("192.168.1.5")]}
    found |= {"docker0": [address("172.17.0.1")], "eno1": [address("fe80::1", socket.AF_INET6)]}
    up = {name: SimpleNamespace(isup=name != "docker0") for name in found}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    monkeypatch.setattr(network, "fabric_interface", lambda _: "ib0")
    assert network.own_address("eth0") == "10.0.0.5"
    assert network.own_address(None) == "192.168.1.5"
    monkeypatch.setattr(network, "fabric_interface", lambda _: None)
    assert network.own_address(None) == "10.0.0.5"
    up.clear()
    assert network.own_address(None) == "127.0.0.1"


def test_the_master_need_not_resolve_the_names_of_the_others() -> None:
    """The names only show the interface that leads to the others."""
    own = socket.gethostname()
    env = Environment({"MUSTER_HOSTS": f"{own},no-such-host.invalid"}, host=own, is_live=True)
    meeting = rendezvous.meet(detect(env), env, LaunchOptions())
    assert meeting.master_port


def test_the_master_of_several_nodes_has_an_address_towards_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the next node's name is resolved: a job may have thousands of nodes."""
    known = {"a": "10.0.0.1", "b": "10.0.0.2"}
    towards: list[tuple[str, ...]] = []

    def fabric_interface(targets: tuple[str, ...]) -> str:
        towards.append(targets)
        return "eth0"

    monkeypatch.setattr(network, "resolve", lambda host, _: known[host])
    monkeypatch.setattr(network, "fabric_interface", fabric_interface)
    monkeypatch.setattr(network, "address_of", {"eth0": "10.0.0.1"}.get)
    env = Environment({"MUSTER_HOSTS": "a,b"}, host="a", is_live=True)
    meeting = rendezvous.meet(detect(env), env, LaunchOptions())
    assert (meeting.interface, meeting.local_addr) == ("eth0", "10.0.0.1")
    env = Environment({"MUSTER_HOSTS": "a,b,c"}, host="a", is_live=True)
    rendezvous.meet(detect(env), env, LaunchOptions())
    assert towards == [("10.0.0.1", "10.0.0.2")] * 2


def test_pods_that_a_list_names_need_no_shared_folder() -> None:
    """Volcano's pods, which without its PyTorch plugin have no MASTER_ADDR and no MASTER_PORT."""
    meetings = []
    for pod in (0, 1):
        env = recording.load(FOLDERS / "documented" / f"volcano_workers.job-worker-{pod}.{pod}.env")
        allocation = detect(env)
        meetings.append(rendezvous.meet(allocation, env, LaunchOptions()))
        assert not rendezvous.needs_file(meetings[-1], allocation)
    assert {meeting.master_addr for meeting in meetings} == {"job-worker-0.job"}
    assert len({meeting.master_port for meeting in meetings}) == 1


def test_attempts_and_steps_of_a_job_have_ports_of_their_own() -> None:
    ports = {rendezvous.port_of("4711", attempt, step) for attempt in range(20) for step in range(20)}
    assert len(ports) == 400
    assert all(1024 < port < 65536 for port in ports)
    assert rendezvous.port_of("4711", 1, 2) == rendezvous.port_of("4711", 1, 2)
    assert rendezvous.port_of("4711", 0, 0) != rendezvous.port_of("4712", 0, 0)


def test_the_others_are_told_of_a_refusal_by_a_file_unless_they_meet_at_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Peers] = []
    monkeypatch.setattr(rendezvous_file, "meet", asked.append)
    monkeypatch.setattr(rendezvous_file, "exit_on_terminate", lambda: None)
    flux = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "f1"}
    refusal = MusterError("wrong", seen="seen", fix="fix")
    rendezvous.refuse_all(refusal, Environment(flux, host="b", is_live=True), LaunchOptions(master_addr="a"))
    rendezvous.refuse_all(refusal, Environment(flux, host="b"), LaunchOptions())  # a dry run
    assert asked == []
    rendezvous.refuse_all(refusal, Environment(flux, host="b", is_live=True), LaunchOptions())
    (peers,) = asked
    assert (peers.job, peers.number, peers.size, peers.participant) == ("f1.0.0", 1, 2, refusal)
    intel = recording.load(FOLDERS / "mpi" / "intel_mpi.node02.3.env")
    rendezvous.refuse_all(refusal, Environment(intel, host="node02", is_live=True), LaunchOptions())
    assert (asked[1].job, asked[1].number, asked[1].size) == (intel["I_MPI_HYDRA_UUID"], 3, 4)


@pytest.mark.parametrize("address", ["node02", "node02.cluster.org", "node00"], ids=["own", "domain", "not_of_step"])
def test_an_address_of_another_node_than_the_first_is_refused(address: str) -> None:
    """$(hostname) in each task; $(scontrol show hostnames | head -1) where a step leaves the job's first node out."""
    variables = {
        "SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "node[00-02]", "SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_PROCID": "1",
    }  # fmt: skip
    for name in ("node01", "node01.cluster.org", "node01i", "10.0.0.7"):
        env = Environment({**variables, "MASTER_ADDR": name}, host="node02")
        assert rendezvous.meet(detect(env), env, LaunchOptions()).master_addr == name
    env = Environment({**variables, "MASTER_ADDR": address}, host="node02")
    with pytest.raises(MusterError, match="is not node01, the first node of this launch") as caught:
        rendezvous.meet(detect(env), env, LaunchOptions())
    assert caught.value.fix == "unset MASTER_ADDR"
    with pytest.raises(MusterError, match="is not node01, the first node"):
        rendezvous.meet(detect(env), env, LaunchOptions(master_addr=address))
    # A user who numbers the nodes by hand knows which one is the first.
    by_hand = LaunchOptions(nnodes="3", node_rank=1)
    assert rendezvous.meet(detect(env, by_hand), env, by_hand).master_addr == address


@pytest.mark.parametrize(
    ("size", "local_size", "needs_file"), [(2, 1, True), (2, 2, True), (1, 1, False)], ids=["nodes", "tasks", "alone"]
)
def test_processes_that_no_list_names_have_to_find_each_other(size: int, local_size: int, needs_file: bool) -> None:
    ranks = {"PMI_RANK": "0", "PMI_SIZE": str(size), "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": str(local_size)}
    env = Environment(ranks, host="a")
    found = detect(env)
    assert rendezvous.needs_file(rendezvous.meet(found, env, LaunchOptions()), found) == needs_file


def test_a_name_with_addresses_of_both_kinds_leads_to_that_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert network.resolve("node01", "host node01") == "10.0.0.1"


def test_node_rank_0_by_hand_is_where_the_others_look_for_it() -> None:
    listed = Environment({"MUSTER_HOSTS": "node[01-03]"}, host="node03")

    def meet(env: Environment, node_rank: int, master_addr: str | None = None) -> str | None:
        options = LaunchOptions(nnodes="3", node_rank=node_rank, master_addr=master_addr)
        return rendezvous.meet(detect(env, options), env, options).master_addr

    with pytest.raises(MusterError, match="the other nodes look for it on node01") as caught:
        meet(listed, 0)
    assert "--node-rank=0" in caught.value.seen
    assert caught.value.fix.endswith("--master-addr node03")
    assert meet(listed, 0, "node03") == "node03"
    assert meet(Environment({**listed, "MASTER_ADDR": "10.0.0.3"}, host="node03"), 0) == "10.0.0.3"
    assert meet(listed, 2) == meet(Environment(listed.variables, host="node01.cluster.org"), 0) == "node01"


def test_a_node_rank_that_the_jobs_script_has_read_does_not_make_each_node_the_first() -> None:
    """srun muster run --nnodes 2 --node-rank $SLURM_NODEID --master-addr node01: both would wait for node rank 1."""
    task = recording.load(FOLDERS / "slurm" / "b_srun_N2_1per.node02.1.env")
    options = LaunchOptions(nnodes="2", node_rank=0, master_addr="node01")
    with pytest.raises(MusterError, match="--master-addr is not node02, the first node") as caught:
        rendezvous.meet(detect(task, options), task, options)
    assert "--node-rank=0 --master-addr=node01" in caught.value.seen
    assert caught.value.fix.startswith("--node-rank 0 on node01 alone; or ")
    for host in ("node01", "n1.of-another-name"):
        first = Environment(task.variables, host)
        assert rendezvous.meet(detect(first, options), first, options).master_addr == "node01"
