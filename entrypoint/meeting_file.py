"""Where no scheduler lists the hosts: the ranks find each other by a file in a folder that all of them see.

Rank 0 listens on a port that the system gave it, and writes its addresses, the port and a nonce into the file. The
others connect, show the nonce, and wait. When all have come, rank 0 stops listening, tells them to go on, and removes
the file; the port is then the rendezvous'. A file left by an earlier job is not believed: nothing answers to its nonce.
"""

import contextlib
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from entrypoint import network
from train.errors import FAILED, MusterError

RETRY_S = 0.2
CONNECT_TIMEOUT_S = 3.0
# Between rank 0's word to go on and the end of the connection.
PARTING_TIMEOUT_S = 5.0
MAX_LINE = 200


@dataclass(frozen=True)
class Party:
    """Who meets.

    Attributes:
        folder: one that all of them see.
        job: what tells this launch from others in the same folder, as far as that is known.
        index: this one's number, from 0; number 0 is the one whose address the others need.
        size: how many there are.
        timeout_s: how long they wait for each other.
    """

    folder: Path
    job: str
    index: int
    size: int
    timeout_s: float

    @property
    def path(self) -> Path:
        """The file that they meet by."""
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", self.job)[:80]
        return self.folder / f".muster-{safe}-{self.size}.json"


class _Note(NamedTuple):
    """What number 0 writes into the file."""

    addresses: list[str]
    port: int
    nonce: str


def meet(party: Party) -> tuple[str, int]:
    """The address and port of number 0, once all have met there.

    Raises:
        MusterError: the folder can't be written or read, or some did not come in time; the error says who.
    """
    try:
        return _host(party) if party.index == 0 else _join(party)
    except OSError as reason:
        raise MusterError(
            f"the ranks can't meet by a file in this folder: {reason.strerror or reason}",
            seen=str(party.path),
            fix="--rendezvous-dir FOLDER, one that all hosts share and you may write, or --master-addr HOST",
        ) from None


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
    nonce = secrets.token_hex(16)
    deadline = time.monotonic() + party.timeout_s
    guests: dict[int, socket.socket] = {}
    with _listener() as listener:
        port = int(listener.getsockname()[1])
        _write(party.path, _Note(addresses, port, nonce))
        try:
            while len(guests) < party.size - 1:
                _accept(listener, party, nonce, guests, deadline)
        finally:
            party.path.unlink(missing_ok=True)
    for guest in guests.values():
        with contextlib.suppress(OSError), guest:
            guest.sendall(b"go\n")
            # The guest closes first: this side's port is then free at once for the rendezvous.
            guest.settimeout(PARTING_TIMEOUT_S)
            guest.recv(1)
    return addresses[0], port


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(
    listener: socket.socket, party: Party, nonce: str, guests: dict[int, socket.socket], deadline: float
) -> None:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        missing = [index for index in range(1, party.size) if index not in guests]
        raise MusterError(
            f"{len(guests) + 1} of {party.size} came within {party.timeout_s:.0f} s; number "
            f"{', '.join(map(str, missing[:10]))} did not",
            seen=f"{party.path} on {socket.gethostname()}",
            fix="see that the command started everywhere, in the same folder; a slow start: --rdzv-timeout SECONDS",
            code=FAILED,
        )
    listener.settimeout(min(remaining_s, 1.0))
    try:
        guest, _ = listener.accept()
    except TimeoutError:
        return
    guest.settimeout(CONNECT_TIMEOUT_S)
    words = _line(guest).split()
    if len(words) != 2 or not secrets.compare_digest(words[0], nonce) or not words[1].isdigit():
        guest.close()
        return
    index = int(words[1])
    if not 0 < index < party.size or index in guests:
        guest.close()
        raise MusterError(
            f"number {index} came twice: two launches of {party.size} meet by the same file",
            seen=str(party.path),
            fix="--rendezvous-dir FOLDER, an own one for each launch",
        )
    guests[index] = guest


def _join(party: Party) -> tuple[str, int]:
    deadline = time.monotonic() + party.timeout_s
    last = "the file did not appear"
    while (remaining_s := deadline - time.monotonic()) > 0:
        note = _read(party.path)
        if note is not None:
            for address in note.addresses:
                answer = _knock(address, note.port, note.nonce, party.index, remaining_s)
                if answer is None:
                    return address, note.port
                last = f"{address}:{note.port}: {answer}"
        time.sleep(RETRY_S)
    raise MusterError(
        f"number {party.index} of {party.size} did not find number 0 within {party.timeout_s:.0f} s: {last}",
        seen=f"{party.path} on {socket.gethostname()}",
        fix="see that the command started everywhere, in the same folder; a slow start: --rdzv-timeout SECONDS",
        code=FAILED,
    )


def _knock(address: str, port: int, nonce: str, index: int, wait_s: float) -> str | None:
    """None once number 0 said to go on; else why it did not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(f"{nonce} {index}\n".encode())
            # The others may take their time.
            connection.settimeout(wait_s)
            return None if _line(connection) == "go" else "it is not, or no longer, the one of this launch"
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


def _write(path: Path, note: _Note) -> None:
    # Whole or not at all, and for nobody else's eyes: who has the nonce can take part.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{socket.gethostname()[:40]}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(note._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> _Note | None:
    try:
        content = json.loads(path.read_text())
        return _Note([str(address) for address in content["addresses"]], int(content["port"]), str(content["nonce"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
