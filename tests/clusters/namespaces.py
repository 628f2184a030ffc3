"""Namespaces that one process holds: a fake host is made of them, and so is the switch between fake hosts."""

import os
import select
import signal
import subprocess
from collections.abc import Sequence

from tests.clusters.deadline import wait_for
from tests.clusters.processes import child_of, namespace_of
from tests.clusters.requirements import program

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_TIMEOUT_S = 30

# Process 1 has to reap orphans: it ignores SIGCHLD, and then the kernel does it. It reads a pipe that only the test
# runner holds open, so that it ends with the runner even if the parent-death signal does not come.
HOLD = "echo ok; exec env --ignore-signal=CHLD cat > /dev/null"


class Namespaces:
    """New namespaces with a process 1 in them; they end with it, and it ends with the test runner.

    The kernel sends the parent-death signal when the calling thread ends: that has to outlive the namespaces.

    Args:
        name: For error messages.
        kinds: Those besides the pid namespace, as unshare(1) names them: "net", "uts", "mount", "ipc".
        script: Shell lines that set them up, run as process 1.
    """

    def __init__(self, name: str, kinds: Sequence[str], script: str) -> None:
        self.name = name
        self.init = 0
        argv = [program("setpriv"), "--pdeathsig=KILL", "--", program("unshare"), *(f"--{kind}" for kind in kinds)]
        argv += ["--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private", "--"]
        self._holder = subprocess.Popen(
            [*argv, "sh", "-ec", f"exec 2>&1\n{script}\n{HOLD}"],
            env={"PATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def await_ready(self) -> None:
        """Waits for the end of the script; sets `init`, the id of process 1 as the machine sees it."""
        assert self._holder.stdout
        ready, _, _ = select.select([self._holder.stdout], [], [], START_TIMEOUT_S)
        if not ready:
            raise TimeoutError(f"waited {START_TIMEOUT_S} s for the namespaces of {self.name}")
        said = self._holder.stdout.readline()
        if said != "ok\n":
            raise RuntimeError(f"the namespaces of {self.name} failed to start: {said}{self._holder.stdout.read()}")
        self.init = wait_for(f"process 1 of {self.name}", lambda: child_of(self._holder.pid), START_TIMEOUT_S)

    def identities(self) -> set[str]:
        """The kernel's names of these namespaces, like `net:[4026532201]`; not those shared with this process."""
        kinds = ("net", "uts", "mnt", "ipc", "pid")
        own = {namespace_of(os.getpid(), kind) for kind in kinds}
        return {seen for kind in kinds if (seen := namespace_of(self.init, kind)) and seen not in own}

    def enter(self, *flags: str) -> list[str]:
        """The first words of a command line that runs its other words inside; the flags are those of nsenter(1)."""
        # Where this runs in a chroot, the root of the mount namespace is another one: take that of the host's init.
        root = ["--root"] if "-m" in flags else []
        return [program("nsenter"), "-t", str(self.init), *flags, *root, "--"]

    def ip(self, batch: str) -> None:
        """Runs lines of ip(8) in the network namespace alone: `netns PID` needs the machine's process ids."""
        argv = [*self.enter("-n"), program("ip"), "-batch", "-"]
        done = subprocess.run(argv, input=batch, text=True, capture_output=True, timeout=START_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"ip on {self.name} failed: {done.stderr}\n{batch}")

    def kill(self) -> None:
        """Ends process 1: the kernel then ends all other processes inside, and the holder outside ends too."""
        if self.init:
            os.kill(self.init, signal.SIGKILL)
        else:
            self._holder.kill()
        self._holder.wait(timeout=START_TIMEOUT_S)
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe:
                pipe.close()
