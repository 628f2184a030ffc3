"""Where no scheduler lists the hosts: the ranks find each other by a file in a folder that all of them see.

Rank 0 listens on a port that the system gave it, and writes its addresses, the port and a nonce into the file. The
others connect, show the nonce, say where they are, and wait. When all have come, rank 0 looks whether what they say
fits together, stops listening, removes the file, and tells all of them the same: go on, or why not. The port is then
the rendezvous'. A file left by an earlier job is not believed: nothing answers to its nonce.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, cast

import psutil

from entrypoint import network, seats
from entrypoint.seats import Seat
from train.errors import FAILED, MusterError

RETRY_S = 0.2
CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 5.0
# Where launches can't be told apart: from the last that came on, how long to look out for one too many.
DOUBT_S = 1.0
# From the first that can't take part on: how long the others have to come and hear it.
REFUSED_TIMEOUT_S = 30.0
# Between rank 0's word to go on and the end of the connection.
PARTING_TIMEOUT_S = 5.0
# Three texts of 900 characters, each of them escaped.
MAX_LINE = 20000
# In the place of a number: is somebody there?
NOBODY = -1
STRANGE = "it is not, or no longer, the one of this launch"
STRANGER = (-2, "", None)


@dataclass(frozen=True)
class Party:
    """Who meets.

    Attributes:
        folder: one that all of them see.
        job: what tells this launch from others in the same folder, as far as that is known.
        is_told_apart: whether no other launch can have the same.
        index: this one's number, from 0; number 0 is the one whose address the others need.
        size: how many there are.
        timeout_s: how long they wait for each other.
        seat: where this one is, and what it takes the others to be; or why it can't take part, which all shall hear.
    """

    folder: Path
    job: str
    index: int
    size: int
    timeout_s: float
    seat: Seat | MusterError
    is_told_apart: bool = True

    @property
    def path(self) -> Path:
        """The file that they meet by."""
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", self.job)[:120]
        return self.folder / f".muster-{safe}-{self.size}.json"


class _Note(NamedTuple):
    """What number 0 writes into the file."""

    addresses: list[str]
    port: int
    nonce: str


@dataclass
class _Guests:
    """Who has come so far.

    Attributes:
        expected: how many are to come, number 0 included.
        names: by number, what each calls itself, so that one that knocks again is known again.
        others: those of a second launch, which can't be told from this one's.
        seats: by number, where each is.
        connections: all that wait for a word.
        refusal: the first reason why this can't become a world.
    """

    expected: int
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    others: set[str] = field(default_factory=set[str])
    seats: dict[int, Seat] = field(default_factory=dict[int, Seat])
    connections: list[socket.socket] = field(default_factory=list[socket.socket])
    refusal: MusterError | None = None

    @property
    def are_complete(self) -> bool:
        """Whether nobody else is to come."""
        return len(self.names) + len(self.others) >= self.expected

    def seat(self, number: int, what: Seat | MusterError) -> None:
        """Takes down what `number` said."""
        if isinstance(what, Seat):
            self.seats[number] = what
        else:
            self.refusal = self.refusal or what

    def disturb(self, party: Party) -> None:
        """Takes down that there is a second launch: who of the two has come here can't be told, so neither starts."""
        self.expected = 2 * party.size - 1
        self.refusal = self.refusal or _taken(party, "meets by the same file")


def meet(party: Party) -> tuple[str, int]:
    """The address and port of number 0, once all have met there.

    Raises:
        MusterError: the folder can't be written or read, some did not come in time, or what they say of themselves
            contradicts each other; the error says who.
    """
    try:
        with _ended_by_terminate():
            return _host(party) if party.index == 0 else _join(party)
    except OSError as reason:
        raise MusterError(
            f"the ranks can't meet by a file in this folder: {reason.strerror or reason}",
            seen=str(party.path),
            fix="--rendezvous-dir FOLDER, one that all hosts share and you may write, or --master-addr HOST",
        ) from None


