"""The rendezvous of ranks that know nothing of each other but a shared folder."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from muster.entrypoint.rendezvous import file as rendezvous_file, network
from muster.entrypoint.rendezvous.file import Participant, Peers, check, meet
from muster.errors import MusterError
from tests.clusters.deadline import wait_for


def peers(
    folder: Path,
    number: int,
    size: int = 3,
    timeout_s: float = 20,
    job: str = "nojob",
    participant: Participant | MusterError | None = None,
) -> Peers:
    return Peers(folder, job, number, size, timeout_s, participant or place(number, 0, size))


def place(node: int, local: int, size: int, tasks: int = 1, host: int | None = None) -> Participant:
    """The process `local` of `tasks`; its host takes itself for node `node`, and is node `host` (default: `node`)."""
    name = f"node{(node if host is None else host) + 1:02}"
    return Participant(name, f"{name} of a machine", node, local, tasks, f"{size // tasks} nodes x {tasks} ranks")


def test_all_learn_the_address_of_number_0_and_its_port_is_free_then(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(meet, [peers(tmp_path, number, 4) for number in (3, 1, 0, 2)]))
    assert len(set(places)) == 1
    address, port = places[0]
    with socket.create_server(("", port)) as server:
        socket.create_connection((address, port), timeout=5).close()
        assert server.getsockname()[1] == port
    assert list(tmp_path.iterdir()) == []


def test_a_long_wait_says_what_it_waits_for_and_what_may_be_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous_file, "NOTICE_AFTER_S", 0.1)
    alone = replace(peers(tmp_path, 1, timeout_s=1), hint="mpirun -x PBS_JOBID")
    with pytest.raises(MusterError) as refusal:
        meet(alone)
    assert str(alone.path) in capsys.readouterr().err
    assert "mpirun -x PBS_JOBID" in refusal.value.fix


def test_one_alone_meets_itself(tmp_path: Path) -> None:
    assert meet(peers(tmp_path, 0, 1))[1] > 0


def leave(folder: Path, content: str, name: str = "host") -> None:
    """Leaves a file in the launch's folder, as an earlier attempt may."""
    path = peers(folder, 0).path
    path.mkdir(0o700, exist_ok=True)
    (path / name).write_text(content)
    (path / name).chmod(0o600)


def host_line(**other: object) -> str:
    return json.dumps({"address": "127.0.0.1", "port": 9, "id": "0" * 32} | other) + "\n"


ODD = [
    "", "not json\n", "{}\n", "[]\n", "null\n", "[" * 20_000 + "\n", "9" * 5_000 + "\n", host_line()[:-1],
    host_line(), host_line(port=10**9), host_line(address=""), host_line(address=7), host_line(id=None),
    host_line(id="../.."),
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_the_file_of_an_earlier_attempt_is_not_believed(tmp_path: Path, odd: str) -> None:
    leave(tmp_path, odd)
    leave(tmp_path, odd, f"{'0' * 32}.1.{'1' * 16}")
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(meet, peers(tmp_path, number)) for number in (1, 2)]
        port = meet(peers(tmp_path, 0))[1]
        assert [one.result()[1] for one in others] == [port] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("result", ["\n", "x\n", "[]\n", '{"refusal": 1}\n', '{"refusal": {"no": 1}}\n', "[" * 9_000])
