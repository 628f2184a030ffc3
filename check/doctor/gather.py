"""Gathers what this rank and its node tell: each look is guarded, and what may hang has a deadline."""

import glob
import hashlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from check import versions
from check.doctor import gpus, peers
from check.doctor.facts import UNLIMITED, Node, Port, Rank, Software, Space
from check.fabric import DEVICES
from check.options import DoctorOptions
from train.world import World

ROOT = Path(__file__).resolve().parents[2]
OWN = ("check", "entrypoint", "report", "train")
LOCKS = ("requirements.lock", "requirements-cuda12.lock")
SPACE_S = 30.0
"""Seconds that a file system may take to write one small file: a busy one takes some, one that is gone all of them."""

SHOWN = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "TORCH_")
"""How the names of variables begin that are told: none of them holds a secret."""

Result = TypeVar("Result")


def rank(world: World, options: DoctorOptions) -> Rank:
    """What this rank tells; of its node too, where it is the first of its host."""
    is_first = world.hosts.index(world.host) == world.rank
    address = _guarded(lambda: peers.towards(os.environ.get("MASTER_ADDR", ""))) or ""
    return Rank(
        rank=world.rank,
        host=world.host,
        local_rank=world.local_rank,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        num_gpus=0 if options.device == "cpu" else _guarded(torch.cuda.device_count) or 0,
        cores=tuple(sorted(_guarded(lambda: os.sched_getaffinity(0)) or ())),
        threads=os.environ.get("OMP_NUM_THREADS"),
        address=address or None,
        interface=_guarded(lambda: peers.interface_of(address)),
        node=node(world.host, options) if is_first else None,
    )


def node(host: str, options: DoctorOptions) -> Node:
    """What is to be told of this node once."""
    cards, driver = _guarded(gpus.look) or (None, None)
    memory = _guarded(psutil.virtual_memory)
    devices = tuple(sorted(path for pattern in DEVICES for path in glob.glob(pattern)))
    return Node(
        host=host,
        software=software(driver),
        gpus=None if cards is None else tuple(cards),
        kernel=platform.release(),
        memory=None if memory is None else memory.total,
        memory_free=None if memory is None else memory.available,
        shm=space("/dev/shm"),
        checkpoints=space(options.checkpoint_dir),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        interfaces=tuple(_guarded(interfaces) or ()),
        fabric=os.environ.get("MUSTER_FABRIC_FOUND"),
        ports=tuple(_guarded(ports) or ()),
        devices=devices,
        closed=tuple(path for path in devices if not os.access(path, os.R_OK | os.W_OK)),
        libraries=tuple(path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)},
    )


def software(driver: str | None, root: Path = ROOT) -> Software:
    """What is installed and loaded here."""
    image: dict[str, Any] = _guarded(lambda: json.loads((root / "image.json").read_text())) or {}
    nccl: dict[str, str] = _guarded(versions.nccl) or {}
    loaded: dict[str, Any] = _guarded(versions.versions) or {}
    return Software(
        image=image.get("version"),
        revision=image.get("revision"),
        lock=image.get("lock_sha256") or _guarded(lambda: lock(root)),
        packages=_guarded(packages),
        code=_guarded(lambda: code(root)),
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=nccl.get("version"),
        nccl_path=nccl.get("path"),
        cudnn=loaded.get("cudnn"),
        driver=driver,
    )


def lock(root: Path) -> str | None:
    """The digest of the lock in a checkout that has this torch, as `muster version` tells it; None without one."""
    path = lock_file(root)
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def lock_file(root: Path) -> Path | None:
    """The lock of a checkout with this version of torch; None without one."""
    line = f"\ntorch=={torch.__version__.partition('+')[0]} ".encode()
    return next(
        (path for path in (root / name for name in LOCKS) if path.is_file() and line in path.read_bytes()), None
    )


def packages() -> tuple[str, ...]:
    """All that is installed for this Python: `torch 2.10.0`."""
    return tuple(sorted({f"{each.name} {each.version}" for each in metadata.distributions()}))


def code(root: Path) -> str:
    """A digest of this project's files."""
    files = sorted(path for folder in OWN for path in (root / folder).rglob("*.py"))
    return digest([f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files])


def digest(lines: list[str]) -> str:
    """A digest of `lines`."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def space(folder: str, limit_s: float = SPACE_S) -> Space:
    """The room in `folder`, of which a child process tells that may hang."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("space.py")), folder]
    path = os.path.abspath(folder)
    # Not by `with`, nor by run(): both wait for the child, which a dead file system holds even when it is killed.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        return Space(**json.loads(child.communicate(timeout=limit_s)[0]))
    except subprocess.TimeoutExpired:
        child.kill()
        return Space(path=path, trouble=f"the file system did not answer within {limit_s:g} s")
    except (ValueError, TypeError):
        return Space(path=path, trouble="what looks there ended without a word")


def interfaces() -> list[str]:
    """Those with an address, but the loopback."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = psutil.net_if_addrs().items()
    return sorted(name for name, own in found if name != "lo" and any(each.family in families for each in own))


def ports() -> list[Port]:
    """The InfiniBand and RoCE ports."""

    def said(folder: str, name: str) -> str:
        with suppress(OSError):
            return Path(folder, name).read_text().strip()
        return ""

    found: list[Port] = []
    for folder in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, number = folder.split("/")[-3], folder.split("/")[-1]
        state = said(folder, "state").partition(":")[2].strip()  # "4: ACTIVE"
        found.append(Port(name=f"{device}/{number}", state=state, rate=said(folder, "rate")))
    return found


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _guarded(look: Callable[[], Result]) -> Result | None:
    """What `look` returns; None where it fails: one answer that is missing must not cost the others."""
    try:
        return look()
    except Exception:
        return None


def as_json(told: Any) -> Any:
    """What JSON can hold of facts."""
    import msgspec

    return msgspec.to_builtins(told)


def from_json(told: Any) -> Rank:
    """The facts of a rank that JSON held."""
    import msgspec

    return msgspec.convert(told, Rank)
