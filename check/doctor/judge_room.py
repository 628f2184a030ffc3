"""Judges what a node has room for: shared memory, checkpoints, files, locked memory."""

from check.doctor.facts import UNLIMITED, Facts, Node
from check.doctor.findings import Finding, Part
from check.doctor.odd import all_of, named

KIB, MIB, GIB = 2**10, 2**20, 2**30

BATCH = 32 * 3 * 224 * 224 * 4
"""Bytes of a batch as data workers hand it over: by default 32 images, and of ImageNet's size."""

WORKER = 4 * BATCH
"""What one data worker of a rank fills at most: 2 batches ahead, and 2 in use (train/data/shm.py)."""

ROOM = 1 * GIB
"""Free space below which checkpoints are in danger: two of ResNet-50 with its momentum, and one being written,
take 0.6 GB."""

FILES = 100
"""A checkpoint has a file for each rank and a few more, and three of them are there at a time."""

OPEN_FILES, OPEN_A_RANK = 512, 4
"""Files that a rank may need: those of its data, and what its workers hand over; and its connections to each other
rank, in a group of all, one beside it, and a mesh of two dimensions."""


def memory(facts: Facts) -> Part:
    """/dev/shm, through which data workers hand over their batches."""
    found: list[Finding] = []
    free: list[int] = []
    for node in facts.nodes:
        if node.shm is None:
            continue
        needed = WORKER * len(facts.on(node.host))
        fix = "docker run --shm-size=8g or --ipc=host; on a node of one's own: mount -o remount,size=50% /dev/shm"
        if node.shm.trouble is not None:
            seen = f"{node.shm.path}: {node.shm.trouble}"
            found.append(_shm(facts, node, "/dev/shm can't be written", seen, fix))
        elif node.shm.free is not None and node.shm.free < needed:
            seen = f"{size(node.shm.free)} free of {size(node.shm.size or 0)}; {size(needed)} for 1 worker a rank"
            found.append(_shm(facts, node, "/dev/shm is too small for data workers", seen, fix))
        elif node.shm.free is not None:
            free.append(node.shm.free)
    says = f"{size(min(free))} free{' at least' if len(set(free)) > 1 else ''}" if free else "no limit"
    return Part("/dev/shm", says, found)


def _shm(facts: Facts, node: Node, wrong: str, seen: str, fix: str) -> Finding:
    # On CPUs no workers load data unless they are asked for; and where all nodes are alike, someone may mean it so.
    others = [other.shm for other in facts.nodes if other is not node and other.shm is not None]
    is_odd = any(other.trouble is None and (other.free is None or other.free >= 2 * WORKER) for other in others)
    return Finding("fault" if facts.on_gpus or is_odd else "warning", "shm", node.host, wrong, seen, fix)


def checkpoints(facts: Facts) -> Part:
    """Room for checkpoints."""
    found: list[Finding] = []
    free: list[int] = []
    path = ""
    for node in facts.nodes:
        space = node.checkpoints
        if space is None:
            continue
        path = path or space.path
        fix = "another folder: --runs-dir, here --checkpoint-dir"
        if space.trouble is not None:
            wrong = "no checkpoint can be written"
            seen = f"{space.path}: {space.trouble}{_left(space.free)}"
            found.append(Finding("fault", "checkpoints", node.host, wrong, seen, f"make room there, or {fix}"))
        elif space.free is not None and space.free < ROOM:
            wrong = "there is hardly any room for checkpoints"
            seen = f"{space.path}: {size(space.free)} free"
            found.append(Finding("warning", "checkpoints", node.host, wrong, seen, f"make room there, or {fix}"))
        elif space.files_free is not None and space.files_free < FILES + 3 * len(facts.ranks):
            wrong = "hardly any file can be made where checkpoints go"
            seen = f"{space.path}: {space.files_free} inodes free"
            found.append(Finding("warning", "checkpoints", node.host, wrong, seen, f"remove files, or {fix}"))
        elif space.free is not None:
            free.append(space.free)
    says = f"{size(min(free))} free in {path}" if free else f"{path} can be written"
    return Part("checkpoints", says, found)


def _left(free: int | None) -> str:
    return "" if free is None else f", {size(free)} free"


def limits(facts: Facts) -> Part:
    """What this user may lock and open."""
    found: list[Finding] = []
    needed = OPEN_FILES + OPEN_A_RANK * len(facts.ranks)
    few = [node for node in facts.nodes if node.open_files is not None and UNLIMITED != node.open_files < needed]
    if few:
        seen = (
            f"ulimit -n: {all_of([node.open_files for node in few])}; {len(facts.ranks)} ranks may need {needed} each"
        )
        fix = "ulimit -n $(ulimit -Hn) in the job script, before the launch"
        hosts = named([node.host for node in few])
        found.append(Finding("warning", "open files", hosts, "few files may be open at a time", seen, fix))
    locked = [node for node in facts.nodes if node.devices and node.memlock not in (None, UNLIMITED)]
    if locked:
        seen = f"ulimit -l: {all_of([f'{(node.memlock or 0) // KIB} KiB' for node in locked])}, {locked[0].devices[0]}"
        fix = "docker run --ulimit memlock=-1; in Slurm PropagateResourceLimitsExcept=MEMLOCK and slurmd's LimitMEMLOCK"
        hosts = named([node.host for node in locked])
        found.append(Finding("warning", "memlock", hosts, "RDMA may lock little memory", seen, fix))
    files = [node.open_files for node in facts.nodes if node.open_files is not None]
    least = min((number for number in files if number != UNLIMITED), default=None)
    return Part("limits", "open files: " + ("any number" if least is None else f"{least:,}"), found)


def size(number: int) -> str:
    """Bytes in words: "1.5 GiB"."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number // KIB} KiB"