def test_an_odd_result_is_no_result(tmp_path: Path, result: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        leave(tmp_path, host_line())
        guest = pool.submit(meet, peers(tmp_path, 1, timeout_s=1.5))  # time in which the odd result is written
        (answer,) = wait_for("the answer", lambda: list(peers(tmp_path, 1).path.glob("0*.1.*")), 10)
        wait_for("the whole answer", lambda: answer.read_text().endswith("\n"), 10)
        assert stat.S_IMODE(answer.stat().st_mode) == 0o600
        with answer.open("a") as file:
            file.write(result)
        with pytest.raises(MusterError, match="it gave no result"):
            guest.result()


def test_a_missing_participant_is_named(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, peers(tmp_path, 0, timeout_s=1.5))
        # By itself it would wait longer: so its error is the one that number 0 has sent.
        guest = pool.submit(meet, peers(tmp_path, 1, timeout_s=30))
        with pytest.raises(MusterError, match=r"2 of 3 came within 2 s; number 2 did not") as late:
            host.result()
        assert late.value.code == 1
        # The participant that came gets the same error.
        assert str(guest.exception()) == str(late.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="number 1 of 3 did not find number 0 within 0 s: the file did not appear"):
        meet(peers(tmp_path, 1, timeout_s=0.3))


# What another user can put into a folder in which all may write, and what users may have in their own.


def foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives folders away")
    path.mkdir(0o700)
    os.chown(path, 12345, 12345)


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def linked(path: Path) -> None:
    target = path.with_name("target")
    target.mkdir(0o700)
    path.symlink_to(target)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def listening(path: Path) -> None:
    # The path is too long for a socket's name: it is bound in the folder.
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def device(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root makes devices")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def enormous(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)  # a sparse file


def of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    path.write_text(host_line())
    path.chmod(0o666)
    os.chown(path, 12345, 12345)


def hard_link(path: Path) -> None:
    """A hard link to another user's file, which everybody may write."""
    of_another_user(target := path.parent.with_name("of-another-user"))
    path.hardlink_to(target)


PLANTED = [foreign, open_to_all, linked, Path.touch, os.mkfifo]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_folder_is_refused_at_once(tmp_path: Path, plant: Callable[[Path], object], number: int) -> None:
    tmp_path.chmod(0o1777)
    plant(peers(tmp_path, 0).path)
    start = time.monotonic()
    wrong = "another user could take part" if plant in (foreign, open_to_all) else "Not a directory"
    with pytest.raises(MusterError, match=wrong) as refusal:
        meet(peers(tmp_path, number))
    assert time.monotonic() - start < 5
    assert "--rendezvous-dir" in refusal.value.fix


@pytest.mark.parametrize(
    "plant", [linked, dangling, os.mkfifo, listening, device, enormous, of_another_user, hard_link]
)
def test_what_is_no_file_is_not_read(tmp_path: Path, plant: Callable[[Path], object]) -> None:
    """To open a FIFO, or to read a device or a large file, would block a process."""
    path = peers(tmp_path, 0).path
    path.mkdir(0o700)
    plant(path / "host")
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(meet, peers(tmp_path, number)) for number in (1, 2)]
        time.sleep(0.3)  # time in which the others have read what is there
        assert not any(one.done() for one in others)
        assert not list(path.glob("000*")), "somebody has answered what another user planted"
        port = meet(peers(tmp_path, 0))[1]
        assert [one.result()[1] for one in others] == [port] * 2


def test_nothing_listens_while_the_ranks_meet(tmp_path: Path) -> None:
    """So no stranger's connection can delay them."""
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(meet, peers(tmp_path, 0, timeout_s=1.5))
        line = wait_for("the file", lambda: whole_host(tmp_path), 10)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", line["port"]), timeout=5)
        assert "1 of 3 came within 2 s; number 1, 2 did not" in str(host.exception())


def whole_host(folder: Path) -> dict[str, int] | None:
    """The content of participant 0's file; None until it is complete."""
    path = peers(folder, 0).path / "host"
    text = path.read_text() if path.exists() else ""
    return json.loads(text) if text.endswith("\n") else None


MANY = """
import pathlib, resource, sys
from muster.entrypoint.rendezvous.file import Participant, Peers, meet
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
me = Participant("node", "machine", 0, 0, 1200, "1 nodes x 1200 ranks")
print(meet(Peers(pathlib.Path(sys.argv[1]), "nojob", 0, 1200, 240, me))[1])
"""


def test_1200_participants_need_few_files_at_once(tmp_path: Path) -> None:
    path = tmp_path / ".muster-nojob-1200"
    with subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path)], stdout=subprocess.PIPE, text=True) as host:
        wait_for("the file", lambda: (path / "host").exists() and (path / "host").read_text().endswith("\n"), 120)
        line = json.loads((path / "host").read_text())
        one = {"host": "node", "machine": "machine", "node_rank": 0, "tasks_on_node": 1200}
        answers = [path / f"{line['id']}.{number}.{number:016x}" for number in range(1, 1200)]
        for number, answer in enumerate(answers, start=1):
            said = {"participant": one | {"local_rank": number, "world": "1 nodes x 1200 ranks"}}
            answer.write_text(json.dumps(said) + "\n")
            answer.chmod(0o600)
        wait_for("the results", lambda: all(answer.read_text().count("\n") == 2 for answer in answers), 20)
        assert {json.loads(answer.read_text().split("\n")[1])["refusal"] for answer in answers} == {None}
        for answer in answers:
            answer.unlink()
        assert host.communicate(timeout=20)[0] == f"{line['port']}\n"
    assert list(tmp_path.iterdir()) == []


