"""The host's libibverbs with its own providers: Debian's real libraries, and a device of which there are only files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.entrypoint.fabric import Need
from muster.entrypoint.fabric.find import Finding
from muster.entrypoint.fabric.stage import FabricPlan, Injected
from tests.clusters.requirements import refuse
from tests.fabric import nodes

pytestmark = pytest.mark.process

FOLDER = f"/usr/lib/{os.uname().machine}-linux-gnu"
FILES = {
    "libibverbs.so.1": "libibverbs.so.1.*",
    "libmlx5-rdmav34.so": "libmlx5.so.1.*",
    "libnl-3.so.200": "libnl-3.so.200.*",
    "libnl-route-3.so.200": "libnl-route-3.so.200.*",
}
ASK = """
import ctypes
ctypes.CDLL("libibverbs.so.1").ibv_get_device_list(ctypes.byref(ctypes.c_int()))
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "mlx5" in line or "ibverbs.so" in line}))
"""
# A file system of its own at /dev, for this process alone.
WITH_DEVICE = (
    "mount --make-rprivate / && mount -t tmpfs none {dev} && touch {dev}/null && mount --bind /dev/null {dev}/null"
    ' && mkdir {dev}/infiniband && touch {dev}/infiniband/uverbs0 && mount --bind {dev} /dev && exec "$@"'
)


def node(folder: Path) -> dict[str, str]:
    """Makes the files that libibverbs reads of a device before it looks for a provider; returns variables for them."""
    files = {
        "infiniband_verbs/abi_version": "6", "infiniband_verbs/uverbs0/abi_version": "1",
        "infiniband_verbs/uverbs0/ibdev": "mlx5_0", "infiniband_verbs/uverbs0/dev": "231:192",
        "infiniband/mlx5_0/node_type": "1: CA",
    }  # fmt: skip
    for name, text in files.items():
        path = folder / "sys/class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "dev").mkdir()
    return {"SYSFS_PATH": str(folder / "sys"), "TMPDIR": str(folder)}


def test_libibverbs_takes_the_providers_that_came_with_it(bookworm: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        refuse(f"a file system over /dev needs root; user id is {os.geteuid()}")
    real = {name: next((bookworm / FOLDER[1:]).glob(pattern)) for name, pattern in FILES.items()}
    injected = tuple(
        Injected(name, f"/{path.resolve().relative_to(bookworm.resolve())}", "infiniband")
        for name, path in real.items()
    )
    env = {"PATH": "/usr/bin:/bin", **node(tmp_path)}
    found = nodes.staged(FabricPlan(Finding(bookworm, "infiniband", "mlx5_0"), injected), env, Need(1, True))
    # Without IBV_DRIVERS it would look in the folder that it was built with, where the image's providers may be.
    command = ["sh", "-c", WITH_DEVICE.format(dev=tmp_path / "dev"), "sh", sys.executable, "-c", ASK]
    done = subprocess.run(
        ["unshare", "--mount", *command],
        env={**env, **found.settings.variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(real["libibverbs.so.1"].resolve()) in done.stdout.split()
    assert str(real["libmlx5-rdmav34.so"].resolve()) in done.stdout.split()
