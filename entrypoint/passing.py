"""What to pass into a container so that a job's variables, and the files that they name, are there: as its options.

Docker and podman take a value from their own environment where only the name is given. Apptainer wants values.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.entrypoint import environment
from muster.entrypoint.allocation import Hosts
from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.errors import MusterError

# A heterogeneous job of Slurm has lists for each of its groups.
_MAX_HET_GROUPS = 16

# All that detection reads and that our trainers are told: of users, of launchers, of each scheduler. TMPDIR is not
# among them: it names a folder of the host (see _present).
NAMES = {
    "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "MUSTER_ADDRESS_SUFFIX", "MUSTER_HOSTS", "MUSTER_INTERFACE", "MUSTER_NODE_RANK", "TORCHELASTIC_RUN_ID",
    "MUSTER_ATTEMPT", "MUSTER_GRACE_S", "MUSTER_JOB_END_TIME", "MUSTER_JOB_START_TIME",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_orte_ess_num_procs", "OMPI_MCA_orte_num_nodes",
    "PMIX_DSTORE_21_BASE_PATH", "PMIX_HOSTNAME", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_LOCAL_SIZE", "PMI_RANK",
    "PMI_SIZE", "MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
    "PALS_APID", "PALS_APINFO", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID", "PALS_RANKID",
    "PALS_SPOOL_DIR",
    "SLURM_CPUS_ON_NODE", "SLURM_DISTRIBUTION", "SLURM_GPUS_ON_NODE", "SLURM_GTIDS", "SLURM_HET_SIZE",
    "SLURM_JOBID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_LOCALID",
    "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME", "SLURM_NODEID", "SLURM_NODELIST", "SLURM_PROCID",
    "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURMD_NODENAME",
    "NCPUS", "PBS_ENVIRONMENT", "PBS_JOBID", "PBS_NODEFILE", "PBS_NODENUM", "PBS_TASKNUM",
    "LSB_DJOB_HOSTFILE", "LSB_DJOB_RANKFILE", "LSB_HOSTS", "LSB_JOBID", "LSB_JOBINDEX", "LSB_MCPU_HOSTS",
    "LSB_RESTART", "LSF_PM_TASKID", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
    "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE",
    "JOB_ID", "JOB_SCRIPT", "NHOSTS", "NSLOTS", "PE", "PE_HOSTFILE", "RESTARTED", "SGE_HGR_gpu",
    "SGE_JOB_SPOOL_DIR", "SGE_TASK_ID",
    "FLUX_JOB_ID", "FLUX_JOB_NNODES", "FLUX_JOB_SIZE", "FLUX_JOB_TMPDIR", "FLUX_TASK_LOCAL_ID",
    "FLUX_TASK_RANK", "FLUX_URI",
    "JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NNODES",
    "PET_NODE_RANK", "PET_NPROC_PER_NODE", "VC_MASTER_HOSTS", "VC_TASK_INDEX", "VC_WORKER_HOSTS",
    "VK_TASK_INDEX",
    *(
        f"SLURM_JOB_{what}_{kind}_GROUP_{group}"
        for what in ("NODELIST", "NUM_NODES")
        for kind in ("HET", "PACK")
        for group in range(_MAX_HET_GROUPS)
    ),
}  # fmt: skip

# What else of a job goes along: the user's program may read it, and settings for communication are the user's.
_FAMILIES = re.compile(
    r"(SLURM|PBS|PMIX?|PALS|OMPI|PRTE|HYDRA|HYDI|I_MPI|MV2|MPIR|LSB|LSF_PM|JSM|SGE|FLUX|VC|VK|PET|TORCHELASTIC"
    r"|MUSTER|NCCL|TORCH_NCCL|GLOO|OMP|MASTER)_\w+",
    re.ASCII,
)
# None of these alone makes an environment that of a job.
_USERS = re.compile(r"(MUSTER|NCCL|TORCH_NCCL|GLOO|OMP|MASTER)_\w+|CUDA_VISIBLE_DEVICES|KUBERNETES_SERVICE_HOST|PE")

# A word of these is one word to a shell, wherever it stands: between brackets too, as the nodes of Slurm are written.
_PLAIN_PATH = re.compile(r"[\w@%+=./\[\]-]+", re.ASCII)


class Passing(NamedTuple):
    """A container engine's options, as a shell has to be given them, and a line for each thing to be known of them."""

    words: tuple[str, ...]
    notes: tuple[str, ...]