@contextlib.contextmanager
def _ended_by_terminate() -> Generator[None]:
    """SIGTERM, which mpirun sends when another rank has failed, ends it as an exception does: the file goes."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def machine() -> str:
    """What tells this host from all others: fresh containers share names, and hosts of one kernel share its id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def own_addresses() -> list[str]:
    """The addresses under which others may reach this host, the one of the default route first."""
    preferred = network.fabric_interface(())
    found: list[tuple[bool, str]] = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            usable = entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
            if usable and not network.is_loopback(entry.address):
                found.append((name != preferred, entry.address))
    # A machine without any network can still be all of the party itself.
    return [address for _, address in sorted(found)] or ["127.0.0.1"]


def _host(party: Party) -> tuple[str, int]:
    addresses = own_addresses()
    guests = _Guests(party.size)
    guests.seat(0, party.seat)
    with _listener() as listener:
        note = _Note(addresses, int(listener.getsockname()[1]), secrets.token_hex(16))
        _claim(party, note)
        try:
            _gather(listener, party, note, guests)
            if guests.refusal:
                raise guests.refusal
            seats.check(guests.seats)
        except MusterError as refusal:
            _tell(guests.connections, refusal)
            raise
        finally:
            if _read(party.path) == note:
                party.path.unlink(missing_ok=True)
    _tell(guests.connections, None)
    return addresses[0], note.port


def _gather(listener: socket.socket, party: Party, note: _Note, guests: _Guests) -> None:
    """Returns when all have come, or when it is clear that this can't become a world and the others had time to hear.

    Raises:
        MusterError: some did not come in time.
    """
    deadline = time.monotonic() + party.timeout_s
    while not guests.are_complete:
        if guests.refusal:
            deadline = min(deadline, time.monotonic() + REFUSED_TIMEOUT_S)
        if time.monotonic() >= deadline:
            if guests.refusal:
                return
            raise _missing(party, guests)
        _accept(listener, party, note, guests, deadline)
        if guests.are_complete and not (guests.refusal or party.is_told_apart):
            # Those who came may be another launch's: then this one's are on their way.
            until = time.monotonic() + DOUBT_S
            while time.monotonic() < until and not guests.refusal:
                _accept(listener, party, note, guests, until)


def _tell(guests: Iterable[socket.socket], refusal: MusterError | None) -> None:
    """Gives the guests the word that they wait for."""
    for guest in guests:
        with contextlib.suppress(OSError), guest:
            guest.settimeout(PARTING_TIMEOUT_S)
            guest.sendall(b"go\n" if refusal is None else f"no {json.dumps(_words(refusal))}\n".encode())
            # The guest closes first: this side's port is then free at once for the rendezvous.
            guest.recv(1)


def _words(refusal: MusterError) -> dict[str, Any]:
    return {"wrong": refusal.wrong[:900], "seen": refusal.seen[:900], "fix": refusal.fix[:900], "code": refusal.code}


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _missing(party: Party, guests: _Guests) -> MusterError:
    missing = [number for number in range(1, party.size) if number not in guests.names]
    return MusterError(
        f"{len(guests.names)} of {party.size} came within {party.timeout_s:.0f} s; number "
        f"{', '.join(map(str, missing[:10]))} did not",
        seen=f"{party.path} on {socket.gethostname()}",
        fix="see that the command started everywhere, in the same folder; a slow start: --rdzv-timeout SECONDS",
        code=FAILED,
    )


def _accept(listener: socket.socket, party: Party, note: _Note, guests: _Guests, deadline: float) -> None:
    listener.settimeout(min(max(deadline - time.monotonic(), 0.01), 1.0))
    try:
        guest, _ = listener.accept()
    except TimeoutError:
        if _read(party.path) not in (note, None):
            raise _taken(party, "has written over this launch's file") from None
        return
    guest.settimeout(CONNECT_TIMEOUT_S)
    number, name, seat = _introduced(_line(guest), note.nonce)
    if number == NOBODY or seat:
        with contextlib.suppress(OSError):
            guest.sendall(b"here\n")
    if number == NOBODY:
        guests.disturb(party)
    if seat is None or not 0 < number < party.size:
        guest.close()
        return
    guests.connections.append(guest)
    if guests.names.setdefault(number, name) == name:
        guests.seat(number, seat)
    else:
        guests.others.add(name)
        guests.disturb(party)


