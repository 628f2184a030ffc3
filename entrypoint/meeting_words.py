"""The file that ranks without a host list meet by, and the words that they exchange; who says what is in meeting_file.

The file is one JSON object, whole or not there, for its owner's eyes: who has the nonce can take part.

    {"addresses": ["10.0.0.1"], "port": 40123, "nonce": "..."}

A guest says one JSON object on a line of its own: the nonce, its number, a name, and its seat or why it can't take
part. The answers are `here`, then `go`, or `no` with the refusal.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from entrypoint.seats import Seat
from train.errors import MusterError

CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 5.0
# Three texts of 900 characters, each of them escaped.
MAX_LINE = 20000
# In the place of a number: is somebody there?
NOBODY = -1
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


class Note(NamedTuple):
    """What number 0 writes into the file."""

    addresses: list[str]
    port: int
    nonce: str


def claim(party: Party, note: Note) -> None:
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
                check_left_over(party)
                party.path.unlink(missing_ok=True)
            except OSError:
                # A file system without hard links.
                temporary.replace(party.path)
                return
    finally:
        temporary.unlink(missing_ok=True)


def check_left_over(party: Party) -> None:
    """Returns if nobody meets by the file that is there.

    Raises:
        MusterError: somebody does.
    """
    note = read(party.path)
    if note is None:
        return
    for address in note.addresses:
        if knock(address, note.port, {"nonce": note.nonce, "number": NOBODY, "name": ""}, 0) == "here":
            raise taken(party, f"meets by the same file, on {address}")


def taken(party: Party, what: str) -> MusterError:
    """The refusal to share a file with another launch."""
    return MusterError(
        f"another launch of {party.size} {what}",
        seen=str(party.path),
        fix="--rendezvous-dir FOLDER, an own one for each launch; or end the other one",
    )


def read(path: Path) -> Note | None:
    """What the file says; None where there is none, or it is no such file."""
    try:
        content = json.loads(path.read_text())
        return Note([str(address) for address in content["addresses"]], int(content["port"]), str(content["nonce"]))
    except (ValueError, KeyError, TypeError):
        return None
    except OSError as reason:
        # NFS says so of a file that another host has just replaced.
        if reason.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def refusal_words(refusal: MusterError) -> dict[str, Any]:
    """What a refusal is on the wire."""
    return {"wrong": refusal.wrong[:900], "seen": refusal.seen[:900], "fix": refusal.fix[:900], "code": refusal.code}


def introduced(line: str, nonce: str) -> tuple[int, str, Seat | MusterError | None]:
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


def knock(address: str, port: int, words: dict[str, Any], wait_s: float) -> str:
    """What number 0 said last, or why it could not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(json.dumps(words).encode() + b"\n")
            # It has others to listen to; something else on a port of its own may never answer.
            connection.settimeout(ANSWER_TIMEOUT_S)
            if line(connection) != "here":
                return ""
            if words["number"] == NOBODY:
                return "here"
            # The others may take their time.
            connection.settimeout(wait_s)
            return line(connection)
    except OSError as reason:
        return str(reason)


def line(connection: socket.socket) -> str:
    """The next line of a connection, or what came of it."""
    text = b""
    with contextlib.suppress(OSError):
        while not text.endswith(b"\n") and len(text) < MAX_LINE:
            piece = connection.recv(1)
            if not piece:
                break
            text += piece
    return text.decode("ascii", "replace").strip()
