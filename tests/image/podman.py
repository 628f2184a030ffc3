"""podman with a storage of the tests' own, removed at the end; the machine's images are neither seen nor changed."""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.clusters.deadline import wait_for

# A sandbox's root may lack CAP_SYS_RESOURCE: it can't set podman's default limits then, only limits below its own.
CONFIG = """
[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
network_backend = "cni"
"""
STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""


class Podman:
    """podman, its images and containers in a folder of its own.

    Args:
        folder: an existing folder, on a file system that overlays can be made on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "containers.conf"
        limits = {
            name: min(hard, 4096) if hard > 0 else 4096
            for name, hard in (
                ("nofile", resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
                ("nproc", resource.getrlimit(resource.RLIMIT_NPROC)[1]),
            )
        }
        config.write_text(CONFIG.format(**limits))
        storage = folder / "storage.conf"
        storage.write_text(STORAGE.format(folder=folder))
        # Read by podman and by buildah.
        self.env = {**os.environ, "CONTAINERS_CONF": str(config), "CONTAINERS_STORAGE_CONF": str(storage)}

    def __call__(
        self, *words: object, timeout: float = 600, check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs `podman WORDS...` to its end, and captures its output.

        Raises:
            RuntimeError: `check` is set and it failed.
        """
        argv = ["podman", *map(str, words)]
        done = subprocess.run(argv, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise RuntimeError(f"{argv} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def run(
        self, image: str, *words: object, options: Sequence[object] = (), timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        """Runs `podman run --rm OPTIONS IMAGE WORDS...` to its end, whatever its exit code."""
        return self("run", "--rm", *options, image, *words, timeout=timeout, check=False)

    @contextlib.contextmanager
    def started(self, image: str, *words: object, options: Sequence[object] = ()) -> Iterator[str]:
        """The id of a container that runs inside `with`."""
        identity = self("run", "--detach", *options, image, *words).stdout.strip()
        try:
            yield identity
        finally:
            self("rm", "--force", "--time=0", identity, check=False)

    def logs(self, container: str) -> str:
        """The output of a container so far."""
        done = self("logs", container)
        return done.stdout + done.stderr

    def wait(self, container: str, timeout: float) -> int:
        """Waits until a container has ended; returns its exit code."""

        def ended() -> str:
            state = self("inspect", "--format={{.State.Status}} {{.State.ExitCode}}", container).stdout.split()
            return state[1] if state[0] == "exited" else ""

        return int(wait_for(f"container {container[:12]} to end", ended, timeout, interval_s=0.2))

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The root file system of an image, for reading."""
        try:
            yield Path(self("image", "mount", image).stdout.strip())
        finally:
            self("image", "unmount", image, check=False)

    def layers(self, image: str) -> list[Path]:
        """The folder of each of an image's layers."""
        data = "{{.GraphDriver.Data.UpperDir}}:{{.GraphDriver.Data.LowerDir}}"
        return [Path(folder) for folder in self("inspect", f"--format={data}", image).stdout.strip().split(":")]

    def close(self) -> None:
        """Removes all containers and images, and the folder."""
        for words in (["rm", "--all", "--time=0"], ["image", "unmount", "--all"], ["rmi", "--all"]):
            # On a busy disk podman may not remove all in time: the rest is removed with the folder.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self(*words, "--force", check=False, timeout=300)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((mount for mount in mounts if mount.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", mount], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