def test_of_two_launches_that_begin_at_the_same_moment_both_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Barrier(2, timeout=120)
    free_port, unlink = network.free_port, os.unlink
    monkeypatch.setattr(network, "free_port", lambda: (both.wait(), free_port())[1])  # just before each writes its file
    # A slow file server: what the file was before is gone for both by then.
    monkeypatch.setattr(os, "unlink", lambda *args, **others: (unlink(*args, **others), time.sleep(0.2)))
    monkeypatch.setattr(network, "REFUSED_TIMEOUT_S", 0.1)
    (tmp_path / ".muster-nojob-3").mkdir(mode=0o700)
    (tmp_path / ".muster-nojob-3" / "host").write_text("left over\n")
    with ThreadPoolExecutor(2) as pool:
        came = [pool.submit(meet, peers(tmp_path, 0, timeout_s=120)) for _ in range(2)]
        assert ["another launch of 3" in str(one.exception()) for one in came] == [True] * 2


def test_two_launches_in_one_folder_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_file, "CONFLICT_S", 30.0)  # on a busy machine a thread may start seconds late
    with ThreadPoolExecutor(6) as pool:
        numbers = (0, 1, 1, 2, 2, 0)
        came = [pool.submit(meet, replace(peers(tmp_path, number), is_unique=False)) for number in numbers]
        assert ["another launch of 3" in str(one.exception()) for one in came] == [True] * 6
    assert list(tmp_path.iterdir()) == []


