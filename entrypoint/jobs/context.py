"""Profile x wanted job -> what the templates name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from entrypoint.jobs import directives, quoting, walltime
from entrypoint.jobs.wanted import COMMAND, IMAGE, NAME, Wanted
from entrypoint.sites.conditions import Context, holds
from entrypoint.sites.schema import Fact, Site
from train.errors import MusterError

T = TypeVar("T")

MAX_REQUEUES = 10
EXTENSIONS: Mapping[str, str] = {"slurm": "sbatch", "pbs": "pbs", "lsf": "lsf", "grid_engine": "sge", "flux": "flux"}
ENGINES: Mapping[str, str] = {
    "apptainer": "_apptainer.j2",
    "singularity": "_apptainer.j2",
    "podman-hpc": "_podman_hpc.j2",
}
NO_SIF = "muster:latest"
"""What a registry calls the image, for engines that don't take a SIF."""

_STATUS = {
    "unverified": ": put together of what was found, not tried",
    "documented": ": as the centre describes it, not tried",
    "verified": ": seen to work there",
}


@dataclass(frozen=True)
class Container:
    """How a container is started: the command, None where it has to be found, and further options of it."""

    command: str | None
    options: tuple[str, ...]

    @property
    def template(self) -> str:
        """The file with the lines for such a command."""
        return ENGINES[(self.command or "apptainer").rpartition("/")[2]]

    @property
    def takes_sif(self) -> bool:
        """Whether it starts an image from a file."""
        return self.template == "_apptainer.j2"


@dataclass(frozen=True)
class Folder:
    """A folder as a shell reads it, by the variable that names it or as what is bound, and the variables in it.

    Attributes:
        value: the folder.
        needs: the variables in it.
        name: of the variable that names it.
        is_literal: whether nothing in it is a variable, though it may look like one.
    """

    value: str
    needs: tuple[str, ...]
    name: str = ""
    is_literal: bool = False

    @property
    def bind(self) -> str:
        """Of a bind, the word of a shell for it."""
        return self._quoted(self.value)

    @property
    def source(self) -> str:
        """Of a bind, the word for what is bound: without the place in the container."""
        return self._quoted(self.value.partition(":")[0])

    @property
    def mount(self) -> str:
        """Of a bind, the word as docker and podman want it: with the place in the container."""
        return self._quoted(self.value if ":" in self.value else f"{self.value}:{self.value}")

    def _quoted(self, text: str) -> str:
        return quoting.word(text) if self.is_literal else quoting.expanded(text)


