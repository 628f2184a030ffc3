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
    hosts = heterogeneous_hosts(env) or _job_hosts(env)
    return Hosts(
        scheduler="slurm",
        job_id=str(job_id),
        attempt=attempt,
        hosts=hosts,
        num_nodes=len(hosts),
        gpus_on_node=variables.optional(env, "SLURM_GPUS_ON_NODE", FIX),
        cpus_on_node=variables.optional(env, "SLURM_CPUS_ON_NODE", FIX),
        launch=_launch(env, len(hosts)),
        sources={
            "scheduler": f"SLURM_JOB_ID={job_id}",
            "job_id": f"SLURM_JOB_ID={job_id}",
            "attempt": f"SLURM_RESTART_COUNT={attempt}" if attempt else "no SLURM_RESTART_COUNT: the first run",
            "hosts": _source(env, "SLURM_JOB_NODELIST"),
            "num_nodes": _source(env, "SLURM_JOB_NUM_NODES"),
        },
    )


def _source(env: Mapping[str, str], name: str) -> str:
    if "SLURM_HET_SIZE" not in env:
        return f"{name}={env[name]}"
    return " ".join(f"{key}={env[key]}" for key in sorted(env) if key.startswith(f"{name}_HET_GROUP_"))


def heterogeneous_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The nodes of a heterogeneous job, group by group, as SLURM_NODEID counts them; empty for any other job.

    SLURM_JOB_NODELIST and SLURM_STEP_NODELIST are sorted there, and SLURM_NODEID is no index into them: with group 0 on
    node03 and group 1 on node[01-02] they say node[01-03], but node03 is the first.
    """
    if "SLURM_HET_SIZE" not in env:
        return ()
    num_groups = variables.number(env, "SLURM_HET_SIZE", FIX)
    groups = [variables.hosts(env, f"SLURM_JOB_NODELIST_HET_GROUP_{group}", FIX) for group in range(num_groups)]
    return tuple(dict.fromkeys(host for group in groups for host in group))


def _job_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    hosts = variables.hosts(env, "SLURM_JOB_NODELIST", FIX)
    num_nodes = variables.number(env, "SLURM_JOB_NUM_NODES", FIX)
    if len(hosts) != num_nodes:
        raise MusterError(
            f"Slurm's list of the job's nodes names {len(hosts)}, its count says {num_nodes}",
            seen=f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} SLURM_JOB_NUM_NODES={num_nodes}",
            fix=FIX,
        )
    # Outside a step SLURM_NODELIST is an old name of the same list.
    old_name = env.get("SLURM_NODELIST", env["SLURM_JOB_NODELIST"])
    if "SLURM_STEP_ID" not in env and old_name != env["SLURM_JOB_NODELIST"]:
        raise MusterError(
            "Slurm's two lists of the job's nodes differ",
            seen=f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']} SLURM_NODELIST={old_name}",
            fix=FIX,
        )
    return hosts


def _launch(env: Mapping[str, str], num_nodes: int) -> str:
    if "SLURM_HET_SIZE" in env:
        # Without it srun starts on the first group only.
        groups = f"--het-group=0-{variables.number(env, 'SLURM_HET_SIZE', FIX) - 1}"
        return f"srun {groups} --ntasks-per-node=1 {{command}}"
    # In a job of 4 tasks `--ntasks-per-node=1` alone is ignored with a warning: the count must go with it.
    return f"srun --nodes={num_nodes} --ntasks={num_nodes} --ntasks-per-node=1 {{command}}"
