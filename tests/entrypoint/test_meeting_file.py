"""Ranks that know of each other only a folder."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from entrypoint import seats
from entrypoint.meeting_file import meet
from entrypoint.meeting_words import Party, knock, read
from entrypoint.seats import Seat
from tests.clusters.deadline import wait_for
from train.errors import MusterError


def party(
    folder: Path,
    index: int,
    size: int = 3,
    timeout_s: float = 20,
    job: str = "nojob",
    seat: Seat | MusterError | None = None,
) -> Party:
    return Party(folder, job, index, size, timeout_s, seat or place(index, 0, size))


def place(node: int, local: int, size: int, tasks: int = 1, host: int | None = None) -> Seat:
    """The process `local` of `tasks` on a host that takes itself for `node`, and is."""
    name = f"node{(node if host is None else host) + 1:02}"
    return Seat(name, f"{name} of a machine", node, local, tasks, f"{size // tasks} nodes x {tasks} ranks")


def test_all_learn_the_address_of_number_0_and_its_port_is_free_then(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(meet, [party(tmp_path, index, 4) for index in (3, 1, 0, 2)]))
    assert len({port for _, port in places}) == 1
    port = places[0][1]
    with socket.create_server(("", port)) as server:
        for address, _ in places:
            socket.create_connection((address, port), timeout=5).close()
        assert server.getsockname()[1] == port
    assert list(tmp_path.iterdir()) == []


def test_one_alone_meets_itself(tmp_path: Path) -> None:
    assert meet(party(tmp_path, 0, 1))[1] > 0


@pytest.mark.parametrize("stale", ["not json", "{}", None])
def test_the_file_of_an_earlier_job_is_not_believed(tmp_path: Path, stale: str | None) -> None:
    """Whatever it holds: nonsense, or the address of a server that lives and knows nothing of this launch."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        text = stale or json.dumps({"addresses": ["127.0.0.1"], "port": port, "nonce": "0" * 32})
        party(tmp_path, 1, 2).path.write_text(text)
        answering = threading.Thread(target=answer_nonsense, args=(foreign,), daemon=True)
        answering.start()
        with ThreadPoolExecutor(2) as pool:
            guest = pool.submit(meet, party(tmp_path, 1, 2))
            if stale is None:
                # The guest has knocked at the wrong door before number 0 is there.
                answering.join(10)
                assert not answering.is_alive()
            host = pool.submit(meet, party(tmp_path, 0, 2))
            assert guest.result()[1] == host.result()[1] != port


def answer_nonsense(server: socket.socket) -> None:
    # Where nobody comes, the end of the test closes it.
    with contextlib.suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"hello\n")


def test_who_is_missing_is_named(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, party(tmp_path, 0, timeout_s=1.5))
        # It would wait longer by itself, so that what it answers is what it heard.
        guest = pool.submit(meet, party(tmp_path, 1, timeout_s=30))
        with pytest.raises(MusterError, match=r"2 of 3 came within 2 s; number 2 did not") as late:
            host.result()
        assert late.value.code == 1
        # The one that came hears it too.
        assert str(guest.exception()) == str(late.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="number 1 of 3 did not find number 0 within 0 s: the file did not appear"):
        meet(party(tmp_path, 1, timeout_s=0.3))


def test_who_knocks_again_is_no_second_launch(tmp_path: Path) -> None:
    """As after a connection that broke, or an answer that came too late."""
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, party(tmp_path, 0))
        path = party(tmp_path, 0).path
        wait_for("the file", path.exists, 10)
        note = json.loads(path.read_text())
        words = {"nonce": note["nonce"], "number": 1, "name": "me", "seat": asdict(place(1, 0, 3))}
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", note["port"]), timeout=5) as guest:
                guest.sendall(json.dumps(words).encode() + b"\n")
                assert guest.recv(10) == b"here\n"
        pool.submit(meet, party(tmp_path, 2)).result(10)
        host.result(10)


def test_two_launches_in_one_folder_are_noticed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        parties = [replace(party(tmp_path, number), is_told_apart=False) for number in (0, 1, 1, 2, 2)]
        came = [pool.submit(meet, one) for one in parties]
        assert ["another launch of 3 meets by the same file" in str(one.exception()) for one in came] == [True] * 5


def test_one_that_comes_late_is_noticed_where_launches_cannot_be_told_apart(tmp_path: Path) -> None:
    """All of this launch's places are taken by another one's guests; then its own come."""
    with ThreadPoolExecutor(3) as pool:
        host = pool.submit(meet, replace(party(tmp_path, 0, 2), is_told_apart=False))
        note = wait_for("the file", lambda: read(party(tmp_path, 0, 2).path), 10)
        words = {"nonce": note.nonce, "number": 1, "seat": asdict(place(1, 0, 2))}
        answers = [pool.submit(knock, "127.0.0.1", note.port, words | {"name": name}, 10) for name in "ab"]
        assert "another launch of 2" in str(host.exception(10))
        assert [one.result().startswith("no {") for one in answers] == [True, True]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="can't meet by a file") as refusal:
        meet(party(tmp_path / "none", 0))
    assert "--rendezvous-dir" in refusal.value.fix


