"""Slurm: the job's id, attempt and nodes.

sbatch, salloc and srun all set SLURM_JOB_ID and the node list. Which task of the job this process is, and whether it is
one at all, is the launcher's matter (launchers/srun.py).

Source: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from collections.abc import Mapping

from entrypoint import variables
from entrypoint.allocation import Hosts
from train.errors import MusterError

FIX = "start from a fresh job: `sbatch SCRIPT`, in it `srun ... train ddp`, without setting SLURM_ variables by hand"


def detect(env: Mapping[str, str]) -> Hosts | None:
    """The Slurm job in `env`, or None where there is none.

    Raises:
        MusterError: its node list can't be read, or disagrees with its number of nodes.
    """
    # Any one of them is enough: a job with one variable lost must not pass for a machine without a scheduler.
    if not {"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST"} & set(env):
        return None
    job_id = variables.number(env, "SLURM_JOB_ID", FIX)
    # SLURM_RESTART_COUNT is unset on the first run.
    attempt = variables.number(env, "SLURM_RESTART_COUNT", FIX) if "SLURM_RESTART_COUNT" in env else 0
    hosts = variables.hosts(env, "SLURM_JOB_NODELIST", FIX)
    num_nodes = variables.number(env, "SLURM_JOB_NUM_NODES", FIX)
    # Outside a step SLURM_NODELIST is an old name of the same list.
    if "SLURM_STEP_ID" not in env and env.get("SLURM_NODELIST", env["SLURM_JOB_NODELIST"]) != env["SLURM_JOB_NODELIST"]:
        raise MusterError(
            "Slurm's two lists of the job's nodes differ",
            seen=f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} SLURM_NODELIST={env['SLURM_NODELIST']}",
            fix=FIX,
        )
    if len(hosts) != num_nodes:
        raise MusterError(
            f"Slurm's list of the job's nodes names {len(hosts)}, its count says {num_nodes}",
            seen=f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} SLURM_JOB_NUM_NODES={num_nodes}",
            fix=FIX,
        )
    sources = {name: f"{name}={env[name]}" for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT") if name in env}
    return Hosts(
        scheduler="slurm",
        job_id=str(job_id),
        attempt=attempt,
        hosts=hosts,
        num_nodes=num_nodes,
        gpus_on_node=_optional(env, "SLURM_GPUS_ON_NODE"),
        cpus_on_node=_optional(env, "SLURM_CPUS_ON_NODE"),
        # In a job of 4 tasks `--ntasks-per-node=1` alone is ignored with a warning: the count must go with it.
        launch=("srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"),
        sources={
            "scheduler": f"SLURM_JOB_ID={job_id}",
            "job_id": f"SLURM_JOB_ID={job_id}",
            "attempt": sources.get("SLURM_RESTART_COUNT", "no SLURM_RESTART_COUNT: the first run"),
            "hosts": f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']}",
            "num_nodes": f"SLURM_JOB_NUM_NODES={num_nodes}",
        },
    )


def _optional(env: Mapping[str, str], name: str) -> int | None:
    return variables.number(env, name, FIX) if name in env else None