def context(name: str, site: Site, wanted: Wanted, file: str) -> dict[str, Any]:
    """What a template may name.

    Args:
        name: of the profile, or its file.
        site: the profile.
        wanted: the job.
        file: the script's, as its user will type it.

    Raises:
        MusterError: this site does not run such jobs, or not by what the templates know.
    """
    here = Context(wanted.nodes, gpu=site.nodes.gpu.value if site.nodes.gpu else None)

    def of(fact: Fact[T] | None) -> T | None:
        return fact.value if fact is not None and holds(fact.when, here) else None

    command = of(site.container.command)
    if command is not None and command.rpartition("/")[2] not in ENGINES:
        raise MusterError(
            f"{site.title} starts containers by {command}, and scripts know {', '.join(ENGINES)} only",
            seen=f"container.command in the profile {name}",
            fix=f"read {site.documentation}" if site.documentation else "muster job list",
        )
    if wanted.gpus is not None and site.scheduler == "grid_engine":
        raise MusterError(
            "what Grid Engine calls a GPU is each site's own",
            seen=f"--gpus={wanted.gpus}",
            fix="in the profile: [launch] directives, as in -l gpu=4; or to qsub",
        )
    container = Container(command, of(site.container.options) or ())
    module_words = [line.split() for line in of(site.modules) or ()]
    module_words += [["load", module] for module in of(site.container.modules) or ()]
    kept_on = (site.storage.scratch, site.storage.node_local)
    places = [*(of(site.container.binds) or ()), *(place for fact in kept_on if (place := of(fact)))]
    # Containers have /tmp anyway.
    binds = [_folder(value) for value in dict.fromkeys(places) if value != "/tmp"]
    if name.startswith("/"):
        binds.append(_own(name))  # the launch inside reads the profile again
    partition = wanted.partition or of(site.launch.partition)
    gpus = wanted.gpus if wanted.gpus is not None else of(site.nodes.gpus)
    lines = directives.with_gpus(site.scheduler, of(site.launch.directives) or (), wanted.gpus)
    return {
        "name": name,
        "site": site,
        "wanted": wanted,
        "image": NO_SIF if wanted.image == IMAGE and not container.takes_sif else wanted.image,
        "title": f"{site.title}, {site.centre}" if site.centre else site.title,
        "file": file,
        "profile": name if name.startswith("/") else f"jobs/sites/{name}.toml",
        "made_by": made_by(name, wanted),
        "status_note": _STATUS[site.status] if site.centre else "",
        "launches": f"{wanted.nodes} nodes, one container each" if wanted.nodes > 1 else "one node, one container",
        "unknown": unknown(site, partition, gpus),
        "hints": (*_notes(site), *(of(site.storage.hints) or ())),
        "gpus": gpus,
        "cores": of(site.nodes.cores),
        "memory_gib": of(site.nodes.memory_gib),
        "partition": partition,
        "needs_account": of(site.launch.account) or False,
        "directives": lines,
        "gpus_are_asked_for": directives.ask_for_gpus(site.scheduler, lines),
        "flags": of(site.launch.flags) or (),
        "launcher": of(site.launch.launcher),
        "modules": module_words,
        "container": container,
        "binds": binds,
        "caches": [_folder(fact.value, key) for key, fact in site.caches.items() if holds(fact.when, here)],
        "warning_s": walltime.warning(wanted.time_s),
        "max_requeues": MAX_REQUEUES,
    }


def check(name: str, site: Site) -> None:
    """Returns if the image runs at `site`, whose profile is called `name`.

    Raises:
        MusterError: it does not; the error tells why.
    """
    if site.refused is not None:
        raise MusterError(
            f"{site.title} does not run this image: {site.refused.value}",
            seen=f"refused in the profile {name}; {site.sources[site.refused.source].url}",
            fix=f"read {site.documentation}" if site.documentation else "muster job list",
        )


def made_by(name: str, wanted: Wanted) -> str:
    """The command that makes this script."""
    plain = Wanted()
    words: list[object] = ["muster", "job", name]
    for option, value, otherwise in (
        ("--nodes", wanted.nodes, plain.nodes),
        ("--time", walltime.clock(wanted.time_s), walltime.clock(plain.time_s)),
        ("--image", wanted.image, IMAGE),
        ("--account", wanted.account, None),
        ("--partition", wanted.partition, None),
        ("--gpus", wanted.gpus, None),
        ("--name", wanted.name, NAME),
    ):
        words += [option, value] if value != otherwise else []
    words += ["--", *wanted.command] if wanted.command != COMMAND else []
    return quoting.words(words)


def unknown(site: Site, partition: str | None, gpus: int | None) -> list[str]:
    """What the profile does not tell, in words."""
    missing = {
        "GPUs a node": gpus is None,
        "cores a node": site.nodes.cores is None,
        "container's command": site.container.command is None,
        "partition" if site.scheduler == "slurm" else "queue": partition is None,
        "folder for caches": not site.caches,
        "network": site.extends is None,
    }
    return [what for what, is_missing in missing.items() if is_missing]


def _notes(site: Site) -> list[str]:
    """What is to be known of values in the script's head, after the values."""
    named = [(fact.value, fact.note) for fact in (site.launch.partition,) if fact is not None]
    named += [(" ".join(fact.value), fact.note) for fact in (site.launch.directives,) if fact is not None]
    return [f"{value}: {note}." for value, note in named if note]


def _folder(value: str, name: str = "") -> Folder:
    return Folder(value, tuple(quoting.needs(value)), name)


def _own(path: str) -> Folder:
    """The profile's own file, to be bound: its path is no profile's value, and holds what it holds."""
    if ":" in path or "," in path:
        raise MusterError(
            "a container's command takes : and , in a path for the end of it",
            seen=path,
            fix="the profile in a folder, and by a name, without them",
        )
    return Folder(path, (), is_literal=True)
