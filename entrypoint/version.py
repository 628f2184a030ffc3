"""What is installed here: this image or checkout, the torch in it, and the libraries that really get loaded."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from entrypoint import ROOT, driver
from entrypoint.libcuda import written
from train.errors import FAILED, MusterError

TIMEOUT_S = 120.0
LOCKS = ("requirements.lock", "requirements-cuda12.lock")

# What the image's build writes about it.
IMAGE_KEYS = ("version", "revision", "lock", "lock_sha256", "base", "created")


def values(root: Path = ROOT, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """All that `muster version --json` prints; None for what there is not, or what can't be known.

    Raises:
        MusterError: torch can't be loaded, or not within `timeout_s`; the image's own description is damaged.
    """
    image = image_of(root)
    loaded = _loaded(timeout_s)
    about: dict[str, Any] = image or {}
    found = driver.find()
    return {
        "image": image,
        "version": about.get("version") or package_version(),
        "revision": about.get("revision") or git_revision(root),
        "lock_sha256": about.get("lock_sha256") or lock_sha256(root, loaded["torch"]),
        **loaded,
        "driver": {"version": found.version, "cuda": written(found.cuda) if found.cuda else None}
        if found.version or found.cuda
        else None,
    }


def image_of(root: Path) -> dict[str, Any] | None:
    """What the image's build wrote into image.json, with each of IMAGE_KEYS; None outside of an image.

    Raises:
        MusterError: it can't be read.
    """
    path = root / "image.json"
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as reason:
        raise _damaged(path, str(reason)) from None
    try:
        content = json.loads(text)
    except ValueError as reason:
        raise _damaged(path, str(reason)) from None
    if not isinstance(content, dict):
        raise _damaged(path, "no JSON object")
    known = cast("dict[str, Any]", content)
    return {key: known.get(key) for key in IMAGE_KEYS}


def _damaged(path: Path, reason: str) -> MusterError:
    return MusterError("the image's description of itself can't be read", seen=f"{path}: {reason}", fix="make image")


def package_version() -> str | None:
    """The version of this package; None where it was not installed as one."""
    try:
        return metadata.version("muster")
    except metadata.PackageNotFoundError:
        return None


def git_revision(root: Path) -> str | None:
    """The commit of the checkout that `root` is; None where it is none, or git does not answer."""
    if not (root / ".git").exists():
        return None
    # Variables of another repository's hooks must not lead git there.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def lock_sha256(root: Path, torch: str) -> str | None:
    """The digest of the lock with this version of torch; None where it is of none."""
    for name in LOCKS:
        try:
            content = (root / name).read_bytes()
        except OSError:
            continue
        if f"\ntorch=={torch.partition('+')[0]} ".encode() in content:
            return hashlib.sha256(content).hexdigest()
    return None


def _loaded(timeout_s: float) -> dict[str, Any]:
    """What check/versions.py prints: torch is not loaded into this process."""
    command = [sys.executable, "-P", str(ROOT / "check" / "versions.py")]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MusterError(
            f"torch was not loaded within {timeout_s:g} s",
            seen=shlex.join(command),
            fix="see whether the file system that holds this python is slow or hangs; a container image in one file "
            "loads faster",
            code=FAILED,
        ) from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"code {done.returncode}"]
        raise MusterError(
            "torch can't be loaded", seen=said[-1], fix=f"{sys.executable} -c 'import torch'", code=FAILED
        )
    # The last line: a library may have said something before.
    return json.loads(done.stdout.splitlines()[-1])


def text(found: dict[str, Any]) -> str:
    """`found` as lines for a person."""
    # As in report.py: only what prints needs it.
    from rich.console import Console
    from rich.text import Text

    rows = _rows(found)
    width = max(map(len, rows))
    console = Console()
    with console.capture() as capture:
        for name, value in rows.items():
            # Not wrapped: a path is to be copied.
            console.print(Text.assemble((f"{name:<{width}}", "bold"), "  ", value), soft_wrap=True)
    return capture.get().rstrip("\n")


def _rows(found: dict[str, Any]) -> dict[str, str]:
    image, nccl, driver = found["image"], found["nccl"], found["driver"]
    name = f"{image['lock']}, " if image and image["lock"] else ""
    revision = f", revision {found['revision'][:12]}" if found["revision"] else ""
    rows = {
        "muster": f"{found['version'] or 'version unknown'}{revision}",
        "image": f"made {image['created'] or '-'} on {image['base'] or '-'}" if image else "none",
        "lock": f"{name}sha256 {found['lock_sha256']}" if found["lock_sha256"] else "none",
        "python": found["python"],
        "torch": f"{found['torch']}, {('built for CUDA ' + found['cuda']) if found['cuda'] else 'for CPUs only'}",
        "torchvision": found["torchvision"] or "none",
        "NCCL": f"{nccl['version']}, {nccl['path']}" if nccl else "none",
        "cuDNN": found["cudnn"] or "none",
        "driver": "none",
        "glibc": found["glibc"] or "none",
        "machine": found["machine"],
    }
    if driver:
        cuda = f"up to CUDA {driver['cuda']}" if driver["cuda"] else "but no libcuda.so.1 here"
        rows["driver"] = f"{driver['version'] or 'version unknown'}, {cuda}"
    return rows
