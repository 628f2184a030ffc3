"""The rendezvous by files, for launches without a list of hosts, in a folder that all ranks see.

Each launch has a folder of its own there. Its mode is 0700, so that nobody else can put anything into it:

    .muster-JOB-SIZE/
        host                {"address": "10.0.0.1", "port": 40123, "id": "5f..."}              written by participant 0
        5f....1.a41c...     {"participant": {"host": "node02", "node_rank": 1, ...}}          written by participant 1

Participant 0 writes `host` with a free port and a new id. Each of the others answers by a file whose name begins with
that id. When all have answered, participant 0 checks whether they fit together, and adds the result to each answer as a
second line: go on, or the refusal. Files that an earlier attempt left behind have another id, and are ignored. Nothing
is read from the network.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from muster.entrypoint.rendezvous import network
from muster.errors import ExitCode, MusterError, explaining, notify_if_slow, one_line
from muster.paths import text_of
from muster.units import plural

POLL_S = 0.1
# The others look less and less often: a thousand of them share a file system.
LONGEST_POLL_S = 1.0
NOTICE_AFTER_S = 20.0
# Where launches have no identity: how long after the last answer another one may still come.
CONFLICT_S = 1.0
# How long participant 0 leaves the result for the others to read.
READ_TIMEOUT_S = 10.0
# An answer and its result: each three texts of 1,001 characters, all of them escaped.
MAX_BYTES = 40_000
FIX_BLOCKS = (
    "start equally many on each host, each host's in one block: mpirun --map-by slot (Open MPI), mpiexec -ppn N (Hydra)"
)

T = TypeVar("T", bound=msgspec.Struct)


class Participant(msgspec.Struct, frozen=True):
    """One process of a launch, as it describes itself to the others.

    It knows its own host and its launcher's counts, and assumes the rest: ranks in blocks, as many on each host. Only
    together with the others can it see that this is wrong.

    Attributes:
        host: its host's name, for messages.
        machine: the host's identity, which other hosts of the same name don't share.
        node_rank: its host's number, as it assumes.
        local_rank: its number on that host.
        tasks_on_node: the number of participants on that host, as it assumes.
        world: the launch's size, as it assumes, in an error's words: "2 nodes x 2 ranks".
    """

    host: str
    machine: str
    node_rank: int
    local_rank: int
    tasks_on_node: int
    world: str


@dataclass(frozen=True)
class Peers:
    """A launch that meets by files, and the place of this process in it.

    Attributes:
        folder: one that all participants see.
        job: the launch's identity among others in the same folder, as far as that is known.
        number: this participant's, from 0, of `size`.
        interface: on number 0, the network interface at whose address all meet; None leaves it to the routes.
        participant: this one's description of itself; or why it can't take part, which all others get to read.
        is_unique: whether no other launch can have the same `job`.
        hint: a further reason why others may not come, for the message after a long wait; empty without one.
    """

    folder: Path
    job: str
    number: int
    size: int
    timeout_s: float
    participant: Participant | MusterError
    interface: str | None = None
    is_unique: bool = True
    hint: str = ""

    @property
    def path(self) -> Path:
        """The launch's own folder."""
        return self.folder / f".muster-{re.sub(r'[^A-Za-z0-9._-]', '_', self.job)[:120]}-{self.size}"


class _Host(msgspec.Struct, frozen=True):
    """The address and port at which all meet, and the id of participant 0's attempt."""

    address: str
    port: int
    id: str


class _Line(msgspec.Struct, frozen=True):
    """An answer, or its result: go on, unless there is a `refusal`, which has the values of `MusterError.parts`."""

    participant: Participant | None = None
    refusal: tuple[str, str, str, int] | None = None

    @property
    def error(self) -> MusterError | None:
        """The refusal, to be raised."""
        parts: dict[str, Any] = dict(zip(("wrong", "seen", "fix", "code"), self.refusal or (), strict=False))
        return MusterError(**parts) if parts else None


def meet(peers: Peers) -> tuple[str, int]:
    """Waits for all participants; returns an address of participant 0 and a free port there.

    Raises:
        MusterError: the folder can't be used or is not this user's alone, some did not come in time, or they
            contradict each other.
    """
    fix = "--rendezvous-dir FOLDER, one that all hosts share and where you may write, or --master-addr HOST"
    with explaining("the ranks can't meet by a file in this folder", seen=peers.path, fix=fix):
        return _gather(peers) if peers.number == 0 else _join(peers)


def machine() -> str:
    """This host's identity: new containers may share a name, and containers on one kernel share its boot id."""
    return f"{socket.gethostname()} {text_of(Path('/proc/sys/kernel/random/boot_id')).strip()}"


