"""`muster job`: parse, call, print."""

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from muster.entrypoint.sites.commands import print_list
from muster.errors import MusterError

KUBERNETES = "Kubernetes"


def add_to(app: typer.Typer, check: Callable[[Sequence[str]], None]) -> None:
    """Adds the command to `muster`; `check` ends it where a job would wait in the queue for a misspelt training."""
    settings = {"obj": check}
    app.command("job", context_settings=settings, help="Print a job script for a site; 'muster job list' names them.")(
        _job
    )


def _job(
    context: typer.Context,
    site: Annotated[str, typer.Argument(metavar="SITE", help="A site's profile, by name or file; or list.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="What runs on each node. Default: train ddp."),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the job.", min=1, max=100_000)] = 2,
    time: Annotated[str, typer.Option(help="Time limit: 1:30:00, 2-12:00:00 or 90m.")] = "1:00:00",
    image: Annotated[str, typer.Option(help="The image: a SIF, or a registry's for Kubernetes.")] = "muster.sif",
    account: Annotated[str | None, typer.Option(help="The project that pays.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition or queue. Default: the profile's.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of a node. Default: the profile's.", min=0, max=1000)] = None,
    name: Annotated[str, typer.Option(help="The job's name.")] = "muster",
    kind: Annotated[
        str | None,
        typer.Option(help="Which manifest: pytorchjob, jobset or job. Default: job.", rich_help_panel=KUBERNETES),
    ] = None,
    claim: Annotated[
        str | None,
        typer.Option(help="The PersistentVolumeClaim for runs. Default: muster.", rich_help_panel=KUBERNETES),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="A further resource of each pod, for RDMA: rdma/hca_shared_devices_a=1. May be repeated.",
            rich_help_panel=KUBERNETES,
        ),
    ] = None,
) -> None:
    # Here and not above: no other command needs profiles or templates.
    from muster.entrypoint.jobs import making
    from muster.entrypoint.jobs.script import COMMAND, Wanted, checked, seconds

    if site == "list" and not command:
        print_list()
        return
    if command:
        context.obj(command)
        _refuse_worlds_of_one(site, command, nodes)
    wanted = Wanted(
        nodes=nodes,
        time_s=seconds(time),
        image=image,
        account=account,
        partition=partition,
        gpus=gpus,
        name=name,
        command=tuple(command or COMMAND),
        kind=kind,
        claim=claim,
        devices=tuple(device or ()),
    )
    sys.stdout.write(making.make(site, checked(wanted)))


def _refuse_worlds_of_one(site: str, command: Sequence[str], nodes: int) -> None:
    """Refuses what would run once on each of several nodes, where no process knows of another."""
    words = list(command)
    while words and re.fullmatch(r"(.*/)?(torchrun|python[0-9.]*)|-u", words[0]):
        words.pop(0)
    if nodes > 1 and words and (len(words) < len(command) or words[0].endswith(".py")):
        raise MusterError(
            "without `muster run` this runs on each node by itself",
            seen=shlex.join(command),
            fix=f"muster job {shlex.quote(site)} --nodes {nodes} -- muster run {shlex.join(words)}",
        )
