"""File systems: the room in /dev/shm and where checkpoints go, and whether these can be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

from muster.check.doctor.facts import Facts, Space
from muster.check.doctor.findings import Finding, Part, size

ROOM = 2**30
"""Free space below which checkpoints are in danger: two of ResNet-50 with its momentum, and one being written,
take 0.6 GB."""

FILES = 100
"""A checkpoint has a file for each rank and a few more, and three of them are there at a time."""

LIMIT_S = 30.0
"""Seconds that a file system may take to write one small file: a busy one takes some, one that is gone all of them."""


def gather(folder: str, limit_s: float = LIMIT_S) -> Space:
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
        return Space(path=path, trouble="the check ended without an answer")


def findings(facts: Facts) -> Part:
    """Room for checkpoints on each node."""
    found: list[Finding] = []
    free: list[int] = []
    spaces = {node.host: node.checkpoints for node in facts.nodes if node.checkpoints is not None}
    for host, space in spaces.items():
        finding = _finding(host, space, len(facts.ranks))
        if finding is not None:
            found.append(finding)
        elif space.free is not None:
            free.append(space.free)
    path = next((space.path for space in spaces.values()), "")
    return Part("checkpoints", f"{size(min(free))} free in {path}" if free else f"{path} can be written", found)


def _finding(host: str, space: Space, num_ranks: int) -> Finding | None:
    fix = "another folder: --runs-dir, here --checkpoint-dir"
    if space.trouble is not None:
        left = "" if space.free is None else f", {size(space.free)} free"
        seen = f"{space.path}: {space.trouble}{left}"
        fix = f"make room there, or {fix}"
        return Finding("fault", "checkpoints", host, "no checkpoint can be written", seen, fix)
    if space.free is not None and space.free < ROOM:
        wrong, seen = "there is hardly any room for checkpoints", f"{space.path}: {size(space.free)} free"
        return Finding("warning", "checkpoints", host, wrong, seen, f"make room there, or {fix}")
    if space.files_free is not None and space.files_free < FILES + 3 * num_ranks:
        wrong, seen = (
            "hardly any file can be made where checkpoints go",
            f"{space.path}: {space.files_free} inodes free",
        )
        return Finding("warning", "checkpoints", host, wrong, seen, f"remove files, or {fix}")
    return None
