"""Processes inside fake hosts, as the machine sees them, and a handle for a process that a test starts there."""

import os
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.clusters.deadline import wait_for


class Process(NamedTuple):
    """A running process: its id as seen from outside of all fake hosts, its short name and its arguments."""

    pid: int
    name: str
    argv: list[str]


def child_of(pid: int) -> int | None:
    """The id of the first child of a process, or None while it has none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(children[0]) if children else None


def namespace_of(pid: int, kind: str) -> str | None:
    """The identity of a namespace of a process, like `pid:[4026532201]`; None if it is gone or may not be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def processes_in(namespaces: set[str]) -> list[Process]:
    """All processes of the machine in one of these namespaces, without zombies.

    Namespaces are named as `namespace_of` names them: `pid:[...]`, `net:[...]`.
    """
    kinds = {namespace.partition(":")[0] for namespace in namespaces}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not any(namespace_of(int(entry.name), kind) in namespaces for kind in kinds):
            continue
        try:
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            name = (entry / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # A zombie has no command line any more; a kernel thread never had one.
        if argv:
            found.append(Process(int(entry.name), name, argv))
    return found


class HostProcess(subprocess.Popen[str]):
    """A process on a fake host. Signals reach the process itself and not the nsenter that started it.

    `terminate()` and `send_signal()` go to that one process, as kill(1) on the host would send them;
    `kill()` ends its whole process group, so that no grandchild keeps the pipes open.
    """

    def send_signal(self, sig: int) -> None:
        """Sends a signal to the process on the host; nothing happens when it has ended."""
        inner = wait_for(
            f"nsenter (process {self.pid}) to start its command",
            lambda: -1 if self.poll() is not None else child_of(self.pid),
            timeout_s=60,
        )
        if inner == -1:
            return
        try:
            if sig == signal.SIGKILL and os.getpgid(inner) == inner:
                os.killpg(inner, sig)
            else:
                os.kill(inner, sig)
        except ProcessLookupError:
            pass

    def drain(self, timeout_s: float = 5) -> tuple[str, str]:
        """Its stdout and stderr after `kill()`; waits only shortly, as a daemon may hold the pipes open."""
        try:
            out, err = self.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as unread:
            out, err = _text(unread.stdout), _text(unread.stderr)
        return out or "", err or ""


def _text(raw: bytes | str | None) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else raw or ""