def _introduced(line: str, nonce: str) -> tuple[int, str, Seat | MusterError | None]:
    """The number, the name, and the seat or refusal of one that knows the nonce; anybody else has none."""
    try:
        said = cast("dict[str, Any]", json.loads(line))
        if not secrets.compare_digest(str(said["nonce"]), nonce):
            return STRANGER
        number, name = int(said["number"]), str(said["name"])
        if number == NOBODY:
            return number, name, None
        return number, name, MusterError(**said["refusal"]) if "refusal" in said else Seat(**said["seat"])
    except (ValueError, KeyError, TypeError):
        return STRANGER


def _join(party: Party) -> tuple[str, int]:
    deadline = time.monotonic() + party.timeout_s
    last = "the file did not appear"
    seat = party.seat
    said: dict[str, Any] = {"refusal": _words(seat)} if isinstance(seat, MusterError) else {"seat": asdict(seat)}
    said |= {"number": party.index, "name": secrets.token_hex(8)}
    while (remaining_s := deadline - time.monotonic()) > 0:
        note = _read(party.path)
        if note is not None:
            for address in note.addresses:
                answer = _knock(address, note.port, said | {"nonce": note.nonce}, remaining_s)
                if answer == "go":
                    return address, note.port
                if answer.startswith("no {"):
                    raise MusterError(**json.loads(answer.removeprefix("no ")))
                last = f"{address}:{note.port}: {answer or STRANGE}"
        time.sleep(RETRY_S)
    raise MusterError(
        f"number {party.index} of {party.size} did not find number 0 within {party.timeout_s:.0f} s: {last}",
        seen=f"{party.path} on {socket.gethostname()}",
        fix="see that the command started everywhere, in the same folder; a slow start: --rdzv-timeout SECONDS",
        code=FAILED,
    )


def _knock(address: str, port: int, words: dict[str, Any], wait_s: float) -> str:
    """What number 0 said last, or why it could not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(json.dumps(words).encode() + b"\n")
            # It has others to listen to; something else on a port of its own may never answer.
            connection.settimeout(ANSWER_TIMEOUT_S)
            if _line(connection) != "here":
                return ""
            if words["number"] == NOBODY:
                return "here"
            # The others may take their time.
            connection.settimeout(wait_s)
            return _line(connection)
    except OSError as reason:
        return str(reason)


def _line(connection: socket.socket) -> str:
    text = b""
    with contextlib.suppress(OSError):
        while not text.endswith(b"\n") and len(text) < MAX_LINE:
            piece = connection.recv(1)
            if not piece:
                break
            text += piece
    return text.decode("ascii", "replace").strip()


def _claim(party: Party, note: _Note) -> None:
    """Writes the file.

    Raises:
        MusterError: another launch meets by it at this moment.
    """
    # Whole or not at all, and for nobody else's eyes: who has the nonce can take part.
    # Its name is nobody else's: in containers process ids are the same ones again and again.
    temporary = party.path.with_name(f"{party.path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(note._asdict(), file)
            file.flush()
            os.fsync(file.fileno())
        while True:
            try:
                os.link(temporary, party.path)
                return
            except FileExistsError:
                _check_left_over(party)
                party.path.unlink(missing_ok=True)
            except OSError:
                # A file system without hard links.
                temporary.replace(party.path)
                return
    finally:
        temporary.unlink(missing_ok=True)


def _check_left_over(party: Party) -> None:
    note = _read(party.path)
    if note is None:
        return
    for address in note.addresses:
        if _knock(address, note.port, {"nonce": note.nonce, "number": NOBODY, "name": ""}, 0) == "here":
            raise _taken(party, f"meets by the same file, on {address}")


def _taken(party: Party, what: str) -> MusterError:
    return MusterError(
        f"another launch of {party.size} {what}",
        seen=str(party.path),
        fix="--rendezvous-dir FOLDER, an own one for each launch; or end the other one",
    )


def _read(path: Path) -> _Note | None:
    try:
        content = json.loads(path.read_text())
        return _Note([str(address) for address in content["addresses"]], int(content["port"]), str(content["nonce"]))
    except (ValueError, KeyError, TypeError):
        return None
    except OSError as reason:
        # NFS says so of a file that another host has just replaced.
        if reason.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