def docker(env: Environment) -> Passing:
    """The options by which docker or podman passes the job in `env`: names without values, files, the host's network.

    What a launcher sets for its tasks may not be there yet, in a job script that says `srun docker run $(...)`: all
    names that tasks may have are among them, and docker leaves out those that are not set.

    Raises:
        MusterError: a file has a name that can't be passed.
    """
    job = _job(env)
    present, num_secret = _present(env)
    is_job = any(not _USERS.fullmatch(name) for name in present)
    left_out = {name for name in env if name not in present}
    words = [word for name in sorted({*present, *NAMES} - left_out) for word in ("--env", name)]
    for path in _files(env):
        if not _PLAIN_PATH.fullmatch(path):
            raise _unusable("docker's --volume takes no colons, and a line of options no blanks or quotes", path)
        words += ["--volume", f"{path}:{path}:ro"]
    # The job's lists know this host by its own name, which comes with its network.
    words += ["--network" if job is None or job.num_nodes != 1 else "--uts", "host"]
    notes = _secrets(num_secret)
    if not is_job:
        notes.append("no variables of a job are here: the names of all that could be; files and nodes are not known")
    return Passing(tuple(words), tuple(notes))


def apptainer(env: Environment) -> Passing:
    """The options by which Apptainer passes the job in `env`, with --cleanenv or --containall too: values, and files.

    They are quoted for `eval`.

    Raises:
        MusterError: a file has a name that can't be passed.
    """
    present, num_secret = _present(env)
    # Inside the container a shell reads the value again, unless --no-eval is given: there is no writing that would be
    # right for both.
    evaluated = [name for name in present if re.search(r"[$`\\]", env[name]) or not env[name].isprintable()]
    words = [word for name in present if name not in evaluated for word in ("--env", assignment(name, env[name]))]
    for path in _files(env):
        if re.search(r"[:,\n]", path):
            raise _unusable("apptainer's --bind takes no colons and commas", path)
        words += ["--bind", path]
    notes = _secrets(num_secret)
    if evaluated:
        notes.append(f"left out, as Apptainer has a shell read what is in them: {', '.join(evaluated)}")
    if not any(not _USERS.fullmatch(name) for name in present):
        notes.append("no variables of a job are here")
    elif not _is_task(env):
        notes.append("these values are this process's: what a launcher is yet to start has to ask for its own")
    return Passing(tuple(map(shlex.quote, words)), tuple(notes))


def assignment(name: str, value: str) -> str:
    """NAME=VALUE as a word that Apptainer reads as that, not quoted for a shell.

    It takes off double quotes at both ends; where there is more than one equals sign, it reads a line of CSV.

    Source: https://github.com/spf13/pflag/blob/master/string_to_string.go
    """
    pair = f"{name}={value}"
    is_csv = "=" in value and bool(re.search(r'[,"]', value))
    if not is_csv and not value.endswith('"'):
        return pair
    field = '"' + pair.replace('"', '""') + '"'
    # The second one changes nothing, but makes it a line of CSV where the quotes would be lost otherwise.
    return field if is_csv else f"{field},{field}"


def _job(env: Environment) -> Hosts | None:
    """The job, or None where none is known."""
    try:
        return resolve.find_job(env)[0]
    except MusterError:
        return None


def _is_task(env: Environment) -> bool:
    """Whether a launcher started this process."""
    try:
        return resolve.find_task(env, _job(env))[0] is not None
    except MusterError:
        return False


def _present(env: Environment) -> tuple[list[str], int]:
    """The variables of the job, and of its user, without those that may be secret; and how many of these there are."""
    wanted = sorted(name for name in env if name in NAMES or _FAMILIES.fullmatch(name))
    # Flux keeps its sockets there, and by that is told from a job that it runs inside of.
    if "TMPDIR" in env and env.get("FLUX_URI", "").startswith(f"local://{env['TMPDIR']}"):
        wanted.append("TMPDIR")
    present = [name for name in wanted if not environment.is_secret(name, env[name])]
    return present, len(wanted) - len(present)


def _files(env: Environment) -> Iterator[str]:
    """The files that variables name, as far as they exist."""
    paths: dict[str, None] = {}
    for name in (*environment.TEXT_FILES, *environment.BINARY_FILES):
        path = env.get(name)
        if path and (Path(path).is_file() if env.is_live else name in env.files):
            paths[str(Path(path).absolute())] = None
    yield from paths


def _secrets(count: int) -> list[str]:
    return [f"left out: {count} that may be secret"] if count else []


def _unusable(why: str, path: str) -> MusterError:
    return MusterError(
        f"a file that the container needs can't be passed: {why}",
        seen=path,
        fix="in the job script: copy it to a file with a plain name, and set the variable to that",
    )
