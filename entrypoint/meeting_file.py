"""Where no scheduler lists the hosts: the ranks find each other by a file in a folder that all of them see.

Rank 0 listens on a port that the system gave it, and writes its addresses, the port and a nonce into the file. The
others connect, show the nonce, say where they are, and wait. When all have come, rank 0 looks whether what they say
fits together, stops listening, removes the file, and tells all of them the same: go on, or why not. The port is then
the rendezvous'. A file left by an earlier job is not believed: nothing answers to its nonce.
"""

import contextlib
import json
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
from typing import Any, NoReturn

import psutil

from entrypoint import meeting_words, network, seats
from entrypoint.meeting_words import Party
from entrypoint.seats import Seat
from train.errors import FAILED, MusterError

RETRY_S = 0.2
# Where launches can't be told apart: from the last that came on, how long to look out for one too many.
DOUBT_S = 1.0
# From the first that can't take part on: how long the others have to come and hear it.
REFUSED_TIMEOUT_S = 30.0
# Between rank 0's word to go on and the end of the connection.
PARTING_TIMEOUT_S = 5.0
STRANGE = "it is not, or no longer, the one of this launch"


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
        self.refusal = self.refusal or meeting_words.taken(party, "meets by the same file")


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
        note = meeting_words.Note(addresses, int(listener.getsockname()[1]), secrets.token_hex(16))
        meeting_words.claim(party, note)
        try:
            _gather(listener, party, note, guests)
            if guests.refusal:
                raise guests.refusal
            seats.check(guests.seats)
        except MusterError as refusal:
            _tell(guests.connections, refusal)
            raise
        finally:
            if meeting_words.read(party.path) == note:
                party.path.unlink(missing_ok=True)
    _tell(guests.connections, None)
    return addresses[0], note.port


def _gather(listener: socket.socket, party: Party, note: meeting_words.Note, guests: _Guests) -> None:
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
            guest.sendall(
                b"go\n" if refusal is None else f"no {json.dumps(meeting_words.refusal_words(refusal))}\n".encode()
            )
            # The guest closes first: this side's port is then free at once for the rendezvous.
            guest.recv(1)


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


def _accept(listener: socket.socket, party: Party, note: meeting_words.Note, guests: _Guests, deadline: float) -> None:
    listener.settimeout(min(max(deadline - time.monotonic(), 0.01), 1.0))
    try:
        guest, _ = listener.accept()
    except TimeoutError:
        if meeting_words.read(party.path) not in (note, None):
            raise meeting_words.taken(party, "has written over this launch's file") from None
        return
    guest.settimeout(meeting_words.CONNECT_TIMEOUT_S)
    number, name, seat = meeting_words.introduced(meeting_words.line(guest), note.nonce)
    if number == meeting_words.NOBODY or seat:
        with contextlib.suppress(OSError):
            guest.sendall(b"here\n")
    if number == meeting_words.NOBODY:
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


def _join(party: Party) -> tuple[str, int]:
    deadline = time.monotonic() + party.timeout_s
    last = "the file did not appear"
    seat = party.seat
    said: dict[str, Any] = (
        {"refusal": meeting_words.refusal_words(seat)} if isinstance(seat, MusterError) else {"seat": asdict(seat)}
    )
    said |= {"number": party.index, "name": secrets.token_hex(8)}
    while (remaining_s := deadline - time.monotonic()) > 0:
        note = meeting_words.read(party.path)
        if note is not None:
            for address in note.addresses:
                answer = meeting_words.knock(address, note.port, said | {"nonce": note.nonce}, remaining_s)
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