def check(participants: Mapping[int, Participant]) -> None:
    """Checks that the participants, by number, describe one launch.

    Raises:
        MusterError: two of them contradict each other; the error names both.
    """

    def refusal(wrong: str, *numbers: int) -> MusterError:
        described = [
            f"number {number} on {one.host}: node {one.node_rank}, local rank {one.local_rank}, {one.world}"
            for number, one in ((number, participants[number]) for number in numbers)
        ]
        return MusterError(wrong, seen="; ".join(described), fix=FIX_BLOCKS)

    of_machine: dict[str, int] = {}
    of_node: dict[int, int] = {}
    for number, one in sorted(participants.items()):
        if one.world != participants[0].world:
            raise refusal("the hosts run different numbers of processes", 0, number)
        first = of_machine.setdefault(one.machine, number)
        if participants[first].node_rank != one.node_rank:
            raise refusal("the ranks of a host don't lie in one block", first, number)
        first = of_node.setdefault(one.node_rank, number)
        if participants[first].machine != one.machine:
            raise refusal("two hosts have the same node rank", first, number)
    counts = Counter(one.machine for one in participants.values())
    for number, one in sorted(participants.items()):
        if counts[one.machine] != one.tasks_on_node:
            counted = f"{plural(one.tasks_on_node, 'process')} on {one.host}, but there are {counts[one.machine]}"
            raise refusal(f"number {number} expects {counted}", number)


def _gather(peers: Peers) -> tuple[str, int]:
    """Waits, as participant 0, for the others' answers, and publishes the result."""
    with contextlib.suppress(FileExistsError):
        peers.path.mkdir(0o700)
    with _opened(peers.path) as folder:
        host = _Host(network.own_address(peers.interface), network.free_port(), secrets.token_hex(16))
        # Renamed into place: of two launches that do so at the same moment, the one that is overwritten notices it.
        _write(folder, host.id, host)
        os.replace(host.id, "host", src_dir_fd=folder, dst_dir_fd=folder)
        try:
            check(_participants(folder, peers, host))
            _publish(folder, host, _Line())
        except MusterError as refusal:
            # If another launch has written over the file, the others answer that one, and get its refusal.
            if _read(folder, "host", _Host) == host:
                _publish(folder, host, _Line(refusal=tuple(refusal.parts.values())))
            raise
        finally:
            is_mine = _read(folder, "host", _Host) == host
            for name in os.listdir(folder):
                # Other attempts' files are left over if `host` is still this one's, else another launch's.
                if is_mine or name.startswith(host.id):
                    _remove(folder, name)
            with contextlib.suppress(OSError):
                peers.path.rmdir()
    return host.address, host.port


def _participants(folder: int, peers: Peers, host: _Host) -> dict[int, Participant]:
    """All participants, by number.

    Raises:
        MusterError: some did not come in time, one can't take part, or two launches meet here. It is raised only after
            the others had time to come, so that they can read it too.
    """
    answers: dict[str, tuple[int, Participant | MusterError]] = {"": (0, peers.participant)}
    last_came = time.monotonic()
    deadline = last_came + peers.timeout_s
    while True:
        now = time.monotonic()
        for name, number in _answers(folder, host).items():
            line = None if name in answers else _read(folder, name, _Line)
            if line and (one := line.participant or line.error):
                answers[name], last_came = (number, one), now
        participants = {number: one for number, one in answers.values() if isinstance(one, Participant)}
        refusals = [one for _, one in answers.values() if isinstance(one, MusterError)]
        numbers = {number for number, _ in answers.values()}
        size = peers.size
        if len(numbers) < len(answers):
            # Nobody knows which of two launches each of them belongs to, so neither starts.
            size, refusals = 2 * peers.size, [_conflict(peers, "uses the same file")]
        if refusals:
            deadline = min(deadline, now + network.REFUSED_TIMEOUT_S)
        if refusals and (len(answers) >= size or now >= deadline):
            raise refusals[0]
        # Those that came may be another launch's: then this launch's are still to come.
        if len(answers) >= size and (peers.is_unique or now - last_came >= CONFLICT_S):
            return participants
        if len(answers) < size and now >= deadline:
            missing = ", ".join([str(number) for number in range(peers.size) if number not in numbers][:10])
            raise _too_late(
                peers, f"{len(answers)} of {peers.size} came within {peers.timeout_s:.0f} s; number {missing} did not"
            )
        if (other := _read(folder, "host", _Host)) not in (host, None):
            refusal = _conflict(peers, "has overwritten this launch's file")
            _write(folder, f"{other.id}.0.{secrets.token_hex(8)}", _Line(refusal=tuple(refusal.parts.values())))
            raise refusal
        time.sleep(POLL_S)


def _publish(folder: int, host: _Host, result: _Line) -> None:
    """Adds the result to all answers; waits until the others have read and removed them, READ_TIMEOUT_S at most."""
    names = {name for name, number in _answers(folder, host).items() if number > 0}
    for name in names:
        with contextlib.suppress(OSError):
            _write(folder, name, result, os.O_APPEND)
    end = time.monotonic() + READ_TIMEOUT_S
    while time.monotonic() < end and not names.isdisjoint(os.listdir(folder)):
        time.sleep(POLL_S / 2)


