"""LSF: the job's id and nodes.

    LSB_MCPU_HOSTS="host1 4 host2 4"       hosts and slots in turns; always complete
    LSB_HOSTS="host1 host1 host2 ..."      a name for each slot; left out by LSF where it gets too long
    LSB_DJOB_RANKFILE=/path                a name a line, in the order of ranks

Where jobs are started by jsrun, the first of them is the node that runs the job script, and no node of the computation.

Source: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
"""

from collections import Counter

from entrypoint import hostlist, variables
from entrypoint.allocation import Hosts
from entrypoint.environment import Environment
from train.errors import MusterError

FIX = "start from a fresh job: `bsub < SCRIPT`, without setting LSB_ variables by hand"
FIX_HOSTS = "in the job script: export MUSTER_HOSTS=$(awk '!seen[$1]++ {print $1}' \"$LSB_DJOB_RANKFILE\" | paste -sd,)"


def detect(env: Environment) -> Hosts | None:
    """The LSF job in `env`, or None where there is none.

    Raises:
        MusterError: its variables can't be right.
    """
    if not any(name in env for name in ("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_DJOB_RANKFILE")):
        return None
    job_id = str(variables.number(env, "LSB_JOBID", FIX))
    index = variables.optional(env, "LSB_JOBINDEX", FIX)
    # LSF only says that it is not the first time; our script counts, so that no attempt reads keys of another.
    counted = variables.optional(env, "MUSTER_ATTEMPT", FIX)
    slots: dict[str, int] = {}
    problem, source = None, "no list of hosts"
    try:
        slots, source = _slots(env)
    except MusterError as reason:
        problem = reason
    return Hosts(
        scheduler="lsf",
        job_id=f"{job_id}[{index}]" if index else job_id,
        attempt=counted or int(env.get("LSB_RESTART") == "Y"),
        hosts=tuple(slots),
        num_nodes=len(slots) or None,
        launch=_launch(slots),
        slots=tuple(slots.values()),
        problem=problem,
        sources={
            "scheduler": f"LSB_JOBID={job_id}",
            "job_id": variables.seen(env, "LSB_JOBID", "LSB_JOBINDEX"),
            "attempt": variables.seen(env, "MUSTER_ATTEMPT" if counted else "LSB_RESTART")
            or "no LSB_RESTART: the first run",
            "hosts": source,
            "num_nodes": f"{len(slots)} hosts in {source}",
        },
    )


def _slots(env: Environment) -> tuple[dict[str, int], str]:
    """The hosts with the number of slots on each, and the variable that says so."""
    by_slot = env.get("LSB_HOSTS", "").split()
    if env.get("LSB_MCPU_HOSTS"):
        words = env["LSB_MCPU_HOSTS"].split()
        slots: Counter[str] = Counter()
        for host, count in zip(words[::2], words[1::2], strict=False):
            if not (hostlist.is_name(host) and count.isascii() and count.isdigit() and int(count) < 10**6):
                raise _unreadable(env, "LSB_MCPU_HOSTS")
            slots[host] += int(count)
        if len(words) % 2:
            raise _unreadable(env, "LSB_MCPU_HOSTS")
        if by_slot and set(by_slot) != set(slots):
            seen = variables.seen(env, "LSB_MCPU_HOSTS", "LSB_HOSTS")
            raise MusterError("LSF's two lists of the job's nodes differ", seen=seen, fix=FIX)
        return dict(slots), f"LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS'][:200]}"
    if by_slot:
        if not all(map(hostlist.is_name, by_slot)):
            raise _unreadable(env, "LSB_HOSTS")
        return dict(Counter(by_slot)), f"LSB_HOSTS={env['LSB_HOSTS'][:200]}"
    if env.get("LSB_DJOB_RANKFILE"):
        lines = variables.text_file(env, "LSB_DJOB_RANKFILE", FIX_HOSTS).split()
        if not lines or not all(map(hostlist.is_name, lines)):
            raise _unreadable(env, "LSB_DJOB_RANKFILE")
        return dict(Counter(lines)), f"LSB_DJOB_RANKFILE={env['LSB_DJOB_RANKFILE']}"
    raise MusterError("LSF's list of the job's nodes is missing", seen=variables.seen(env, "LSB_JOBID"), fix=FIX)


def _unreadable(env: Environment, name: str) -> MusterError:
    return MusterError(f"{name} is no list of hosts", seen=f"{name}={env[name][:200]}", fix=FIX)


def has_launch_node(slots: tuple[int, ...]) -> bool:
    """Whether the first host looks like the node that only runs the job script: one slot, and all others have more."""
    return len(slots) > 1 and slots[0] == 1 and min(slots[1:]) > 1


def _launch(slots: dict[str, int]) -> str:
    counts = tuple(slots.values())
    if has_launch_node(counts):
        sets = f"--nrs={len(slots) - 1} --rs_per_host=1 --tasks_per_rs=1 --cpu_per_rs=ALL_CPUS --gpu_per_rs=ALL_GPUS"
        return f"jsrun {sets} {{command}}"
    if not slots or max(counts) == 1:
        return "blaunch {command}"
    # Without -z blaunch starts a task for each slot. Its tasks are counted from 1.
    hosts = " ".join(slots)
    return f"blaunch -z '{hosts}' bash -c 'MUSTER_NODE_RANK=$((LSF_PM_TASKID - 1)) exec \"$@\"' bash {{command}}"
