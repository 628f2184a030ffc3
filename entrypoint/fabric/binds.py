"""FabricPlan -> the options by which a container engine puts the host's files into a container, one by one.

No folder of the host is ever put over one of the image's: its libraries would not fit the image's C library. The words
are for `eval "apptainer exec $(muster fabric binds --format apptainer) IMAGE ..."`: a shell reads them once.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from entrypoint.fabric.model import FabricPlan
from entrypoint.fabric.stage import LINKED_AT, Use, of_binds
from entrypoint.passing import assignment
from train.errors import MusterError

FORMATS = ("apptainer", "podman", "docker", "shell", "json")

# What RDMA needs of docker and podman: memory that may be locked, the host's shared memory and its network.
# Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
RDMA_OPTIONS = ("--ulimit", "memlock=-1", "--cap-add", "IPC_LOCK", "--ipc=host", "--network=host")


@dataclass(frozen=True)
class Binds:
    """What a container gets.

    Attributes:
        files: the place in the container of each file of the host, read-only.
        devices: files in /dev, for engines that don't bind it whole.
        variables: by name.
        is_rdma: whether it needs what RDMA needs.
        notes: one line for each thing that the user should know.
    """

    files: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    is_rdma: bool = False
    notes: tuple[str, ...] = ()


def of(
    plan: FabricPlan, env: Mapping[str, str], use: Use, *, is_rdma: bool, nccl: tuple[str, Path] | None = None
) -> Binds:
    """What `plan` comes to.

    Args:
        env: of the image: its library path goes before the host's libraries.
        use: what decides on variables.
        is_rdma: of the fabric's profile.
        nccl: the host's NCCL as the host has it, and the wheel's file that it takes the place of.
    """
    staged = of_binds(plan, env, use)
    files = [(each.path, str(LINKED_AT / each.soname)) for each in plan.injected]
    has_verbs = any(each.soname.startswith("libibverbs.so") for each in plan.injected)
    # The list of providers goes with the library that reads it.
    files += [(path, path) for path in plan.files if has_verbs or path != "/etc/libibverbs.d"]
    if nccl:
        files.append((nccl[0], str(nccl[1])))
    named = {"MUSTER_FABRIC": plan.finding.fabric} if plan.injected or plan.net else {}
    return Binds(tuple(files), plan.devices, {**staged.variables, **named}, is_rdma, staged.notes)


def printed(binds: Binds, format: str) -> str:
    """The options as a shell has to be given them, lines for one, or JSON.

    Raises:
        MusterError: a file's name, or a value, can't be passed to this engine.
    """
    if format == "json":
        return json.dumps(_values(binds), indent=2)
    if format == "shell":
        return "\n".join(f"export {name}={_quoted(value)}" for name, value in sorted(binds.variables.items()))
    return " ".join(_apptainer(binds) if format == "apptainer" else _docker(binds))


def _values(binds: Binds) -> dict[str, object]:
    return {
        "files": [{"host": host, "container": container} for host, container in binds.files],
        "devices": list(binds.devices),
        "variables": dict(sorted(binds.variables.items())),
        "options": list(RDMA_OPTIONS) if binds.is_rdma else [],
    }


def _apptainer(binds: Binds) -> list[str]:
    # /dev and /sys are there by themselves.
    words: list[str] = []
    for host, container in binds.files:
        for path in (host, container):
            if re.search(r"[:,\\\n]", path):
                raise _unusable("apptainer's --bind takes no colons, commas, backslashes and line breaks", path)
        words += ["--bind", _quoted(f"{host}:{container}:ro")]
    for name, value in sorted(binds.variables.items()):
        if re.search(r"[$`\\\n\r\0]", value):
            raise _unusable("apptainer has a shell evaluate what is in a variable", f"{name}={value}")
        words += ["--env", assignment(name, value)[0]]
    return words


def _docker(binds: Binds) -> list[str]:
    words: list[str] = []
    for host, container in binds.files:
        if ":" in host or ":" in container:
            raise _unusable("docker's --volume takes no colons", host)
        words += ["--volume", _quoted(f"{host}:{container}:ro")]
    for path in binds.devices:
        if ":" in path:
            raise _unusable("docker's --device takes no colons", path)
        words += ["--device", _quoted(path)]
    for name, value in sorted(binds.variables.items()):
        words += ["--env", _quoted(f"{name}={value}")]
    return [*words, *(RDMA_OPTIONS if binds.is_rdma else ())]


def _quoted(word: str) -> str:
    return shlex.quote(word)


def _unusable(why: str, seen: str) -> MusterError:
    return MusterError(
        f"what the fabric needs can't be passed: {why}",
        seen=seen,
        fix="mount the host's root in the container, which needs no such names: --bind /:/host:ro",
    )
