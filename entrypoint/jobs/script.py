"""Job scripts from a profile and a wanted job, by the template of the profile's scheduler."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from muster.config import IN_ONE_PROCESS, STRATEGIES
from muster.entrypoint import show
from muster.entrypoint.detect import families
from muster.entrypoint.jobs import quoting
from muster.entrypoint.launch.program import without_launcher
from muster.entrypoint.options import JobOptions
from muster.entrypoint.sites.schema import STATUS, Context, Site, resolve, value_of
from muster.errors import MusterError
from muster.paths import JOBS

if TYPE_CHECKING:
    from jinja2 import Environment

COMMAND = ("train", "ddp")
_CLOCK = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_UNITS = re.compile(r"(?:([0-9]{1,3})d)?(?:([0-9]{1,4})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")
# REGISTRY:PORT/NAME:TAG@DIGEST. Source: https://github.com/distribution/reference/blob/main/reference.go
_IMAGE = re.compile(r"([\w.:[\]-]+/)?[a-z0-9][a-z0-9._/-]*(:[\w.-]+)?(@[\w+.-]+:[0-9a-fA-F]{32,})?", re.ASCII)
_MAX_S = 366 * 24 * 3600
_SHARES_A_LINE = re.compile(r"""(?:[^#'"\\]|"[^#'"\\]*")+""")

MAX_REQUEUES = 10
EXTENSIONS: Mapping[str, str] = {"slurm": "sbatch", "pbs": "pbs", "lsf": "lsf", "grid_engine": "sge", "flux": "flux"}
QUEUE_OPTIONS: Mapping[str, tuple[str, str]] = {
    "slurm": ("--account|-A", "--partition|-p"),
    "pbs": ("-A", "-q"),
    "lsf": ("-P", "-q"),
    "grid_engine": ("-P", "-q"),
    "flux": ("--bank|-B", "--queue|-q"),
}
"""The schedulers' own options for `--account` and `--partition`, as regular expressions."""
ENGINES = ("apptainer", "singularity", "podman-hpc")
PASSED_ON = ("CUDA_", "FI_", "GLOO_", "HF_", "MASTER_", "MUSTER_", "NCCL_", "OMP_", "PMI", "SLURM_", "TORCH", "TRITON_")
"""Prefixes of the variables that a container of podman-hpc is given."""
MAX_HEADER_LINES, MAX_COLUMNS = 4, 110
"""The most lines of comments at the top of a script, without those on how to submit it; the most columns of a line."""
REGISTRY_IMAGE = "muster:latest"
"""The image's name in a registry, for engines that don't take a SIF."""


@dataclass(frozen=True, kw_only=True)
class Wanted(JobOptions):
    """A job: its options, and the command.

    Attributes:
        command: the words that run on each node; the arguments given to the job script come after them.
    """

    command: tuple[str, ...] = COMMAND

    @property
    def time_s(self) -> int:
        """The time limit in seconds."""
        return seconds(self.time)

    @property
    def is_training(self) -> bool:
        """Whether the command is a trainer of ours, which takes --name and --resume."""
        return len(self.command) > 1 and self.command[0] == "train" and self.command[1] in STRATEGIES

    @property
    def is_elastic(self) -> bool:
        """Whether the command is to continue without nodes that fail: `--nnodes MIN:MAX`."""
        return re.search(r"(^|\0)--nnodes[=\0]\d+:\d+(\0|$)", "\0".join(self.command)) is not None


def check(site: str, wanted: Wanted) -> None:
    """Checks that the user's options can be written in a script for `site`, and that the command runs as one job.

    Raises:
        MusterError: they can't, or it does not.
    """
    for option, value in (("--account", wanted.account), ("--partition", wanted.partition), ("--name", wanted.name)):
        if value is not None:
            quoting.check_plain(value, option)
    if not wanted.image or not wanted.image.isprintable() or wanted.image.startswith("-"):
        wrong = "--image is one line of printable characters, and does not begin with -"
        raise MusterError(wrong, seen=f"--image={wanted.image}", fix=f"--image {JobOptions.image}")
    if not wanted.command[0] or wanted.command[0].startswith("-"):
        fix = made_by(site, replace(wanted, command=(*COMMAND, *filter(None, wanted.command))))
        raise MusterError("a job's command begins with a program", seen=shlex.join(wanted.command), fix=fix)
    program, *others = wanted.command
    if not others and re.match(r"(train|muster|torchrun|python[0-9.]*)\s", program):
        fix = f"{made_by(site, replace(wanted, command=COMMAND))} -- {program}"
        raise MusterError("a command in quotes is one word, not a program", seen=shlex.join(wanted.command), fix=fix)
    if wanted.nodes > 1 and wanted.is_training and wanted.command[1] in IN_ONE_PROCESS:
        fix = made_by(site, replace(wanted, nodes=1))
        wrong = f"{wanted.command[1]} runs in one process, and this job has {wanted.nodes} nodes"
        raise MusterError(wrong, seen=shlex.join(wanted.command), fix=fix)
    own = without_launcher(wanted.command)
    words = own or list(wanted.command)
    while words and re.fullmatch(r"(.*/)?python[0-9.]*|-u", words[0]):
        words.pop(0)
    if not own and words[:1] != ["-m"] and words and words[0].startswith("-"):
        words = ["--no-python", *wanted.command]  # after an option of python's own, such as -c
    if wanted.nodes > 1 and words and (words != list(wanted.command) or words[0].endswith(".py")):
        fix = made_by(site, replace(wanted, command=("muster", "run", *words)))
        wrong = "without `muster run` each node would run this by itself"
        raise MusterError(wrong, seen=shlex.join(wanted.command), fix=fix)


def seconds(text: str) -> int:
    """The seconds that `text` stands for: 1:30:00, 2-12:00:00 or 1h30m.

    A number alone is minutes to Slurm and seconds to PBS, and 1:30 is minutes to one and hours to another: neither is
    taken.

    Raises:
        MusterError: it is none of these, or no time that a job could have.
    """
    match = _CLOCK.fullmatch(text.strip()) or _UNITS.fullmatch(text.strip())
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not 60 <= total <= _MAX_S:
        wrong = "--time is a time limit with its units, from a minute to 366 days"
        raise MusterError(wrong, seen=f"--time={text}", fix="--time 1:30:00, --time 2-12:00:00 or --time 90m")
    return total


def clock(seconds: int) -> str:
    """HH:MM:SS, with more than 24 hours instead of days: for PBS and Grid Engine, and for Slurm too."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def hours_and_minutes(seconds: int) -> str:
    """H:MM, rounded up: for LSF."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02d}"


def new_templates(finalize: Callable[[Any], Any] | None = None, **filters: Callable[..., Any]) -> "Environment":
    """The jinja2 environment of the job templates, with these filters; `finalize` makes text of each value."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(JOBS / "templates"),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        # A shell's ${#list[@]} would begin a comment.
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return templates


def script(name: str, site: Site, wanted: Wanted, file: str) -> str:
    """The job script for `site`, whose profile is called `name`; its own file is called `file`.

    Raises:
        MusterError: this site does not run such jobs, or a value can't be written where it belongs.
    """
    engine = new_templates(
        word=show.word,
        words=show.words,
        lines=directive_lines,
        comment=quoting.comment,
        clock=clock,
        hours_and_minutes=hours_and_minutes,
        mentions=mentions,
    )
    own = of_family(site.scheduler)
    template = engine.from_string(own) if own else engine.get_template(f"{site.scheduler.replace('_', '-')}.j2")
    return template.render(context(name, site, wanted, file))


def of_registry(image: str, engine: str) -> str:
    """`image`, checked to be a name in a registry: `engine` takes no file.

    Raises:
        MusterError: it is a file, or has a scheme.
    """
    if image.endswith(".sif") or not _IMAGE.fullmatch(image):
        fix = "--image REGISTRY/NAME:TAG, without a scheme, NAME in lower case"
        raise MusterError(f"{engine} takes images from a registry only", seen=f"--image {image}", fix=fix)
    return image


def of_family(scheduler: str) -> str | None:
    """The template in the module that detects a scheduler (JOB_SCRIPT); None where it is in jobs/templates."""
    family = next((each for each in families.FAMILIES if each.name == scheduler and each.is_scheduler), None)
    return None if family is None else getattr(family.module, "JOB_SCRIPT", None)


def context(name: str, site: Site, wanted: Wanted, file: str) -> dict[str, Any]:
    """The variables of a template.

    Args:
        name: the profile's name, or its file.
        site: the profile.
        wanted: the job.
        file: the script's path, as its user will type it.

    Raises:
        MusterError: this site does not run such jobs, or the templates can't express them.
    """
    for option, value in (("--kind", wanted.kind), ("--claim", wanted.claim), ("--device", wanted.device)):
        if value:
            seen = f"{option} {value if isinstance(value, str) else ' '.join(value)}"
            raise MusterError(f"{site.title} takes a script, not a manifest", seen=seen, fix=f"leave {option} out")
    here = Context(wanted.nodes, gpu=site.nodes.gpu.value if site.nodes.gpu else None)
    command = value_of(site.container.command, here)
    known = ENGINES if site.scheduler == "slurm" else ENGINES[:-1]  # podman-hpc hands on Slurm's variables only
    if command is not None and command.rpartition("/")[2] not in known:
        wrong = f"{site.title} starts containers by {command}, and job scripts can use only {', '.join(known)}"
        fix = f"read {site.documentation}" if site.documentation else "muster job list"
        raise MusterError(wrong, seen=f"container.command in the profile {name}", fix=fix)
    directives = [*(value_of(site.launch.directives, here) or ())]
    for asked, options in zip((wanted.account, wanted.partition), QUEUE_OPTIONS.get(site.scheduler, ()), strict=False):
        if asked is not None:  # in the place of the profile's own
            directives = [re.sub(rf"^({options})[ =]*\S+\s*", "", line) for line in directives]
    gpu_line = value_of(site.launch.gpus, here)
    if wanted.gpus and site.scheduler == "grid_engine" and gpu_line is None:
        fix = "in the profile: [launch] gpus, as in -l gpu={gpus}; or ask qsub for the GPUs"
        raise MusterError("each Grid Engine site has its own name for GPUs", seen=f"--gpus={wanted.gpus}", fix=fix)
    module_words = [line.split() for line in value_of(site.modules, here) or ()]
    module_words += [["load", module] for module in value_of(site.container.modules, here) or ()]
    caches = " ".join(resolve(site.caches, here).values())
    partition = wanted.partition or value_of(site.launch.partition, here)
    gpus = wanted.gpus if wanted.gpus is not None else value_of(site.nodes.gpus, here)
    return {
        "about": about(name, site, wanted),
        "prepare": prepare(name, site, module_words),
        "start": start(name, site, wanted, here, gpus),
        "name": name,
        "wanted": wanted,
        "file": file,
        # Some sites choose nodes by QOS or constraint, and have no partition to name.
        "is_placed": partition is not None or mentions(directives, "--qos", "--constraint"),
        "gpus": gpus,
        "cores": value_of(site.nodes.cores, here),
        "memory_gib": value_of(site.nodes.memory_gib, here),
        "partition": partition,
        "needs_account": value_of(site.launch.account, here) or False,
        "gpu_line": gpu_line.replace("{gpus}", str(gpus)) if gpu_line and gpus else None,
        "directives": directives,
        "flags": "".join(f" {show.word(flag)}" for flag in value_of(site.launch.flags, here) or ()),
        "launcher": value_of(site.launch.launcher, here),
        "modules": module_words,
        "cache_variables": "".join(f"{variable}$|" for variable in quoting.variables_in(caches)),
        # How long before its limit a job is warned.
        "warning_s": min(300, wanted.time_s // 10),
        # The last attempt of a training ends with a code other than 75 anyway, by `code_for_job`.
        "unless_last": "" if wanted.is_training else ' && [ "${MUSTER_ATTEMPT:-0}" -lt "$MUSTER_MAX_REQUEUES" ]',
    }


def about(name: str, site: Site, wanted: Wanted) -> str:
    """The first lines of a script, as comments: what it runs, where, and notes on the site."""
    title = f"{site.title}, {site.centre}" if site.centre else site.title
    each = f"{wanted.nodes} nodes, one container each" if wanted.nodes > 1 else "one node, one container"
    status = f" ({site.status}: {STATUS[site.status]})" if site.centre else ""
    lines = [quoting.comment(f"{' '.join(wanted.command)} on {title}: {each}.")]
    lines.append(quoting.comment(f"Made by: {made_by(name, wanted)}{status}"))
    for index, hint in enumerate([*_notes(site), *(site.storage.hints.value if site.storage.hints else ())]):
        wrapped = quoting.wrapped(hint)
        if index and len(lines) + len(wrapped) > MAX_HEADER_LINES:
            break
        lines += wrapped
    if site.centre:
        read = f", {site.documentation}" if site.documentation else ""
        lines.append(quoting.comment(f"More: muster site {show.word(name)}{read}"))
    return "\n".join(f"# {line}" for line in lines)


def prepare(name: str, site: Site, modules: Iterable[Iterable[str]]) -> str:
    """The lines of bash before the launch: modules, and the variables that the launch in the container reads."""
    # A line's last ; is taken off: none is needed there.
    lines = [line.rstrip(";") for line in _filled(f"module {show.words(words)};" for words in modules)]
    words = [f'MUSTER_MAX_REQUEUES="${{MUSTER_MAX_REQUEUES:-{MAX_REQUEUES}}}"']
    if site.centre or name.startswith("/"):
        words.append(f'MUSTER_SITE="${{MUSTER_SITE:-{quoting.fallback(name)}}}"')
    return "\n".join([*lines, f"export {' '.join(words)}"])


def directive_lines(options: Iterable[str | None]) -> list[str]:
    """A scheduler's `options` without empty ones, filled into lines of MAX_COLUMNS.

    One with a single quote, an unpaired double quote, a # or a backslash gets a line of its own, after the others: a
    scheduler may take what follows for part of it.
    """
    given = [quoting.directive(option) for option in options if option]
    shared = [option for option in given if _SHARES_A_LINE.fullmatch(option)]
    return [*_filled(shared), *(option for option in given if option not in shared)]


def _filled(words: Iterable[str]) -> list[str]:
    """`words` with blanks between them, filled into lines of MAX_COLUMNS; a longer word has its own line."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < MAX_COLUMNS:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def start(name: str, site: Site, wanted: Wanted, here: Context, gpus: int | None) -> str:
    """The words of bash that start a container on a node, on as many lines as they need, the image on the last one.

    With the host's root at /host, `train` and `muster run` find the host's network libraries by themselves.
    """
    command = value_of(site.container.command, here) or "apptainer"
    options = [show.word(option) for option in value_of(site.container.options, here) or ()]
    places = [*(value_of(site.container.binds, here) or ()), value_of(site.storage.scratch, here)]
    places.append(value_of(site.storage.node_local, here))
    # Containers have /tmp anyway.
    folders = [place for place in dict.fromkeys(places) if place and place != "/tmp"]
    own = name if name.startswith("/") else None  # a profile that the launch inside reads again
    if own and re.search("[,:]", own):
        wrong = "a container can't be given a file whose path has a comma or a colon"
        raise MusterError(wrong, seen=own, fix="another name for the profile, or for its folder")
    if command.endswith("podman-hpc"):
        image = wanted.image.removeprefix("docker://")
        image = REGISTRY_IMAGE if image == Wanted.image else of_registry(image, ENGINES[-1])
        # The site's own options bring the network's libraries. A container sees only the variables that it is given.
        words = [command, "run", "--rm", "--network=host", "--ipc=host", '--volume "$PWD:$PWD"', '--workdir "$PWD"']
        words += [*options, '--env "MUSTER_FABRIC=${MUSTER_FABRIC:-off}"']
        needed = quoting.variables_in(" ".join((*folders, *resolve(site.caches, here).values())))
        words += [f"--env {show.word(each)}" for each in (*(f"{prefix}*" for prefix in PASSED_ON), *sorted(needed))]
        outside_and_inside = {folder: folder if ":" in folder else f"{folder}:{folder}" for folder in folders}
        words += [_if_set(each, "--volume", quoting.expanded(both)) for each, both in outside_and_inside.items()]
        words += [f"--volume {show.word(f'{own}:{own}:ro')}"] if own else []
    else:
        image = wanted.image
        words = [show.word(command), "exec", *(["--nv"] if gpus != 0 else []), "--bind /:/host:ro", *options]
        words += [_if_set(folder, "--bind", quoting.expanded(folder)) for folder in folders]
        if site.scheduler == "lsf":  # the lists of hosts that LSF itself has written
            words += [_if_set(each, "--bind", f'"{each}"') for each in ("$LSB_DJOB_RANKFILE", "$LSB_DJOB_HOSTFILE")]
        words += [f"--bind {show.word(own)}"] if own else []
    return " \\\n  ".join([*_filled(words), f'"${{MUSTER_IMAGE:-{quoting.fallback(image)}}}"'])


def _if_set(folder: str, option: str, word: str) -> str:
    """Bash for the option with `word`; it expands to nothing where a variable in `folder` is unset or empty."""
    text = f"{option} {word}"
    for variable in quoting.variables_in(folder):
        text = f"${{{variable}:+{text}}}"
    return text


def made_by(name: str, wanted: Wanted) -> str:
    """The command that makes this script."""
    words: list[object] = ["muster", "job", name]
    for field in fields(JobOptions):
        if (value := getattr(wanted, field.name)) != field.default:
            for each in cast("list[object]", value if isinstance(value, list) else [value]):
                words += [f"--{field.name}", each]
    words += ["--", *wanted.command] if wanted.command != COMMAND else []
    return show.words(words)


def _notes(site: Site) -> list[str]:
    """The profile's notes on the values in the head of the script, each after its value."""
    partition, directives = site.launch.partition, site.launch.directives
    named = [(partition.value, partition.note)] if partition else []
    named += [(" ".join(directives.value), directives.note)] if directives else []
    return [f"{value}: {note}." for value, note in named if note]


def mentions(directives: Iterable[str], *options: str) -> bool:
    """Whether one of `directives` has one of `options`, with a value or without."""
    return any(re.match(rf"{re.escape(option)}(?![\w-])", line) for line in directives for option in options)
