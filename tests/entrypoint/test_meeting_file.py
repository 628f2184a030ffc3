"""Ranks that know of each other only a folder."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from entrypoint.meeting_file import Party, meet
from train.errors import MusterError


def party(folder: Path, index: int, size: int = 3, timeout_s: float = 20, job: str = "nojob") -> Party:
    return Party(folder, job, index, size, timeout_s)


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
    connection, _ = server.accept()
    with connection:
        connection.recv(100)
        connection.sendall(b"hello\n")


def test_who_is_missing_is_named(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, party(tmp_path, 0, timeout_s=1.5))
        guest = pool.submit(meet, party(tmp_path, 1, timeout_s=1.5))
        with pytest.raises(MusterError, match=r"2 of 3 came within 2 s; number 2 did not") as late:
            host.result()
        assert late.value.code == 1
        with pytest.raises(MusterError, match="number 1 of 3 did not find number 0"):
            guest.result()
    assert list(tmp_path.iterdir()) == []


def test_two_launches_in_one_folder_are_noticed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        host = pool.submit(meet, party(tmp_path, 0, timeout_s=10))
        guests = [pool.submit(meet, party(tmp_path, 1, timeout_s=2)) for _ in range(2)]
        with pytest.raises(MusterError, match="number 1 came twice"):
            host.result()
        for guest in guests:
            with pytest.raises(MusterError):
                guest.result()


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MusterError, match="can't meet by a file") as refusal:
        meet(party(tmp_path / "none", 0))
    assert "--rendezvous-dir" in refusal.value.fix


def test_a_hostile_job_name_stays_in_the_folder(tmp_path: Path) -> None:
    assert party(tmp_path, 0, job="../../etc/x;$(id)\n").path.parent == tmp_path
