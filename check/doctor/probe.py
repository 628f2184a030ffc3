"""A knock at a node's port: whether it is really that node which answers, and whether much gets through."""

import contextlib
import errno
import hashlib
import hmac
import random
import secrets
import socket
import time
from dataclasses import dataclass
from threading import Thread

FIRST_PORT, NUM_PORTS = 61000, 4536
"""Of these the launcher takes the port at which ranks meet (entrypoint/rendezvous.py)."""

CONNECT_S, ANSWER_S = 3.0, 10.0
"""A connection is the kernel's work; an answer is a program's, on a machine that may be busy."""

TIMED_OUT, REFUSED, UNREACHABLE = "timed out", "refused", "unreachable"
SILENT, STRANGER, STALLED = (
    "connected, then silence",
    "another program answers there",
    "small messages pass, 64 KiB do not",
)

_NONCE, _DIGEST, _MUCH = 16, 32, 1 << 16
_NO_WAY = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


@dataclass(frozen=True)
class Answer:
    """What came of a knock.

    Attributes:
        wrong: empty where all is well.
        ms: milliseconds that a short message took there and back.
    """

    wrong: str
    ms: float


class Door:
    """A port of this host that answers to those who know its secret, until it is closed.

    Args:
        address: of the one interface that it listens on.
        port: 0 takes any that the kernel gives.

    Raises:
        OSError: it can't listen there.
    """

    def __init__(self, address: str, port: int, secret: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret.encode()
        self._socket = socket.create_server((address, port), family=family, backlog=256)
        self.port = int(self._socket.getsockname()[1])
        Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Ends it."""
        # Without this the thread that accepts would keep the port open.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            # Longer than who knocks: that one tells what became of it, and would only see that this one hung up.
            connection.settimeout(3 * ANSWER_S)
            for length in (_NONCE, _MUCH):
                connection.sendall(_sign(self._secret, _read(connection, length)))


def open_in_range(address: str, secret: str) -> Door:
    """A door on a port of those at which ranks meet.

    Raises:
        OSError: it can't listen on any of some that were tried.
    """
    for port in random.sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 19):
        with contextlib.suppress(OSError):
            return Door(address, port, secret)
    return Door(address, FIRST_PORT + random.randrange(NUM_PORTS), secret)


def knock(address: str, port: int, secret: str) -> Answer:
    """What answers at `address` and `port`, where `secret` should be known. A lost packet gets a second chance."""
    answer = _knock(address, port, secret.encode())
    return _knock(address, port, secret.encode()) if answer.wrong == TIMED_OUT else answer


def _knock(address: str, port: int, secret: bytes) -> Answer:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
    except TimeoutError:
        return Answer(TIMED_OUT, 0.0)
    except ConnectionRefusedError:
        return Answer(REFUSED, 0.0)
    except OSError as error:
        return Answer(UNREACHABLE if error.errno in _NO_WAY else str(error), 0.0)
    with connection:
        connection.settimeout(ANSWER_S)
        return _talk(connection, secret)


def _talk(connection: socket.socket, secret: bytes) -> Answer:
    started = time.perf_counter()
    try:
        is_known = _is_signed(connection, secret, secrets.token_bytes(_NONCE))
    except TimeoutError:
        return Answer(SILENT, 0.0)
    except OSError as error:
        return Answer(f"connected, then closed: {error}", 0.0)
    ms = 1000 * (time.perf_counter() - started)
    if not is_known:
        return Answer(STRANGER, ms)
    try:
        return Answer("" if _is_signed(connection, secret, secrets.token_bytes(_MUCH)) else STRANGER, ms)
    except TimeoutError:
        return Answer(STALLED, ms)
    except OSError as error:
        return Answer(f"connected, then closed: {error}", ms)


def _is_signed(connection: socket.socket, secret: bytes, words: bytes) -> bool:
    connection.sendall(words)
    return hmac.compare_digest(_read(connection, _DIGEST), _sign(secret, words))


def _sign(secret: bytes, words: bytes) -> bytes:
    return hmac.digest(secret, words, hashlib.sha256)


def _read(connection: socket.socket, length: int) -> bytes:
    """Raises: OSError: the other side closed before, or took too long."""
    got = b""
    while len(got) < length:
        part = connection.recv(length - len(got))
        if not part:
            raise ConnectionError("the other side hung up")
        got += part
    return got