def test_a_hostile_job_name_stays_in_the_folder(tmp_path: Path) -> None:
    assert party(tmp_path, 0, job="../../etc/x;$(id)\n").path.parent == tmp_path


def test_blocks_are_believed() -> None:
    seats.check({rank: place(rank // 2, rank % 2, 4, 2) for rank in range(4)})
    seats.check({0: place(0, 0, 1)})


# Each rank in turn: the node that it takes its host for, its local rank, how many it counts there, its true host.
CONTRADICTIONS = {
    "dealt in turns, seen as blocks": (
        [(0, 0, 2, 0), (0, 0, 2, 1), (1, 1, 2, 0), (1, 1, 2, 1)],
        "two hosts take themselves",
    ),
    "a host that is two nodes": ([(0, 0, 1, 0), (1, 0, 1, 0)], "don't lie in one block"),
    "two hosts that are one node": ([(0, 0, 2, 0), (0, 1, 2, 1)], "two hosts take themselves for the same node"),
    "2, 1 and 1": ([(0, 0, 2, 0), (0, 1, 2, 0), (2, 0, 1, 1), (3, 0, 1, 2)], "different numbers of processes"),
    "one place twice": ([(0, 0, 2, 0), (0, 0, 2, 0)], "two processes have the same place"),
    "fewer than it counts": ([(0, 0, 2, 0), (1, 0, 2, 1)], "counts 2 processes on node01, and there are 1"),
}


@pytest.mark.parametrize(("told", "wrong"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(told: list[tuple[int, int, int, int]], wrong: str) -> None:
    said = {rank: place(node, local, len(told), tasks, host) for rank, (node, local, tasks, host) in enumerate(told)}
    with pytest.raises(MusterError, match=wrong) as refusal:
        seats.check(said)
    assert refusal.value.code == 2
    assert "node01" in refusal.value.seen


def test_all_are_told_the_same_refusal(tmp_path: Path) -> None:
    """Ranks 0 and 3 of four that are dealt in turns look like those of two blocks; the others don't."""
    told = [place(0, 0, 4, 2, 0), place(0, 1, 4, 2, 1), place(1, 0, 4, 2, 0), place(1, 1, 4, 2, 1)]
    with ThreadPoolExecutor(4) as pool:
        came = [pool.submit(meet, party(tmp_path, rank, 4, seat=seat)) for rank, seat in enumerate(told)]
        refusals = {str(one.exception(10)) for one in came}
    assert len(refusals) == 1
    assert "same node" in refusals.pop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", [[1], [0], [2, 1], [0, 1, 2]])
def test_all_hear_of_one_that_refuses(tmp_path: Path, refused: list[int]) -> None:
    refusal = MusterError("the ranks don't lie in blocks", seen="PMI_RANK=1", fix="mpiexec -ppn 2")
    with ThreadPoolExecutor(3) as pool:
        parties = [party(tmp_path, number, seat=refusal if number in refused else None) for number in range(3)]
        heard = [one.exception(10) for one in [pool.submit(meet, one) for one in parties]]
    assert [str(one) for one in heard] == [str(refusal)] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_waits_for_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entrypoint.meeting_file.REFUSED_TIMEOUT_S", 0.3)
    with pytest.raises(MusterError, match="no GPU"):
        meet(party(tmp_path, 0, timeout_s=900, seat=MusterError("no GPU", seen="", fix="")))


def test_a_second_launch_and_the_first_are_refused(tmp_path: Path) -> None:
    """Whose the guests are that came, and that will come, nobody knows."""
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(meet, party(tmp_path, 0, 2))
        wait_for("the first one's file", party(tmp_path, 0, 2).path.exists, 10)
        with pytest.raises(MusterError, match="another launch of 2 meets by the same file, on "):
            meet(party(tmp_path, 0, 2))
        guests = [pool.submit(meet, party(tmp_path, 1, 2)) for _ in range(2)]
        for one in (first, *guests):
            assert "another launch of 2 meets by the same file" in str(one.exception(10))
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_finds_its_file_replaced_ends(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(meet, party(tmp_path, 0, 2))
        wait_for("its file", party(tmp_path, 0, 2).path.exists, 10)
        other = json.dumps({"addresses": ["127.0.0.1"], "port": 9, "nonce": "1" * 32})
        party(tmp_path, 0, 2).path.write_text(other)
        with pytest.raises(MusterError, match="has written over"):
            host.result(10)
    assert party(tmp_path, 0, 2).path.read_text() == other


TERMINATED = """
import pathlib, sys
from entrypoint.meeting_file import meet
from entrypoint.meeting_words import Party, knock, read
from entrypoint.seats import Seat
meet(Party(pathlib.Path(sys.argv[1]), "nojob", 0, 2, 60, Seat("a", "a", 0, 0, 1, "")))
"""


def test_a_terminated_host_leaves_no_file(tmp_path: Path) -> None:
    """mpirun ends the other ranks so when one has refused."""
    with subprocess.Popen([sys.executable, "-c", TERMINATED, str(tmp_path)]) as host:
        wait_for("its file", party(tmp_path, 0, 2).path.exists, 20)
        host.terminate()
        assert host.wait(10) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(meet, [party(tmp_path, index, 2) for index in (0, 1)]))) == 1
    assert list(tmp_path.iterdir()) == []
