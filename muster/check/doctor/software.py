"""The software of the nodes: whether image, code, Python, torch, packages and settings are the same on all."""

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from muster.check import ranks, versions
from muster.check.doctor.finding import Finding, Level, attempt, differences
from muster.check.options import DoctorOptions
from muster.paths import ROOT, image
from muster.train.distributed.world import World
from muster.units import listed

NAME = "software"

SHOWN = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "TORCH_")
"""Prefixes of the environment variables that are reported: none of these holds a secret."""

NOT_COMPARED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "NCCL_DEBUG_FILE")
"""Variables that may differ between nodes: each node has its own names of interfaces, and number of cores."""

ONE_IMAGE = "start all nodes from the same image or folder: look for a copy on a node that was not updated"

COMPARED: tuple[tuple[str, str, Level], ...] = (
    ("image", "image", "failed"),
    ("code", "code of this project", "failed"),
    ("python", "Python", "failed"),
    ("torch", "torch", "failed"),
    ("nccl", "NCCL", "failed"),
    ("cudnn", "cuDNN", "warning"),
)
"""Facts that have to be the same on all nodes: (field of Facts, its name in messages, level of the finding)."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The software that is installed and loaded on a node.

    Attributes:
        image: the version and the revision of the container image; `none` outside of one.
        packages: all packages installed for this Python, with versions.
        code: a digest of this project's own files.
        python: the version of Python, without the last number.
        torch: the version of torch, and of the CUDA that it was built for.
        nccl, nccl_path: the version and the file of the NCCL that torch's calls go to.
        variables: the environment variables that begin with SHOWN.
    """

    image: str | None = None
    packages: tuple[str, ...] | None = None
    code: str | None = None
    python: str | None = None
    torch: str | None = None
    nccl: str | None = None
    nccl_path: str | None = None
    cudnn: str | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """The software that is installed and loaded on this host, by its first rank."""
    if not ranks.leads_host(world):
        return None
    loaded: dict[str, Any] = attempt(versions.versions) or {}
    nccl: dict[str, str] = loaded.get("nccl") or {}
    return Facts(
        image=image(ROOT) or "none",
        packages=attempt(packages),
        code=attempt(code),
        python=".".join(platform.python_version_tuple()[:2]),
        torch=f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'}",
        nccl=nccl.get("version"),
        nccl_path=nccl.get("path"),
        cudnn=loaded.get("cudnn"),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)},
    )


def packages() -> tuple[str, ...]:
    """All packages installed for this Python: `torch 2.10.0`."""
    return tuple(sorted({f"{each.name} {each.version}" for each in metadata.distributions()}))


def code() -> str:
    """A digest of this project's Python files: the first 12 hexadecimal digits of a SHA-256."""
    # In a clone some of the package's folders are links.
    walked = os.walk(ROOT / "muster", followlinks=True)
    files = sorted(Path(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))
    lines = [f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """The differences between nodes: of installed and loaded software, then of settings."""
    nodes = {host: facts[0] for host, facts in by_host.items()}
    found: list[Finding] = []
    for name, what, level in COMPARED:
        values = {host: getattr(node, name) for host, node in nodes.items()}
        found += differences(values, level, name, what, ONE_IMAGE)
    if not found:
        # After a difference above, packages and paths differ as a consequence.
        installed = {host: node.packages for host, node in nodes.items()}
        of_nodes = [set(each) for each in installed.values() if each]
        everywhere = set[str].intersection(*of_nodes) if of_nodes else set[str]()

        def apart(packages: Sequence[str]) -> str:
            return listed(each for each in packages if each not in everywhere) or "none of these"

        found += differences(installed, "failed", "packages", "packages", ONE_IMAGE, apart)
        paths = {host: node.nccl_path for host, node in nodes.items()}
        found += differences(paths, "warning", "nccl", "path of NCCL", ONE_IMAGE)
    for name in sorted({name for node in nodes.values() for name in node.variables if name not in NOT_COMPARED}):
        values = {host: node.variables.get(name, "(unset)") for host, node in nodes.items()}
        fix = f"set {name} to the same on all nodes: in the job script, or in a file that all of them read"
        found += differences(values, "warning", name, name, fix)
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    first = next(iter(by_host.values()))[0]
    image = f"image {first.image}, " if first.image not in (None, "none") else ""
    nccl = f", NCCL {first.nccl}" if first.nccl else ""
    everywhere = ", the same everywhere" if len(by_host) > 1 else ""
    return f"{image}torch {first.torch}{nccl}, Python {first.python}{everywhere}"
