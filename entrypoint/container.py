"""The options of a container engine that pass a job's variables, and the files that they name, into a container.

Docker and podman take a value from their own environment where only the name is given. Apptainer needs values.
"""

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from muster.entrypoint import recording
from muster.entrypoint.detect import families
from muster.entrypoint.detect.allocation import NO_SCHEDULER, Job
from muster.entrypoint.environment import NAME, Environment
from muster.errors import MusterError

# Variables of users and of our own job scripts, beside those of the families. TMPDIR is not among them: it names a
# folder of the host (see _present).
_USERS = (
    "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "MUSTER_ADDRESS_SUFFIX", "MUSTER_INTERFACE", "TORCHELASTIC_RUN_ID", "MUSTER_ATTEMPT", "MUSTER_GRACE_S",
    "MUSTER_JOB_END_TIME", "MUSTER_JOB_START_TIME", "MUSTER_RANK_VARIABLES",
)  # fmt: skip
# Prefixes of further variables to pass: the user's program may read them, or they are settings for communication.
_PREFIXES = ("MUSTER_", "NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "MASTER_", "TORCHELASTIC_")
# Variables that do not show by themselves that an environment is that of a job.
_NO_JOB = re.compile(r"(MUSTER|NCCL|TORCH_NCCL|GLOO|OMP|MASTER)_\w+|CUDA_VISIBLE_DEVICES|KUBERNETES_SERVICE_HOST|PE")

# A path of these characters alone is one word for a shell without quotes. Slurm writes its nodes with brackets.
_PLAIN_PATH = re.compile(r"[\w@%+=./\[\]-]+", re.ASCII)


class ContainerOptions(NamedTuple):
    """A container engine's options, written for a shell, and notes for the user."""

    words: tuple[str, ...]
    notes: tuple[str, ...]


def names() -> frozenset[str]:
    """The names of all variables that detection or our trainers read."""
    return frozenset(families.names("VARIABLES")).union(_USERS)


def docker(env: Environment) -> ContainerOptions:
    """The options by which docker or podman passes the job in `env`: names without values, files, the host's network.

    The variables that a launcher sets for its tasks are not set yet in a job script with `srun docker run $(...)`: so
    all names that tasks may have are included, and docker leaves out those that are not set.

    Raises:
        MusterError: a file has a name that can't be passed.
    """
    job, _ = _found(env)
    present, notes = _present(env)
    is_job = not all(map(_NO_JOB.fullmatch, present))
    left_out = {name for name in env if name not in present}
    words = [word for name in sorted(names().union(present) - left_out) for word in ("--env", name)]
    for path in _files(env):
        if not _PLAIN_PATH.fullmatch(path):
            raise _unusable("docker's --volume takes no colons, and a line of options no blanks or quotes", path)
        words += ["--volume", f"{path}:{path}:ro"]
    # The job's host lists have this host's own name, which the container gets with the host's network.
    words += ["--network" if job.num_nodes != 1 else "--uts", "host"]
    if not is_job:
        notes.append("no variables of a job are here: the names of all that it may set are passed, no files")
    return ContainerOptions(tuple(words), tuple(notes))


def apptainer(env: Environment) -> ContainerOptions:
    """The options by which Apptainer passes the job in `env`, with --cleanenv or --containall too: values, and files.

    They are quoted for `eval`.

    Raises:
        MusterError: a file has a name that can't be passed.
    """
    present, notes = _present(env)
    # Inside the container a shell evaluates the value again, unless --no-eval is given: no way of quoting is right for
    # both.
    evaluated = [name for name in present if re.search(r"[$`\\]", env[name]) or not env[name].isprintable()]
    words = [word for name in present if name not in evaluated for word in ("--env", assignment(name, env[name]))]
    for path in _files(env):
        if re.search("[:,]", path) or not path.isprintable():
            raise _unusable("apptainer's --bind takes no colons, commas and control characters", path)
        words += ["--bind", path]
    if evaluated:
        notes.append(f"left out, as Apptainer's shell evaluates their values: {', '.join(evaluated)}")
    if all(map(_NO_JOB.fullmatch, present)):
        notes.append("no variables of a job are here")
    elif not _found(env)[1]:
        notes.append("these are this process's values: a process that a launcher starts later has to run this itself")
    return ContainerOptions(tuple(map(shlex.quote, words)), tuple(notes))


def assignment(name: str, value: str) -> str:
    """NAME=VALUE, written so that Apptainer reads just this; not quoted for a shell.

    Apptainer removes double quotes at both ends; text with more than one equals sign it reads as a line of CSV.

    Source: https://github.com/spf13/pflag/blob/master/string_to_string.go
    """
    pair = f"{name}={value}"
    is_csv = "=" in value and bool(re.search(r'[,"]', value))
    if not is_csv and not value.endswith('"'):
        return pair
    field = '"' + pair.replace('"', '""') + '"'
    # The repetition changes nothing, but makes the text a line of CSV: otherwise the quotes would be lost.
    return field if is_csv else f"{field},{field}"


def _found(env: Environment) -> tuple[Job, bool]:
    """The job, as far as it is known; and whether a launcher started this process."""
    job, is_task = NO_SCHEDULER, False
    with suppress(MusterError):
        job = families.find_job(env)[0]
    with suppress(MusterError):
        is_task = families.find_task(env, job)[0] is not None
    return job, is_task


def _present(env: Environment) -> tuple[list[str], list[str]]:
    """The variables of the job, and of its user, without those that may be secret; and a note on how many these are."""
    known, prefixes = names(), (*families.names("PREFIXES"), *_PREFIXES)
    # Other names than a shell's have no place on a line of options: a blank in one would make two words of it.
    wanted = sorted(name for name in env if NAME.fullmatch(name) and (name in known or name.startswith(prefixes)))
    # Flux keeps its sockets there, by which detection sees inside of which job Flux runs.
    if "TMPDIR" in env and env.get("FLUX_URI", "").startswith(f"local://{env['TMPDIR']}"):
        wanted.append("TMPDIR")
    present = [name for name in wanted if not recording.is_secret(name, env[name])]
    num_secret = len(wanted) - len(present)
    return present, [f"left out: {num_secret} that may be secret"] if num_secret else []


def _files(env: Environment) -> list[str]:
    """The existing files that variables name, each once."""
    names = [name for name in families.names("TEXT_FILES", "BINARY_FILES") if env.get(name)]
    there = [name for name in names if (os.path.isfile(env[name]) if env.is_live else name in env.files)]
    return list(dict.fromkeys(str(Path(env[name]).absolute()) for name in there))


def _unusable(why: str, path: str) -> MusterError:
    return MusterError(
        f"a file that the container needs can't be passed: {why}",
        seen=path,
        fix="in the job script: copy it to a file with a plain name, and set the variable to that",
    )
