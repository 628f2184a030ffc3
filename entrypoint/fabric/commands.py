"""`muster fabric find, plan, binds, check`: parse, call, print tables or JSON."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from muster import processes
from muster.entrypoint import environment
from muster.entrypoint.detect import families
from muster.entrypoint.fabric import AUTO, HOST_ROOT, OFF, TCP, Need
from muster.entrypoint.options import LaunchOptions
from muster.errors import ExitCode, MusterError, one_line
from muster.help import Command

if TYPE_CHECKING:
    from muster.entrypoint.fabric.find import Finding
    from muster.entrypoint.fabric.stage import FabricPlan
    from muster.entrypoint.sites.schema import Site

CHECK_TIMEOUT_S = 180.0

Root = Annotated[Path, typer.Option("--root", metavar="FOLDER", help="Where the host's root is mounted.")]
FabricName = Annotated[
    str, typer.Option("--fabric", envvar="MUSTER_FABRIC", help="auto, infiniband, slingshot, efa or tcp.")
]
SiteName = Annotated[str, typer.Option("--site", envvar="MUSTER_SITE", help="A site's name or file, auto or off.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes. Default: this job's; 2 outside of a job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Engine = Annotated[Literal["apptainer", "podman", "docker"], typer.Option("--format", help="The container engine.")]


def add_to(app: typer.Typer) -> None:
    """Adds the command to `muster`."""
    fabric = typer.Typer(help="Show the host's network, and which of its libraries fit here.", no_args_is_help=True)
    command = partial(fabric.command, cls=Command)
    command("find", help="Show the host's devices and interfaces; its root is mounted at /host.")(_find)
    command("plan", help="Show which of the host's libraries fit into this image, or why not.")(_plan)
    command("binds", help="Print an engine's options for the host's libraries, without /host.")(_binds)
    command("check", help="Load NCCL's network plugin, and show which networks it can use.")(_check)
    app.add_typer(fabric, name="fabric")


def _find(root: Root = HOST_ROOT, fabric: FabricName = AUTO, as_json: AsJson = False) -> None:
    _show(_found(root, fabric), as_json=as_json)


def _plan(
    root: Root = HOST_ROOT,
    fabric: FabricName = AUTO,
    site: SiteName = AUTO,
    nodes: Nodes = None,
    as_json: AsJson = False,
) -> None:
    plan = _planned(root, fabric, site, nodes)
    _show(plan.finding, plan, as_json=as_json)
    _refuse(plan)


def _binds(
    engine: Engine = "apptainer",
    root: Root = HOST_ROOT,
    fabric: FabricName = AUTO,
    site: SiteName = AUTO,
    nodes: Nodes = None,
) -> None:
    from muster.entrypoint.fabric import stage

    plan = _planned(root, fabric, site, nodes)
    _refuse(plan)
    settings = stage.settings(plan, os.environ, Need(_num_nodes(nodes), uses_nccl=True))
    options = stage.engine_options(plan, settings.variables, engine)
    notes = [*settings.notes, *plan.notes]
    if not (plan.injected or plan.files or plan.net):
        notes.insert(0, f"no fabric: {plan.finding.why}; where the compute nodes have one: --fabric NAME")
    for note in notes:
        print(f"muster: {one_line(note)}", file=sys.stderr)
    print(options)


def _check(
    fabric: FabricName = AUTO,
    site: SiteName = AUTO,
    nodes: Nodes = None,
    as_json: AsJson = False,
    root: Root = HOST_ROOT,
) -> None:
    env = dict(os.environ)
    if fabric != OFF:
        from muster.entrypoint.fabric import launch

        need = Need(_num_nodes(nodes), True, fabric, is_proved=False)
        found = launch.for_need(need, env, _site(site), launch.Mounts(root))
        env.update(found.variables)
        for note in found.notes:
            print(f"muster: {one_line(note)}", file=sys.stderr)
    # In a separate process, as a library that it opens may crash or hang it.
    command = [sys.executable, "-P", "-m", "muster.check.fabric", *(["--json"] if as_json else [])]
    try:
        code = processes.run(command, env=env, timeout_s=CHECK_TIMEOUT_S, captures=False).returncode
        seen = f"signal {-code}"
    except subprocess.TimeoutExpired:
        code, seen = -1, f"no end within {CHECK_TIMEOUT_S:g} s"
    if code < 0:
        raise MusterError(
            "one of the fabric's libraries crashed the process that used it, or made it hang",
            seen=f"{seen}, after the last line above",
            fix="without the host's libraries, over TCP: --fabric tcp",
            code=ExitCode.FAILED,
        )
    sys.exit(code)


def _found(root: Path, fabric: str) -> "Finding":
    """The devices, the interfaces and the fabric of the host whose root is mounted at `root`.

    Raises:
        MusterError: nothing is mounted there, or there is no such fabric.
    """
    from muster.entrypoint.fabric.find import find
    from muster.entrypoint.fabric.launch import is_host

    # First, as it refuses an unknown fabric, which is wrong whatever is mounted.
    finding = find(root, AUTO if fabric == OFF else fabric)
    if not is_host(root):
        seen = f"no {root}/etc and no {root}/usr"
        fix = "apptainer exec --bind /:/host:ro IMAGE muster fabric ..., docker run -v /:/host:ro IMAGE muster ..."
        raise MusterError("the host's root is not mounted here", seen=seen, fix=fix)
    return finding


def _planned(root: Path, fabric: str, site: str, nodes: int | None) -> "FabricPlan":
    from muster.entrypoint.fabric import proof, stage
    from muster.entrypoint.sites import profiles
    from muster.entrypoint.sites.schema import Context

    finding, context = _found(root, fabric), Context.here(_num_nodes(nodes))
    profile, image = profiles.load_fabric(finding.fabric), proof.Image.here(os.environ)
    plan = stage.make_plan(finding, profile, image, context, _site(site))
    # Where no device shows a fabric, NCCL is not restricted to TCP: it may know another network.
    return replace(plan, net=None) if finding.fabric == TCP and fabric in (AUTO, OFF) else plan


def _refuse(plan: "FabricPlan") -> None:
    """Prints each refusal as an error, and then ends this process; without refusals it does nothing."""
    for each in plan.refusals:
        print(MusterError(each.wrong, seen=each.seen, fix=each.fix), file=sys.stderr)
    if plan.refusals:
        sys.exit(2)


def _site(name: str) -> "Site | None":
    from muster.entrypoint.sites import recognise

    found = recognise.here(environment.live(), LaunchOptions(site=name))
    return found.site if found else None


def _num_nodes(nodes: int | None) -> int:
    """`nodes` if given, else the number of nodes of this job, else 2."""
    if nodes is None:
        with suppress(MusterError):
            job = families.find_job(environment.live())[0]
            nodes = job.num_nodes if job.job_id else None
    return nodes or 2


def _show(finding: "Finding", plan: "FabricPlan | None" = None, *, as_json: bool) -> None:
    """Prints the finding, and the plan if there is one, as one JSON object, or as lines, tables and notes."""
    import msgspec
    from rich.console import Console
    from rich.text import Text

    from muster.entrypoint.sites.commands import new_table

    if as_json:
        print(json.dumps(msgspec.to_builtins(plan or finding, enc_hook=str, order="deterministic"), indent=2))
        return
    lines = {"fabric": finding.fabric, "because of": finding.why, "interfaces": " ".join(finding.interfaces) or "none"}
    tables: dict[tuple[str, ...], list[tuple[str, ...]]] = {
        ("device", "kind", "state", "path"): [(each.name, each.kind, each.state, each.path) for each in finding.devices]
    }
    if plan:
        lines |= {"NCCL's plugin": plan.plugin or "none", "NCCL_NET": plan.net or "not set"}
        tables |= {
            ("from the host", "its path there", "needed by", "wins"): [
                (each.soname, each.path, each.needed_by, "the host's" if each.wins else "") for each in plan.injected
            ],
            ("variable", "value"): sorted(plan.variables.items()),
            ("further files",): [(path,) for path in plan.files],
            ("devices to pass",): [(path,) for path in plan.devices],
        }
    console = Console()
    for name, value in lines.items():
        console.print(Text.assemble((f"{name:<14}", "bold"), one_line(value)), soft_wrap=True)
    for headings, rows in tables.items():
        table = new_table(*headings)
        for row in rows:
            table.add_row(*(Text(one_line(value)) for value in row))
        if rows:
            console.print(table)
    for note in (plan or finding).notes:
        console.print(Text(f"note: {one_line(note)}"), soft_wrap=True)
