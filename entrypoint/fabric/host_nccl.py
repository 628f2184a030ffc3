"""The host's NCCL in the place of the wheel's: where it is, and whether it is new enough."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.fabric import proof
from entrypoint.fabric.stage import NCCL
from train.errors import MusterError

if TYPE_CHECKING:
    from entrypoint.sites.schema import Site

_FIX = "leave --host-nccl out"


def find(root: Path, env: Mapping[str, str], site: "Site | None" = None, own: Path | None = None) -> Path:
    """The host's NCCL below `root`, as it is seen here.

    Args:
        own: the image's; None finds the one that came with torch.

    Raises:
        MusterError: there is none, or it is older than the image's.
    """
    from entrypoint.fabric.find import loader_for
    from entrypoint.fabric.hostroot import HostRoot
    from entrypoint.sites.schema import Libraries

    host = HostRoot(root)
    library = loader_for(host, site.libraries if site else Libraries()).find(NCCL)
    if library is None:
        raise MusterError(f"the host has no {NCCL}", seen=f"its loader's folders, below {root}", fix=_FIX)
    found, wheels = host.path(library.path), own or of_torch()
    version, least = proof.nccl_version(found, env), proof.nccl_version(wheels, env)
    if version < least:
        raise MusterError(
            "the host's NCCL is older than the one that torch was built with",
            seen=f"{found} is {_dotted(version)}, {wheels} is {_dotted(least)}",
            fix=_FIX,
        )
    return found


def of_torch() -> Path:
    """The NCCL that came with torch, as a wheel of its own.

    Raises:
        MusterError: this torch has none.
    """
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).parent.parent / "nvidia" / "nccl" / "lib" / NCCL if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MusterError("torch has no NCCL here that could be replaced", seen=str(path or "no torch"), fix=_FIX)
    return path


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
