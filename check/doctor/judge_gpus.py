"""Judges the GPUs that the ranks were given."""

import re
from collections import Counter

from check.doctor.facts import Facts, Gpu, Node, Rank
from check.doctor.findings import Finding, Part
from check.doctor.odd import differences

CONTEXT = 256 * 2**20
"""Less than any process holds that uses a GPU: CUDA's context alone takes more."""

TELL_SITE = "tell the site, and keep the job off that node meanwhile (Slurm: --exclude=NODE)"


def judge(facts: Facts) -> Part:
    """What is wrong with the GPUs, the same on each node."""
    given = {host: number_given(facts.on(host)) for host in facts.hosts}
    if facts.device == "cpu" or not (facts.on_gpus or any(given.values()) or any(node.gpus for node in facts.nodes)):
        return Part("GPUs", "none: on CPUs")
    found: list[Finding] = []
    fix = "ask for the same GPUs on all nodes, and look by nvidia-smi whether one has fallen off its bus"
    found += differences(given, "fault", "gpus", "number of GPUs", fix)
    for host in facts.hosts:
        found += _for_ranks(host, facts.on(host))
    names = {node.host: _names(node, facts) or None for node in facts.nodes}
    found += differences(names, "fault", "gpus", "kind of GPU", "ask the scheduler for nodes of one kind")
    usual = Counter(gpu.links for node in facts.nodes for gpu in used(node, facts) if gpu.links is not None)
    most = max(usual, default=0)
    for node in facts.nodes:
        for gpu in used(node, facts):
            found += _of(node.host, gpu, most)
    number = Counter(given.values()).most_common(1)[0][0]
    kind = next((name for name in names.values() if name), "GPUs")
    return Part("GPUs", f"{number} x {kind} a node", found)


def devices(visible: str) -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, by CUDA's own rule: up to the first entry that is no device."""
    found: list[str] = []
    for entry in visible.split(","):
        if not re.fullmatch(r"[0-9]+|(?:GPU|MIG)-[0-9A-Za-z/-]+", entry.strip()):
            break
        found.append(entry.strip())
    return found


def number_given(ranks: list[Rank]) -> int:
    """How many GPUs the ranks of a node were given: those that they see, or that the scheduler names."""
    named = {device for rank in ranks if rank.visible is not None for device in devices(rank.visible)}
    seen = max((rank.num_gpus for rank in ranks), default=0)
    return len(named) if named else seen


def used(node: Node, facts: Facts) -> list[Gpu]:
    """The GPUs of a node that this job was given, as far as its ranks can tell; else all."""
    ranks = facts.on(node.host)
    named = {device for rank in ranks if rank.visible is not None for device in devices(rank.visible)}
    cards = list(node.gpus or ())
    chosen = [gpu for gpu in cards if str(gpu.index) in named or (gpu.uuid and gpu.uuid in named)]
    return chosen or cards


def _names(node: Node, facts: Facts) -> str:
    return ", ".join(sorted({gpu.name for gpu in used(node, facts) if gpu.name}))


def _for_ranks(host: str, ranks: list[Rank]) -> list[Finding]:
    """Whether each rank of a node has a GPU, and none the same."""
    fix = f"start as many ranks as there are GPUs (--nproc-per-node), or ask for {len(ranks)} GPUs a node"
    wanted = [rank for rank in ranks if rank.visible and devices(rank.visible)]
    blind = [rank for rank in wanted if rank.num_gpus == 0]
    promised = number_given(ranks)
    if promised and promised < len(ranks):
        wrong = f"{len(ranks)} ranks, but {promised} GPU{'s' if promised > 1 else ''}"
        return [Finding("fault", "gpus", host, wrong, f"CUDA_VISIBLE_DEVICES={ranks[0].visible or '(unset)'}", fix)]
    if blind and any(rank.num_gpus for rank in ranks):
        wrong = f"rank {blind[0].rank} sees no GPU, others of its node do"
        return [Finding("fault", "gpus", host, wrong, f"CUDA_VISIBLE_DEVICES={blind[0].visible}", fix)]
    if blind:
        wrong = "GPUs were given, and torch sees none: a training would use the CPU"
        seen = f"CUDA_VISIBLE_DEVICES={blind[0].visible}"
        fix = "in a container: apptainer exec --nv, docker run --gpus all; `muster version` tells of the driver"
        return [Finding("warning", "gpus", host, wrong, seen, fix)]
    own = Counter(rank.visible for rank in ranks if rank.num_gpus == 1)
    shared = next((visible for visible, number in own.items() if number > 1), None)
    if shared is not None or (own.get(None, 0) > 1):
        fix = "show each rank its own (srun --gpus-per-task=1), or all ranks all GPUs"
        return [Finding("fault", "gpus", host, "ranks share one GPU", f"CUDA_VISIBLE_DEVICES={shared}", fix)]
    return []


def _of(host: str, gpu: Gpu, links: int) -> list[Finding]:
    """What is wrong with one GPU."""
    name = f"GPU {gpu.index}"
    found: list[Finding] = []
    if gpu.uncorrected:
        wrong = f"{name} has had memory errors that ECC could not correct"
        seen = f"{gpu.uncorrected} since the driver was loaded"
        found.append(Finding("fault", "ecc", host, wrong, seen, TELL_SITE))
    if gpu.remapping:
        wrong = f"{name} has broken memory: replacing its rows {'has failed' if gpu.remapping == 'failed' else 'waits'}"
        seen = f"nvidia-smi -q -d ROW_REMAPPER: {gpu.remapping}"
        fix = TELL_SITE if gpu.remapping == "failed" else "the site has to reset that GPU: nvidia-smi --gpu-reset"
        found.append(Finding("fault" if gpu.remapping == "failed" else "warning", "ecc", host, wrong, seen, fix))
    if gpu.used is not None and gpu.used > CONTEXT:
        wrong = f"memory of {name} is taken by another process"
        seen = f"{gpu.used / 2**30:.1f} GiB used before any rank uses it"
        found.append(Finding("warning", "gpu memory", host, wrong, seen, "look whose it is: nvidia-smi on that node"))
    if gpu.slowed_by:
        seen = f"{', '.join(gpu.slowed_by)}; {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz"
        found.append(Finding("warning", "clock", host, f"the clock of {name} is held down", seen, TELL_SITE))
    if gpu.mig:
        wrong = f"{name} is cut into parts (MIG): NCCL does not join them"
        found.append(Finding("warning", "mig", host, wrong, "MIG mode: enabled", "ask for whole GPUs"))
    if gpu.links is not None and gpu.links < links:
        wrong = f"NVLinks of {name} are down"
        seen = f"{gpu.links} up, {links} on other GPUs"
        found.append(Finding("warning", "nvlink", host, wrong, seen, TELL_SITE))
    return found
