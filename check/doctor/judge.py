"""Judges what the ranks told: facts in, findings out."""

from collections.abc import Callable, Sequence
from typing import Any

from check.doctor import judge_gpus, judge_network, judge_room
from check.doctor.facts import Facts, Node, values
from check.doctor.findings import Finding, Part
from check.doctor.odd import all_of, differences, named

NOT_COMPARED = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "NCCL_DEBUG_FILE")
"""Variables that may well differ between nodes: interfaces have names of their own, cores are counted on each node."""

ONE_IMAGE = "start all nodes from the same image or folder: look for a copy on a node that was not updated"


def judge(facts: Facts) -> list[Part]:
    """All parts of what was told, with what was found in each."""
    return [
        software(facts),
        judge_gpus.judge(facts),
        cores(facts),
        judge_room.memory(facts),
        judge_room.checkpoints(facts),
        judge_room.limits(facts),
        settings(facts),
        judge_network.judge(facts),
    ]


def software(facts: Facts) -> Part:
    """Image, lock, Python, torch and its libraries: the same everywhere."""

    def differ(
        what: str, of: Callable[[Node], Any], level: str, about: str, shown: Callable[[Any], str] = str
    ) -> list[Finding]:
        return differences(values(facts, of), level, about, what, ONE_IMAGE, shown)

    found = [
        *differ("image", lambda node: _image(node), "fault", "image"),
        *differ("lock", lambda node: node.software.lock, "fault", "lock", _short),
        *differ("code of this project", lambda node: node.software.code, "fault", "code", _short),
        *differ("Python", lambda node: _minor(node.software.python), "fault", "python"),
        *differ("torch", lambda node: _torch(node), "fault", "torch"),
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
    told = [set(node.software.packages) for node in facts.nodes if node.software.packages]
    everywhere = set[str].intersection(*told) if told else set[str]()
    return lambda packages: named([each for each in packages if each not in everywhere]) or "none of these"


def cores(facts: Facts) -> Part:
    """Cores that ranks may run on."""
    found: list[Finding] = []
    for host in facts.hosts:
        ranks = facts.on(host)
        sets = [frozenset(rank.cores) for rank in ranks]
        known = frozenset[int]().union(*sets)
        if not all(sets):
            continue
        least = 2 if facts.on_gpus else 1
        if len(known) < least * len(ranks):
            # Of a GPU's rank one core is full with what it launches: nothing is left for loading data.
            wrong = f"{len(known)} core{'s' if len(known) > 1 else ''} for {len(ranks)} ranks"
            fix = "ask for more cores a rank: --cpus-per-task in Slurm, ncpus in PBS; or fewer ranks"
            found.append(Finding("warning", "cores", host, wrong, f"cores {ranges(known)}", fix))
        elif len(set(sets)) > 1 and sum(map(len, sets)) > len(known):
            pair = next((a, b) for a, one in enumerate(sets) for b, other in enumerate(sets) if a < b and one & other)
            one, other = (ranks[index] for index in pair)
            found.append(
                Finding(
                    "warning",
                    "binding",
                    host,
                    "ranks are bound to the same cores, and others lie idle",
                    f"rank {one.rank}: cores {ranges(one.cores)}; rank {other.rank}: cores {ranges(other.cores)}",
                    "leave binding to the launcher: srun --cpu-bind=cores with --cpus-per-task, or no binding at all",
                )
            )
    counts = {host: len({core for rank in facts.on(host) for core in rank.cores}) or None for host in facts.hosts}
    fix = "ask for the same cores on all nodes: the slowest node holds up all"
    found += differences(counts, "warning", "cores", "number of cores", fix)
    a_rank = [count // len(facts.on(host)) for host, count in counts.items() if count]
    says = f"{all_of(sorted(a_rank))} a rank" if a_rank else "not known"
    return Part("cores", says, found)


def ranges(cores: Any) -> str:
    """Numbers in few words: "0-3,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def settings(facts: Facts) -> Part:
    """Variables of what the ranks speak through."""
    names = sorted({name for node in facts.nodes for name in node.variables if name not in NOT_COMPARED})
    found: list[Finding] = []
    for name in names:
        told = {node.host: node.variables.get(name, "(unset)") for node in facts.nodes}
        fix = f"set {name} for all nodes alike: in the job script, or in what all of them read"
        found += differences(told, "warning", name, name, fix)
    return Part(
        "settings",
        f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}{_everywhere(facts)}" if names else "none",
        found,
    )
