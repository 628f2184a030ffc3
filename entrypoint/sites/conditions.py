"""When a value of a profile holds: on so many nodes, on this GPU, with that NCCL."""

import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from entrypoint.sites.schema import Fact, When
from train.errors import MusterError

GPUS = Path("/proc/driver/nvidia/gpus")

Version = tuple[int, ...]

_COMPARE: Mapping[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_TERM = r"(>=|<=|==|!=|>|<)?\s*([0-9]{1,6}(?:\.[0-9]{1,6}){0,3})"


@dataclass(frozen=True)
class Context:
    """What conditions ask for: the job's number of nodes, the GPU's name and NCCL's version; None is not known."""

    nodes: int
    gpu: str | None = None
    nccl: str | None = None


def holds(when: When | None, context: Context) -> bool:
    """Whether all of `when` holds; what asks for something that is not known does not.

    Raises:
        MusterError: it can't be read.
    """
    if when is None:
        return True
    wrong = problems(when.nodes, when.gpu, when.nccl)
    if wrong:
        raise MusterError("a condition can't be read", seen="; ".join(wrong), fix='when = {nodes = ">1"}')
    return (
        (when.nodes is None or _within(when.nodes, (context.nodes,)))
        and (when.gpu is None or when.gpu.casefold() in (context.gpu or "").casefold())
        and (when.nccl is None or _within(when.nccl, _version(context.nccl or "")))
    )


def resolve(facts: Mapping[str, Fact[str]], context: Context) -> dict[str, str]:
    """The values of those facts whose condition holds."""
    return {name: fact.value for name, fact in facts.items() if holds(fact.when, context)}


def problems(nodes: object = None, gpu: object = None, nccl: object = None) -> list[str]:
    """What is wrong with a condition, one sentence each; a value of a wrong type is not looked at."""
    found: list[str] = []
    if isinstance(nodes, str) and not _is_range(nodes, r"[0-9]+"):
        found.append(f'nodes = "{nodes}": wanted a number of nodes, like ">1", "1" or ">=2,<64"')
    if isinstance(nccl, str) and not _is_range(nccl, r"[0-9.]+"):
        found.append(f'nccl = "{nccl}": wanted a range of versions, like ">=2.27,<2.28"')
    if isinstance(gpu, str) and not gpu.strip():
        found.append('gpu = "": wanted a part of the GPU\'s name, like "GH200"')
    if nodes is None and gpu is None and nccl is None:
        found.append('an empty condition: wanted nodes, gpu or nccl, like {nodes = ">1"}')
    return found


def here(num_nodes: int, is_live: bool = True, gpus: Path = GPUS) -> Context:
    """The context of a launch on `num_nodes`: the GPU of this node, where it is asked, and the installed NCCL."""
    return Context(num_nodes, gpu_name(gpus) if is_live else None, nccl_version())


def gpu_name(gpus: Path = GPUS) -> str | None:
    """The model of this node's first GPU, as the kernel's driver tells it; None without one.

    Source: https://download.nvidia.com/XFree86/Linux-x86_64/550.54.14/README/procinterface.html
    """
    for path in sorted(gpus.glob("*/information")):
        try:
            match = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if match:
            return match[1]
    return None


def nccl_version() -> str | None:
    """The version of NCCL's package beside torch, by the name of its folder; None where it is not installed as one."""
    for folder in sys.path:
        if folder.endswith("-packages"):
            # nvidia_nccl_cu13-2.30.7.dist-info
            for path in sorted(Path(folder).glob("nvidia_nccl_cu*.dist-info")):
                return path.name.removesuffix(".dist-info").rpartition("-")[2]
    return None


def _is_range(text: str, number: str) -> bool:
    terms = [re.fullmatch(_TERM, term.strip()) for term in text.split(",")]
    return all(term is not None and re.fullmatch(number, term[2]) for term in terms)


def _within(text: str, found: Version) -> bool:
    return bool(found) and all(_is_met(term.strip(), found) for term in text.split(","))


def _is_met(term: str, found: Version) -> bool:
    match = re.fullmatch(_TERM, term)
    if match is None:
        return False
    wanted = _version(match[2])
    length = max(len(wanted), len(found))
    return _COMPARE[match[1] or "=="](_padded(found, length), _padded(wanted, length))


def _padded(version: Version, length: int) -> Version:
    return (*version, *(0,) * (length - len(version)))


def _version(text: str) -> Version:
    """The numbers that a version begins with: 2.27.5+cuda12.9 is 2.27.5."""
    match = re.match(r"[0-9]{1,6}(?:\.[0-9]{1,6})*", text)
    return tuple(int(number) for number in match[0].split(".")) if match else ()
