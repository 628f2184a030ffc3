"""The software of the nodes: the same image, lock, code, Python, torch and libraries everywhere, and settings alike."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from muster.check import versions
from muster.check.doctor.finding import Finding, Level, attempt, differences
from muster.check.options import DoctorOptions
from muster.check.ranks import leads_host, listed
from muster.paths import ROOT
from muster.train.distributed.world import World

NAME = "software"

LOCKS = ("requirements.lock", "requirements-cuda12.lock")

SHOWN = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "TORCH_")
"""How the names of variables begin that are told: none of them holds a secret."""

NOT_COMPARED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "NCCL_DEBUG_FILE")
"""Variables that may well differ between nodes: interfaces have names of their own, cores are counted on each node."""

ONE_IMAGE = "start all nodes from the same image or folder: look for a copy on a node that was not updated"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is installed on a node, and loaded there.

    Attributes:
        image: the version of the container image; None outside of one.
        revision: of the image.
        lock: the digest of the lock that it was installed from.
        packages: all that is installed for this Python, with versions.
        code: a digest of this project's own files.
        cuda: the version that torch was built for.
        nccl: the version that torch's calls go to, and `nccl_path` the file.
        variables: settings of what the ranks communicate through.
    """

    image: str | None = None
    revision: str | None = None
    lock: str | None = None
    packages: tuple[str, ...] | None = None
    code: str | None = None
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nccl_path: str | None = None
    cudnn: str | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])


def gather(world: World, options: DoctorOptions) -> Facts | None:
    """What is installed and loaded here, by the first rank of each host."""
    return gather_from(ROOT) if leads_host(world) else None


def gather_from(root: Path) -> Facts:
    """What is installed and loaded, where the project's files are in `root`."""
    image: dict[str, Any] = attempt(lambda: json.loads((root / "image.json").read_text())) or {}
    loaded: dict[str, Any] = attempt(versions.versions) or {}
    nccl: dict[str, str] = loaded.get("nccl") or {}
    return Facts(
        image=image.get("version"),
        revision=image.get("revision"),
        lock=image.get("lock_sha256") or attempt(lambda: lock(root)),
        packages=attempt(packages),
        code=attempt(lambda: code(root)),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=nccl.get("version"),
        nccl_path=nccl.get("path"),
        cudnn=loaded.get("cudnn"),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)},
    )


def lock(root: Path) -> str | None:
    """The digest of the lock in a checkout that has this torch; None without one."""
    path = lock_file(root)
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def lock_file(root: Path) -> Path | None:
    """The lock of a checkout with this version of torch; None without one."""
    line = f"\ntorch=={torch.__version__.partition('+')[0]} ".encode()
    paths = [root / name for name in LOCKS]
    return next((path for path in paths if path.is_file() and line in path.read_bytes()), None)


def packages() -> tuple[str, ...]:
    """All that is installed for this Python: `torch 2.10.0`."""
    return tuple(sorted({f"{each.name} {each.version}" for each in metadata.distributions()}))


def code(root: Path) -> str:
    """A digest of this project's files."""
    # In a clone some of the package's folders are links.
    walked = os.walk(root / "muster", followlinks=True)
    files = sorted(Path(folder, name) for folder, _, names in walked for name in names if name.endswith(".py"))
    lines = [f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def findings(by_host: Mapping[str, Sequence[Facts]]) -> list[Finding]:
    """What is not the same on all nodes: what is installed and loaded, then settings."""
    nodes = {host: facts[0] for host, facts in by_host.items()}

    def differ(
        what: str, of: Callable[[Facts], Any], level: Level, about: str, shown: Callable[[Any], str] = str
    ) -> list[Finding]:
        return differences({host: of(node) for host, node in nodes.items()}, level, about, what, ONE_IMAGE, shown)

    found = [
        *differ("image", _image, "failed", "image"),
        *differ("lock", lambda node: node.lock, "failed", "lock", _short),
        *differ("code of this project", lambda node: node.code, "failed", "code", _short),
        *differ("Python", lambda node: _minor(node.python), "failed", "python"),
        *differ("torch", _torch, "failed", "torch"),
        *differ("NCCL", lambda node: node.nccl, "failed", "nccl"),
        *differ("cuDNN", lambda node: node.cudnn, "warning", "cudnn"),
    ]
    if not found:
        # Of what was found already they are an echo.
        found += differ("set of packages", lambda node: node.packages, "failed", "packages", _apart(nodes))
        found += differ("NCCL, by its path,", lambda node: node.nccl_path, "warning", "nccl")
    for name in sorted({name for node in nodes.values() for name in node.variables if name not in NOT_COMPARED}):
        values = {host: node.variables.get(name, "(unset)") for host, node in nodes.items()}
        fix = f"set {name} for all nodes alike: in the job script, or in what all of them read"
        found += differences(values, "warning", name, name, fix)
    return found


def summary(by_host: Mapping[str, Sequence[Facts]]) -> str:
    """The versions that all nodes have."""
    first = next(iter(by_host.values()))[0]
    image = f"image {first.image}, " if first.image else ""
    nccl = f", NCCL {first.nccl}" if first.nccl else ""
    everywhere = ", the same everywhere" if len(by_host) > 1 else ""
    return f"{image}torch {first.torch}{nccl}, Python {first.python}{everywhere}"


def _image(node: Facts) -> str:
    revision = f" ({node.revision[:12]})" if node.revision else ""
    return f"{node.image}{revision}" if node.image else "none"


def _torch(node: Facts) -> str:
    return f"{node.torch}, {f'CUDA {node.cuda}' if node.cuda else 'CPU'}"


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split(".")[:2])


def _short(digest: str) -> str:
    return digest[:12]


def _apart(nodes: Mapping[str, Facts]) -> Callable[[Sequence[str]], str]:
    """What makes words of a node's packages: those that not all nodes have."""
    of_nodes = [set(node.packages) for node in nodes.values() if node.packages]
    everywhere = set[str].intersection(*of_nodes) if of_nodes else set[str]()
    return lambda packages: listed(each for each in packages if each not in everywhere) or "none of these"
