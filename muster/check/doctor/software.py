"""The software of the nodes: the same image, lock, code, Python, torch and libraries everywhere, and settings alike."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from muster import ROOT
from muster.check import versions
from muster.check.doctor.facts import Facts, Finding, Level, Node, Part, Software, attempt, differences
from muster.check.ranks import listed

LOCKS = ("requirements.lock", "requirements-cuda12.lock")

SHOWN = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "TORCH_")
"""How the names of variables begin that are told: none of them holds a secret."""

NOT_COMPARED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "NCCL_DEBUG_FILE")
"""Variables that may well differ between nodes: interfaces have names of their own, cores are counted on each node."""

ONE_IMAGE = "start all nodes from the same image or folder: look for a copy on a node that was not updated"


def gather(driver: str | None, root: Path = ROOT) -> Software:
    """What is installed and loaded here."""
    image: dict[str, Any] = attempt(lambda: json.loads((root / "image.json").read_text())) or {}
    loaded: dict[str, Any] = attempt(versions.versions) or {}
    nccl: dict[str, str] = loaded.get("nccl") or {}
    return Software(
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
        driver=driver,
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


def variables() -> dict[str, str]:
    """The settings of what the ranks communicate through."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}


def findings(facts: Facts) -> Part:
    """What is installed and loaded: the same everywhere."""

    def differ(
        what: str, of: Callable[[Node], Any], level: Level, about: str, shown: Callable[[Any], str] = str
    ) -> list[Finding]:
        return differences(facts.by_host(of), level, about, what, ONE_IMAGE, shown)

    found = [
        *differ("image", _image, "fault", "image"),
        *differ("lock", lambda node: node.software.lock, "fault", "lock", _short),
        *differ("code of this project", lambda node: node.software.code, "fault", "code", _short),
        *differ("Python", lambda node: _minor(node.software.python), "fault", "python"),
        *differ("torch", _torch, "fault", "torch"),
        *differ("NCCL", lambda node: node.software.nccl, "fault", "nccl"),
        *differ("cuDNN", lambda node: node.software.cudnn, "warning", "cudnn"),
        *differ("driver", lambda node: node.software.driver, "warning", "driver"),
    ]
    if not found:
        # Of what was found already they are an echo.
        found += differ("set of packages", lambda node: node.software.packages, "fault", "packages", _apart(facts))
        found += differ("NCCL, by its path,", lambda node: node.software.nccl_path, "warning", "nccl")
    first = facts.nodes[0].software
    image = f"image {first.image}, " if first.image else ""
    nccl = f", NCCL {first.nccl}" if first.nccl else ""
    return Part("software", f"{image}torch {first.torch}{nccl}, Python {first.python}{_everywhere(facts)}", found)


def settings(facts: Facts) -> Part:
    """Variables of what the ranks communicate through: alike on all nodes."""
    names = sorted({name for node in facts.nodes for name in node.variables if name not in NOT_COMPARED})
    found: list[Finding] = []
    for name in names:
        values = {node.host: node.variables.get(name, "(unset)") for node in facts.nodes}
        fix = f"set {name} for all nodes alike: in the job script, or in what all of them read"
        found += differences(values, "warning", name, name, fix)
    some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    return Part("settings", f"{some}{_everywhere(facts)}" if names else "none", found)


def _everywhere(facts: Facts) -> str:
    return ", the same everywhere" if len(facts.nodes) > 1 else ""


def _image(node: Node) -> str:
    revision = f" ({node.software.revision[:12]})" if node.software.revision else ""
    return f"{node.software.image}{revision}" if node.software.image else "none"


def _torch(node: Node) -> str:
    return f"{node.software.torch}, {f'CUDA {node.software.cuda}' if node.software.cuda else 'CPU'}"


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split(".")[:2])


def _short(digest: str) -> str:
    return digest[:12]


def _apart(facts: Facts) -> Callable[[Sequence[str]], str]:
    """What makes words of a node's packages: those that not all nodes have."""
    of_nodes = [set(node.software.packages) for node in facts.nodes if node.software.packages]
    everywhere = set[str].intersection(*of_nodes) if of_nodes else set[str]()
    return lambda packages: listed([each for each in packages if each not in everywhere]) or "none of these"
