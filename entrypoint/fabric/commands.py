"""`muster fabric find, plan, binds, check`: parse, call, print."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from entrypoint import environment, launch, schedulers
from entrypoint.fabric.model import HOST_ROOT
from entrypoint.fabric.need import AUTO, OFF, Need, Places
from entrypoint.options import LaunchOptions
from train.errors import FAILED, MusterError, one_line

if TYPE_CHECKING:
    from entrypoint.fabric.model import FabricPlan
    from entrypoint.sites.schema import Site

CHECK_TIMEOUT_S = 180.0

Root = Annotated[Path, typer.Option("--root", metavar="FOLDER", help="Where the host's root is mounted.")]
FabricName = Annotated[
    str, typer.Option("--fabric", envvar="MUSTER_FABRIC", help="auto, infiniband, slingshot, efa or tcp.")
]
SiteName = Annotated[str, typer.Option("--site", envvar="MUSTER_SITE", help="A site's name or file, auto or off.")]
Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Of the job. Default: those of this job, and 2 outside of one.")
]
HostNccl = Annotated[bool, typer.Option("--host-nccl", help="The host's NCCL too, if no older than the image's.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Format = Annotated[
    str, typer.Option("--format", help="For whom: apptainer, podman, docker; shell (variables alone) or json.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the command to `muster`."""
    fabric = typer.Typer(
        help="The host's network in the container: what there is, what fits.",
        no_args_is_help=True,
    )
    fabric.command("find", help="Show the host's devices, interfaces and libraries; its root is mounted at /host.")(
        _find
    )
    fabric.command("plan", help="Show which of the host's libraries go into this image, or why they can't.")(_plan)
    fabric.command("binds", help="Print a container engine's options that bring them in one by one, without /host.")(
        _binds
    )
    fabric.command("check", help="Open NCCL's plugin here and now, and show what it can send by.")(_check)
    app.add_typer(fabric, name="fabric")


def _find(root: Root = HOST_ROOT, fabric: FabricName = AUTO, site: SiteName = AUTO, as_json: AsJson = False) -> None:
    from entrypoint.fabric import survey, tables

    found = survey.look(_mounted(root), _name(fabric), _site(site))
    print(tables.as_json(found) if as_json else tables.of_finding(found))


def _plan(
    root: Root = HOST_ROOT,
    fabric: FabricName = AUTO,
    site: SiteName = AUTO,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    from entrypoint.fabric import tables

    _, plan = _planned(root, fabric, site, nodes)
    if as_json:
        print(tables.as_json(plan))
    elif not plan.refusals:
        print(tables.of_plan(plan))
    _refuse(plan)


def _binds(
    format: Format = "apptainer",
    root: Root = HOST_ROOT,
    fabric: FabricName = AUTO,
    site: SiteName = AUTO,
    nodes: Nodes = None,
    host_nccl: HostNccl = False,
) -> None:
    from entrypoint.fabric import binds, survey
    from entrypoint.fabric.stage import Use

    if format not in binds.FORMATS:
        raise MusterError("there is no such format", seen=f"--format {format}", fix=f"one of {' '.join(binds.FORMATS)}")
    profile, plan = _planned(root, fabric, site, nodes)
    _refuse(plan)
    nccl = _nccl(root, profile) if host_nccl else None
    several = Use(_num_nodes(nodes) > 1)
    found = binds.of(plan, os.environ, several, is_rdma=survey.profile_of(plan.finding).is_rdma, nccl=nccl)
    text = binds.printed(found, format)
    nothing = (
        []
        if found.files or plan.net
        else [f"no fabric: {plan.finding.why}; where the compute nodes have one: --fabric NAME"]
    )
    for note in (*nothing, *found.notes, *plan.notes):
        print(f"muster: {one_line(note)}", file=sys.stderr)
    print(text)


def _check(
    fabric: FabricName = AUTO,
    site: SiteName = AUTO,
    nodes: Nodes = None,
    host_nccl: HostNccl = False,
    as_json: AsJson = False,
    root: Root = HOST_ROOT,
) -> None:
    env = {**os.environ, **launch.ours_first(os.environ)}
    if fabric != OFF:
        from entrypoint.fabric import automatic

        need = Need(_num_nodes(nodes), True, fabric, host_nccl=host_nccl, is_proved=False)
        found = automatic.for_need(need, env, _site(site), Places(root))
        env.update(found.variables)
        for note in found.notes:
            print(f"muster: {note}", file=sys.stderr)
    _become_check(env, as_json)


def _become_check(env: Mapping[str, str], as_json: bool, timeout_s: float = CHECK_TIMEOUT_S) -> None:
    """Ends with the code of check/fabric.py: a library that it opens may end or hold its process."""
    command = [sys.executable, "-m", "check.fabric", *(["--json"] if as_json else [])]
    try:
        done = subprocess.run(command, env=dict(env), stdin=subprocess.DEVNULL, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise MusterError(
            f"the fabric's libraries do not answer: no end within {timeout_s:g} s",
            seen="the last line above is the last that did",
            fix="leave the host's libraries out, over TCP: --fabric tcp",
            code=FAILED,
        ) from None
    if done.returncode < 0:
        raise MusterError(
            "one of the fabric's libraries ended the process that asked it",
            seen=f"signal {-done.returncode}, after the last line above",
            fix="leave the host's libraries out, over TCP: --fabric tcp",
            code=FAILED,
        )
    sys.exit(done.returncode)


def _planned(root: Path, fabric: str, site: str, nodes: int | None) -> "tuple[Site | None, FabricPlan]":
    from entrypoint.fabric import survey

    profile = _site(site)
    finding = survey.look(_mounted(root), _name(fabric), profile)
    return profile, survey.plan(finding, _num_nodes(nodes), profile, is_named=_name(fabric) != AUTO)


def _nccl(root: Path, site: "Site | None") -> tuple[str, Path]:
    from entrypoint.fabric import host_nccl

    found = host_nccl.find(root, os.environ, site)
    return f"/{found.relative_to(root)}", host_nccl.of_torch()


def _refuse(plan: "FabricPlan") -> None:
    """Returns if nothing was refused; else each refusal is shown as an error, and this process ends."""
    for each in plan.refusals:
        seen = f"{each.library}: {each.needs}, needed by {each.needed_by}"
        print(MusterError(each.wrong, seen=seen, fix=each.fix), file=sys.stderr)
    if plan.refusals:
        sys.exit(2)


def _mounted(root: Path) -> Path:
    from entrypoint.fabric import automatic

    if not automatic.is_host(root):
        raise MusterError(
            "the host's root is not mounted here",
            seen=f"no {root}/etc and no {root}/usr",
            fix="apptainer exec --bind /:/host:ro IMAGE muster fabric ..., docker run -v /:/host:ro IMAGE muster ...",
        )
    return root


def _name(fabric: str) -> str:
    return AUTO if fabric == OFF else fabric


def _site(name: str) -> "Site | None":
    from entrypoint.sites import recognise

    found = recognise.here(environment.live(), LaunchOptions(site=name))
    return found.site if found else None


def _num_nodes(nodes: int | None) -> int:
    """How many nodes the job has."""
    if nodes is not None:
        return nodes
    try:
        job = schedulers.detect(environment.live())[0]
    except MusterError:
        job = None
    return job.num_nodes if job and job.num_nodes and job.job_id else 2
