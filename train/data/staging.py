"""A copy of files on this host's own disk: whole or not there, once for all jobs of a user on the host."""

import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from train.data.encoded import Names
from train.data.sharing import Arrays
from train.errors import FAILED, MusterError

NUM_THREADS = 8
CHUNK = 8 * 2**20
MARK = ".muster-complete.json"
LOOK_S = 0.2


class Stopped(Exception):
    """Another host has failed."""


class Copy:
    """Copies files in a thread of its own.

    Args:
        source: the folder that they are in.
        folder: where the copy is to be, beside those of other data.
        files: their names, sizes and times.
        digest: tells these from others.
    """

    def __init__(self, source: Path, folder: Path, files: Arrays, digest: str) -> None:
        self.source = source
        self.folder = folder
        self.names = Names(files["names"])
        self.sizes: list[int] = files["sizes"].tolist()
        self.times: list[int] = files["times"].tolist()
        self.digest = digest
        self.target = folder / f"muster-{digest}"
        self.done = 0
        self.error: Exception | None = None
        self.failure: Exception | None = None
        self.adding = threading.Lock()
        self.stopping = False
        self.thread = threading.Thread(target=self.run, name="stage", daemon=True)

    def start(self) -> None:
        """Begins to copy."""
        self.thread.start()

    def wait(self, limit_s: float) -> None:
        """Returns when it is over, or after `limit_s`."""
        self.thread.join(limit_s)

    def stop(self) -> None:
        """Ends it, whatever is done."""
        self.stopping = True
        self.thread.join()

    def state(self) -> tuple[int, bool, bool]:
        """Bytes that are done, whether it is over, and whether it failed."""
        ended = not self.thread.is_alive()
        return self.done, ended, ended and self.error is not None

    def result(self) -> Path:
        """The folder of the copy.

        Raises:
            MusterError: it was not made.
        """
        if isinstance(self.error, OSError):
            raise MusterError(
                f"the data can't be copied: {self.error.strerror or self.error}",
                seen=f"--stage-to={self.folder} ({os.fsdecode(self.error.filename or self.source)})",
                fix="--stage-to=FOLDER on a disk that this user may write to, or leave it out",
            ) from self.error
        if self.error is not None and not isinstance(self.error, Stopped):
            raise self.error
        return self.target

    def run(self) -> None:
        """Makes the copy, unless it is there."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.alone():
                if not self.complete():
                    self.make()
        except Exception as error:
            self.error = self.failure or error

    def make(self) -> None:
        """Copies all files, and gives the copy its name."""
        # What is there now belongs to nobody: who copies these files holds the lock.
        for stale in [*self.folder.glob(f".muster-{self.digest}.partial-*"), self.target]:
            shutil.rmtree(stale, ignore_errors=True)
        self.check_room()
        self.done = 0
        partial = Path(tempfile.mkdtemp(prefix=f".muster-{self.digest}.partial-", dir=self.folder))
        try:
            names = [self.names[number] for number in range(len(self.names))]
            for parent in {os.path.dirname(name) for name in names}:
                os.makedirs(os.path.join(os.fsencode(partial), parent), exist_ok=True)
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                for _ in pool.map(lambda number: self.try_one(partial, names[number], number), range(len(names))):
                    pass
            (partial / MARK).write_text(json.dumps({"digest": self.digest, "files": len(names)}))
            try:
                partial.rename(self.target)
            except OSError:
                if not self.complete():  # where there are no locks, another job was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def try_one(self, partial: Path, name: bytes, number: int) -> None:
        """Copies a file, unless one could not be copied."""
        if self.stopping:
            raise Stopped
        try:
            self.copy_one(partial, name, number)
        except Stopped:
            raise
        except Exception as error:
            self.failure, self.stopping = self.failure or error, True
            raise

    def copy_one(self, partial: Path, name: bytes, number: int) -> None:
        """Copies a file, and sees that it has the size that it should have.

        Raises:
            MusterError: it has not: it changed meanwhile.
        """
        origin, place = (os.path.join(os.fsencode(folder), name) for folder in (self.source, partial))
        size = 0
        with open(origin, "rb", buffering=0) as reading, open(place, "xb", buffering=0) as writing:
            while chunk := reading.read(CHUNK):
                if self.stopping:
                    raise Stopped
                writing.write(chunk)
                size += len(chunk)
                self.add(len(chunk))
        if size != self.sizes[number] or os.stat(place).st_size != size:
            raise MusterError(
                f"a file changed while it was copied: {size} bytes instead of {self.sizes[number]}",
                seen=os.fsdecode(origin),
                fix="start again when nobody writes to the data",
                code=FAILED,
            )
        os.utime(place, ns=(self.times[number], self.times[number]))

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are copied."""
        with self.adding:
            self.done += num_bytes

    def complete(self) -> bool:
        """True where the copy is there, and each file has its size."""
        try:
            mark = json.loads((self.target / MARK).read_text())
            root = os.fsencode(self.target)
            for number, size in enumerate(self.sizes):
                if os.stat(os.path.join(root, self.names[number])).st_size != size:
                    return False
        except (OSError, ValueError):
            return False
        self.done = sum(self.sizes)
        return mark == {"digest": self.digest, "files": len(self.sizes)}

    def check_room(self) -> None:
        """Returns where the disk has room for all files.

        Raises:
            MusterError: it has not.
        """
        state = os.statvfs(self.folder)
        # Whole blocks, and a hundredth for folders.
        needed = int(sum(-(-size // state.f_frsize) * state.f_frsize for size in self.sizes) * 1.01)
        free = state.f_bavail * state.f_frsize
        if needed > free:
            raise MusterError(
                f"no room for a copy of the data: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
                seen=f"--stage-to={self.folder}",
                fix="--stage-to=FOLDER on a larger disk of the node, or leave it out",
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context that one job on this host is in at a time, for these files; how far the other is counts here."""
        descriptor = os.open(self.folder / f".muster-{self.digest}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # where the disk has no locks, names alone keep jobs apart
                while not locked(descriptor):
                    if self.stopping:
                        raise Stopped
                    found = list(self.folder.glob(f".muster-{self.digest}.partial-*"))
                    self.done = sum(bytes_below(folder) for folder in found[:1])
                    time.sleep(LOOK_S)
            yield
        finally:
            os.close(descriptor)


def locked(descriptor: int) -> bool:
    """True where the lock is this process's now; False where another has it.

    Raises:
        OSError: there are no locks here.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def bytes_below(folder: Path) -> int:
    """What the files below `folder` have; those that go meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
