"""The binary file of PALS: files that are written here by the documented layout are read; damaged ones are refused."""

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import pals
from muster.errors import MusterError
from tests.entrypoint import recorded

HOSTS = ("x3001c0s13b0n0", "x3001c0s13b1n0")
PROCESSES = ((0, 0), (0, 1), (1, 0), (1, 1))


def table(kind: str, rows: Sequence[Sequence[object]]) -> bytes:
    return b"".join(struct.pack(f"<{kind}", *row) for row in rows)


def write(version: int, hosts: Sequence[str], processes: Sequence[tuple[int, int]], extra: bytes = b"") -> bytes:
    """An apinfo file, table after table. `extra`: what a later version may add at the end of a process's record."""
    commands = table("iii", [(len(processes), 1, 1)])
    pes = b"".join(table("iii", [(local, 0, node)]) + extra for node, local in processes)
    nodes = table("i64s", [(index, host.encode()) for index, host in enumerate(hosts)])
    # int, size_t... in the layout of C: an int before a size_t is followed by four bytes of padding.
    header_size = 160 if version == 5 else 136
    offsets = [header_size]
    for content in (b"", commands, pes, nodes):
        offsets.append(offsets[-1] + len(content))
    numbers = [
        ("i4x", version), ("Q", offsets[-1]),
        ("Q", 52), ("Q", offsets[0]), ("i4x", 0),
        ("Q", 12), ("Q", offsets[1]), ("i4x", 1),
        ("Q", 12 + len(extra)), ("Q", offsets[2]), ("i4x", len(processes)),
        ("Q", 68), ("Q", offsets[3]), ("i4x", len(hosts)),
        ("Q", 48), ("Q", offsets[4]), ("i4x", 0),
    ]  # fmt: skip
    if version == 5:
        numbers += [("Q", offsets[4]), ("Q", 0), ("Q", offsets[4])]
    header = b"".join(struct.pack(f"<{kind}", value) for kind, value in numbers)
    assert len(header) == header_size
    return header + commands + pes + nodes


@pytest.mark.parametrize("version", [1, 5])
def test_hosts_and_processes_are_read(version: int) -> None:
    assert pals.parse_apinfo(write(version, HOSTS, PROCESSES)) == (HOSTS, PROCESSES)


def test_records_may_be_longer_than_what_is_known_of_them() -> None:
    assert pals.parse_apinfo(write(5, HOSTS, PROCESSES, extra=b"\xff" * 8))[1] == PROCESSES


@pytest.mark.parametrize("version", [0, 2, 6])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match=f"version {version}"):
        pals.parse_apinfo(write(version, HOSTS, PROCESSES))


@pytest.mark.parametrize(
    ("hosts", "processes"),
    [
        (("a", "a"), PROCESSES),
        (("a", ""), PROCESSES),
        (("a", "$(reboot)"), PROCESSES),
        (("a",), PROCESSES),
        ((), PROCESSES),
        (HOSTS, ()),
        (HOSTS, ((0, 0), (0, 0))),
        (HOSTS, ((0, 0), (-1, 0))),
        (HOSTS, ((0, -1),)),
    ],
)
def test_contradictory_tables_are_refused(hosts: tuple[str, ...], processes: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"no host name|do not fit|not listed|listed twice"):
        pals.parse_apinfo(write(5, hosts, processes))


def test_a_damaged_file_is_refused_or_read_never_a_crash() -> None:
    data = write(5, HOSTS, PROCESSES)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"too few|bytes are there"):
            pals.parse_apinfo(data[:length])
    chance = random.Random(1)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        try:
            pals.parse_apinfo(bytes(damaged))
        except ValueError:
            continue


def test_the_documented_recordings_hold_such_files() -> None:
    for each in recorded.load("documented"):
        if each.scenario in ("pals_file_v1", "pals_file_v5"):
            data = bytes.fromhex(each.environment.files["PALS_APINFO"])
            assert pals.parse_apinfo(data) == (HOSTS, PROCESSES)


def test_the_file_is_read_from_disk_in_a_live_process(tmp_path: Path) -> None:
    path = tmp_path / "apinfo"
    path.write_bytes(write(5, HOSTS, PROCESSES))
    first = recording.load(recorded.FOLDERS / "documented" / "pals_file_v5.x3001c0s13b1n0.3.env")
    live = replace(first, variables={**first, "PALS_APINFO": str(path)}, files={}, is_live=True)
    found = recorded.detect(live)
    assert (found.hosts, found.rank, found.ranks_per_node) == (HOSTS, 3, (2, 2))
    path.write_bytes(write(5, HOSTS, ((0, 0), (1, 0), (0, 1), (1, 1))))
    assert recorded.detect(live).rank == 3
    path.write_bytes(write(5, HOSTS, ((1, 0), (1, 1), (0, 0), (0, 1))))
    with pytest.raises(MusterError, match="disagree"):
        recorded.detect(live)


def test_uneven_nodes_are_known_from_the_file() -> None:
    path = recorded.FOLDERS / "documented" / "pals_file_uneven.x3001c0s13b1n0.1.env"
    found = recorded.detect(recording.load(path))
    assert (found.ranks_per_node, found.rank, found.local_rank, found.world_size) == ((2, 1), 1, 0, 3)


def test_where_the_number_of_processes_is_not_told_the_file_is_to_be_shown() -> None:
    """With PALS_PMI=pmix there is no PMI_SIZE: with only the first node's address, the refusal would be the same."""
    hidden = recording.load(recorded.FOLDERS / "documented" / "pals_hidden_in_pbs.x3001c0s13b1n0.1.env")
    with pytest.raises(MusterError, match="PMI_SIZE is missing") as refusal:
        recorded.detect(replace(hidden, variables={name: hidden[name] for name in hidden if name != "PMI_SIZE"}))
    assert f"--bind {hidden['PALS_APINFO']}" in refusal.value.fix
    assert "MASTER_ADDR" not in refusal.value.fix