def test_one_that_comes_late_is_noticed_where_launches_cannot_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another launch's participant has taken the place of number 1; then this launch's own number 1 comes."""
    monkeypatch.setattr(rendezvous_file, "CONFLICT_S", 30.0)
    monkeypatch.setattr(network, "REFUSED_TIMEOUT_S", 0.5)
    with ThreadPoolExecutor(3) as pool:
        came = [pool.submit(meet, replace(peers(tmp_path, number, 2), is_unique=False)) for number in (0, 1)]
        time.sleep(0.4)
        came.append(pool.submit(meet, peers(tmp_path, 1, 2)))
        assert ["another launch of 2" in str(one.exception(10)) for one in came] == [True] * 3


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    for number in (0, 1):
        with pytest.raises(MusterError, match="can't meet by a file") as refusal:
            meet(peers(tmp_path / "none", number))
        assert "--rendezvous-dir" in refusal.value.fix


def test_a_hostile_job_name_stays_in_the_folder(tmp_path: Path) -> None:
    assert peers(tmp_path, 0, job="../../etc/x;$(id)\n").path.parent == tmp_path


def test_blocks_are_believed() -> None:
    check({rank: place(rank // 2, rank % 2, 4, 2) for rank in range(4)})
    check({0: place(0, 0, 1)})


# Of each rank: the node rank that it assumes, its local rank, the processes that it counts on its host, its real host.
CONTRADICTIONS = {
    "dealt in turns, seen as blocks": (
        [(0, 0, 2, 0), (0, 0, 2, 1), (1, 1, 2, 0), (1, 1, 2, 1)],
        "two hosts have the same node rank",
    ),
    "a host that is two nodes": ([(0, 0, 1, 0), (1, 0, 1, 0)], "don't lie in one block"),
    "two hosts that are one node": ([(0, 0, 2, 0), (0, 1, 2, 1)], "two hosts have the same node rank"),
    "2, 1 and 1": ([(0, 0, 2, 0), (0, 1, 2, 0), (2, 0, 1, 1), (3, 0, 1, 2)], "different numbers of processes"),
    "fewer than it counts": ([(0, 0, 2, 0), (1, 0, 2, 1)], "expects 2 processes on node01, but there are 1"),
}


@pytest.mark.parametrize(("told", "wrong"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(told: list[tuple[int, int, int, int]], wrong: str) -> None:
    said = {rank: place(node, local, len(told), tasks, host) for rank, (node, local, tasks, host) in enumerate(told)}
    with pytest.raises(MusterError, match=wrong) as refusal:
        check(said)
    assert refusal.value.code == 2
    assert "node01" in refusal.value.seen


def test_all_are_told_the_same_refusal(tmp_path: Path) -> None:
    """Ranks 0 and 3 of four that are dealt in turns look like those of two blocks; the others don't."""
    told = [place(0, 0, 4, 2, 0), place(0, 1, 4, 2, 1), place(1, 0, 4, 2, 0), place(1, 1, 4, 2, 1)]
    with ThreadPoolExecutor(4) as pool:
        came = [pool.submit(meet, peers(tmp_path, rank, 4, participant=one)) for rank, one in enumerate(told)]
        refusals = {str(one.exception(10)) for one in came}
    assert len(refusals) == 1
    assert "same node" in refusals.pop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", [[1], [0], [2, 1], [0, 1, 2]])
def test_all_hear_of_one_that_refuses(tmp_path: Path, refused: list[int]) -> None:
    refusal = MusterError("the ranks don't lie in blocks", seen="PMI_RANK=1", fix="mpiexec -ppn 2")
    with ThreadPoolExecutor(3) as pool:
        all_peers = [peers(tmp_path, one, participant=refusal if one in refused else None) for one in range(3)]
        heard = [one.exception(10) for one in [pool.submit(meet, one) for one in all_peers]]
    assert [str(one) for one in heard] == [str(refusal)] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_waits_for_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "REFUSED_TIMEOUT_S", 0.3)
    with pytest.raises(MusterError, match="no GPU"):
        meet(peers(tmp_path, 0, timeout_s=900, participant=MusterError("no GPU", seen="", fix="")))


def test_a_host_that_finds_its_file_replaced_ends(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(meet, peers(tmp_path, 0))
        wait_for("its file", lambda: whole_host(tmp_path), 10)
        leave(tmp_path, host_line())
        with pytest.raises(MusterError, match="has overwritten"):
            host.result(10)
    assert (peers(tmp_path, 0).path / "host").read_text() == host_line()


TERMINATED = """
import pathlib, sys
from muster.entrypoint.rendezvous.file import Participant, Peers, exit_on_terminate, meet
exit_on_terminate()
meet(Peers(pathlib.Path(sys.argv[1]), "nojob", int(sys.argv[2]), 3, 60, Participant("a", "a", 0, 0, 1, "")))
"""


def test_a_terminated_participant_leaves_no_file(tmp_path: Path) -> None:
    """mpirun sends SIGTERM to the other ranks when one has refused."""
    argv = [sys.executable, "-c", TERMINATED, str(tmp_path)]
    with subprocess.Popen([*argv, "0"]) as host, subprocess.Popen([*argv, "1"]) as guest:
        wait_for("the answer", lambda: list(tmp_path.glob(".muster-*/*.1.*")), 120)
        for process in (guest, host):
            process.terminate()
            assert process.wait(20) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
