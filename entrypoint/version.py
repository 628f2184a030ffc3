"""The versions installed here: of this image or checkout, of torch, and of the libraries that torch really loads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from muster import processes
from muster.entrypoint.launch import driver
from muster.errors import ExitCode, MusterError, one_line
from muster.paths import ROOT, installed

TIMEOUT_S = 120.0


def values(root: Path = ROOT, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """The values that `muster version --json` prints; None for those that are not installed, or unknown.

    Raises:
        MusterError: torch can't be loaded, or not within `timeout_s`.
    """
    # The description of this image, written by image/project.sh.
    described = root / "image.json"
    image: dict[str, Any] = json.loads(described.read_text()) if described.is_file() else {}
    found = driver.find()
    return {
        "image": image or None,
        "version": image.get("version") or installed("muster"),
        "revision": image.get("revision"),
        "lock_sha256": image.get("lock_sha256"),
        **_loaded(timeout_s),
        "driver": {"version": found.version, "cuda": driver.version_text(found.cuda) if found.cuda else None}
        if found.version or found.cuda
        else None,
    }


def _loaded(timeout_s: float) -> dict[str, Any]:
    """The values that muster/check/versions.py prints in another process: torch is not loaded into this one."""
    try:
        done = processes.run([sys.executable, "-P", "-m", "muster.check.versions"], timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        seen = f"no answer within {timeout_s:g} s; is the file system that holds this python slow?"
    else:
        if done.returncode == 0:
            # The last line: a library may have said something before.
            return json.loads(done.stdout.splitlines()[-1])
        seen = [f"code {done.returncode}", *done.stderr.strip().splitlines()][-1]
    fix = f"{sys.executable} -c 'import torch'"
    raise MusterError("torch can't be loaded", seen=seen, fix=fix, code=ExitCode.FAILED)


def text(found: dict[str, Any]) -> str:
    """`found` as lines for a person."""
    image, nccl, driver = found["image"], found["nccl"], found["driver"]
    revision = f", revision {found['revision'][:12]}" if found["revision"] else ""
    cuda = f"up to CUDA {driver['cuda']}" if driver and driver["cuda"] else "but no libcuda.so.1 here"
    rows = {
        "muster": f"{found['version'] or 'version unknown'}{revision}",
        "image": f"made {image['created'] or '-'} on {image['base'] or '-'}" if image else "none",
        "lock": f"{image['lock']}, sha256 {image['lock_sha256']}" if image else "none",
        "python": found["python"],
        "torch": f"{found['torch']}, {('built for CUDA ' + found['cuda']) if found['cuda'] else 'for CPUs only'}",
        "torchvision": found["torchvision"] or "none",
        "NCCL": f"{nccl['version']}, {nccl['path']}" if nccl else "none",
        "cuDNN": found["cudnn"] or "none",
        "driver": f"{driver['version'] or 'version unknown'}, {cuda}" if driver else "none",
        "glibc": found["glibc"] or "none",
        "machine": found["machine"],
    }
    return "\n".join(f"{name:<11}  {one_line(value)}" for name, value in rows.items())