def _join(peers: Peers) -> tuple[str, int]:
    """Joins as one of the other participants: answers participant 0, and waits for the result."""
    deadline = time.monotonic() + peers.timeout_s
    last = "the file did not appear"
    # A --rendezvous-dir that does not exist is a mistake: it is an error at once.
    peers.folder.stat()
    line = f"{socket.gethostname()} waits for the others by {peers.path}, {peers.timeout_s} s at most; {peers.hint}"
    with notify_if_slow(one_line(line.rstrip("; ")), after_s=NOTICE_AFTER_S):
        for _ in _polls(deadline):
            with contextlib.suppress(FileNotFoundError), _opened(peers.path) as folder:
                host = _read(folder, "host", _Host)
                if host and _is_agreed(folder, peers, host, deadline):
                    return host.address, host.port
                last = "it gave no result" if host else last
    raise _too_late(
        peers, f"number {peers.number} of {peers.size} did not find number 0 within {peers.timeout_s:.0f} s: {last}"
    )


def _is_agreed(folder: int, peers: Peers, host: _Host, deadline: float) -> bool:
    """Answers `host`; returns whether its result is to go on: False if it gives none, or another one takes its place.

    Raises:
        MusterError: the result is a refusal.
    """
    one = peers.participant
    answer = _Line(one) if isinstance(one, Participant) else _Line(refusal=tuple(one.parts.values()))
    name = f"{host.id}.{peers.number}.{secrets.token_hex(8)}"
    try:
        _write(folder, name, answer)
        for _ in _polls(deadline):
            # NFS shows the present content of a file that is opened again, but new files of a folder only later.
            result = _read(folder, name, _Line, line=1)
            if result and result.error:
                raise result.error
            if result or _read(folder, "host", _Host) != host:
                return result is not None
        return False
    finally:
        _remove(folder, name)


def _conflict(peers: Peers, what: str) -> MusterError:
    return MusterError(
        f"another launch of {peers.size} processes {what}",
        seen=str(peers.path),
        fix="--rendezvous-dir FOLDER, a separate one for each launch; or end the other launch",
    )


def _too_late(peers: Peers, wrong: str) -> MusterError:
    fixes = [peers.hint] if peers.hint else []
    fixes += ["check that all hosts started the command in the same folder", "for a slow start: --rdzv-timeout SECONDS"]
    seen = f"{peers.path} on {socket.gethostname()}"
    return MusterError(wrong, seen=seen, fix="; ".join(fixes), code=ExitCode.FAILED)


def _polls(deadline: float) -> Iterator[None]:
    """Yields until the deadline, with pauses that grow."""
    pause_s = POLL_S / 2
    while (left_s := deadline - time.monotonic()) > 0:
        yield
        time.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.3, LONGEST_POLL_S)


def exit_on_terminate() -> None:
    """Makes SIGTERM raise SystemExit, so that files are cleaned up: mpirun sends it when another rank has failed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextlib.contextmanager
def _opened(path: Path) -> Generator[int]:
    """A descriptor of the launch's folder, into which no other user can have put anything.

    Raises:
        MusterError: others own it, or may write there.
        NotADirectoryError: it is no folder, or a link to one.
        FileNotFoundError: there is none yet.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise MusterError(
                "the folder where the ranks meet must be private to its user, and is not: another user could take part",
                seen=f"{path}: {stat.filemode(status.st_mode)}, of user {status.st_uid}; this is user {os.geteuid()}",
                fix="--rendezvous-dir FOLDER, one of your own; or remove what is there",
            )
        yield folder
    finally:
        os.close(folder)


def _answers(folder: int, host: _Host) -> dict[str, int]:
    """The names of the answers to `host`, each with the participant's number."""
    matches = (re.fullmatch(rf"{host.id}\.([0-9]{{1,9}})\.[0-9a-f]+", name) for name in os.listdir(folder))
    return {match[0]: int(match[1]) for match in matches if match}


def _read(folder: int, name: str, kind: type[T], line: int = 0) -> T | None:
    """The content of a line of a file; None if it is missing, incomplete, or not of this `kind`."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:  # missing, a link, no file; or just replaced by another host, as NFS reports it
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        # The text after the last line feed is still being written.
        return msgspec.json.decode(os.read(file, MAX_BYTES).split(b"\n")[:-1][line], type=kind)
    except (IndexError, msgspec.MsgspecError, RecursionError):
        return None
    finally:
        os.close(file)


def _write(folder: int, name: str, content: msgspec.Struct, mode: int = os.O_CREAT | os.O_EXCL) -> None:
    """Writes one line to a new file, or appends it to one; a line is complete when it has its line feed."""
    number = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | mode, 0o600, dir_fd=folder)
    with open(number, "wb", buffering=0) as file:
        file.write(msgspec.json.encode(content) + b"\n")


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
