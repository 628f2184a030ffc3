"""PBS Professional and OpenPBS: the job's id and nodes; and on which of the nodes a task of pbsdsh is.

The nodes are in a file, one line for each MPI process.

    PBS_JOBID=7.pbshead                            an array's job: 2[1].pbshead
    PBS_NODEFILE=/var/spool/pbs/aux/7.pbshead      pbsn1 pbsn1 pbsn2 pbsn2, a line each

The file is not sorted: hosts may come in turns, and several chunks may lie on one host. PBS_NODENUM is no index.

    PBS_TASKNUM=20000001       a task; the job script itself has 1. It is no rank

pbsdsh starts a task for each line of PBS_NODEFILE, pbs_tmrsh one on the host that it is given. The job's first node
lacks PBS_NODEFILE in such a task.

Source: https://help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf (PBS_NODEFILE, PBS_ENVIRONMENT)
Source: https://github.com/openpbs/openpbs/blob/master/src/cmds/pbsdsh.c
"""

import re
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

from muster.entrypoint import hostlist, variables
from muster.entrypoint.allocation import Hosts, Rejected, Task
from muster.entrypoint.detect import placing
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from muster.units import whole_number

FIX_JOB = "start from a fresh job: `qsub SCRIPT`, without -V and without setting PBS_ variables by hand"
FIX_HOSTS = "in the job script: export MUSTER_HOSTS=$(awk '!seen[$1]++ {print $1}' \"$PBS_NODEFILE\" | paste -sd,)"


def job(env: Environment) -> Hosts | None:
    """The PBS job in `env`, or None where there is none.

    Raises:
        MusterError: its variables, or the file of its nodes, can't be right.
    """
    if not any(name in env for name in ("PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE")):
        return None
    job_id = env.get("PBS_JOBID", "")
    if not re.fullmatch(r"[0-9]+(\[[0-9]*\])?(\.[A-Za-z0-9_.-]+)?", job_id):
        raise MusterError("PBS_JOBID is missing or no job id", seen=f"PBS_JOBID={job_id}", fix=FIX_JOB)
    if env.get("PBS_ENVIRONMENT") not in ("PBS_BATCH", "PBS_INTERACTIVE"):
        seen = variables.seen(env, "PBS_ENVIRONMENT", "PBS_JOBID")
        raise MusterError("PBS_ENVIRONMENT is neither PBS_BATCH nor PBS_INTERACTIVE", seen=seen, fix=FIX_JOB)
    slots: dict[str, int] = {}
    problem = None
    try:
        slots = _node_file(env)
    except MusterError as reason:
        problem = reason
    nodes = variables.seen(env, "PBS_NODEFILE") or f"PBS's own file of job {job_id}"
    nodes = nodes if slots else "no PBS_NODEFILE that can be read"
    return Hosts(
        scheduler="pbs",
        job_id=job_id,
        attempt=0,
        hosts=tuple(slots),
        num_nodes=len(slots) or None,
        cpus_on_node=variables.optional(env, "NCPUS", FIX_JOB),
        launch=_launch(env, len(slots) or "NODES"),
        slots=tuple(slots.values()),
        problem=problem,
        sources={
            "scheduler": f"PBS_JOBID={job_id}",
            "job_id": f"PBS_JOBID={job_id}",
            "attempt": "PBS does not count restarts",
            "hosts": nodes,
            "num_nodes": f"{len(slots)} hosts in {nodes}" if slots else nodes,
        },
    )


def _launch(env: Environment, num_nodes: int | str) -> str:
    """The line that starts `{command}` on each node, in the words of the mpiexec that is here."""
    path = shutil.which("mpiexec", path=env.get("PATH")) if env.is_live else None
    # Debian's /usr/bin/mpiexec leads by /etc/alternatives to orterun; Open MPI 5 calls it prterun.
    if path is None or not re.search("openmpi|orterun|prterun", str(Path(path).resolve())):
        return f"mpiexec -n {num_nodes} -ppn 1 {{command}}"
    # To another node it takes those variables only that it is told.
    carried = " ".join(f"-x {name}" for name in ("PATH", "PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE"))
    return f"mpiexec -n {num_nodes} --hostfile $PBS_NODEFILE --map-by ppr:1:node {carried} {{command}}"


def _node_file(env: Environment) -> dict[str, int]:
    """The hosts in the order in which the file names them first, and how often it names each."""
    if env.get("PBS_NODEFILE"):
        text = variables.text_file(env, "PBS_NODEFILE", FIX_HOSTS)
    elif env.is_live and is_task(env) and (own := _own_node_file(env)):
        text = own
    else:
        raise MusterError(
            "PBS_NODEFILE is not set, so the job's nodes are not known", seen="no PBS_NODEFILE", fix=FIX_HOSTS
        )
    lines = [line.strip() for line in text.splitlines()]
    names = [line for line in lines if line]
    wrong = [name for name in names if not hostlist.is_name(name)]
    if wrong or not names:
        raise MusterError(
            f"PBS's list of nodes holds {wrong[0]!r}, which is no host name"
            if wrong
            else "PBS's list of nodes is empty",
            seen=variables.seen(env, "PBS_NODEFILE", "PBS_JOBID"),
            fix=FIX_JOB,
        )
    return dict(Counter(names))


def _own_node_file(env: Environment) -> str | None:
    """The content of the job's file of nodes where PBS keeps it, or None where that can't be read.

    pbsdsh leaves PBS_NODEFILE out on the job's first node, which has the file.

    Source: https://help.altair.com/2022.1.0/PBS%20Professional/PBSAdminGuide2022.1.pdf (pbs.conf, PBS_HOME)
    """
    try:
        settings = Path(env.get("PBS_CONF_FILE", "/etc/pbs.conf")).read_text()
        home = re.search(r"^PBS_HOME=(.+)$", settings, re.MULTILINE)
        return (Path(home[1].strip()) / "aux" / env["PBS_JOBID"]).read_text() if home else None
    except (OSError, UnicodeDecodeError):
        return None


def sets_threads(env: Environment) -> bool:
    """Whether OMP_NUM_THREADS is PBS's own value and no wish of the user.

    PBS sets it in every job, to the CPUs of a chunk or to what `ompthreads` asks for, and NCPUS to the same.

    Source: https://help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf (OMP_NUM_THREADS)
    """
    threads = env.get("OMP_NUM_THREADS", "")
    return "PBS_ENVIRONMENT" in env and bool(whole_number(threads)) and threads == env.get("NCPUS")


def is_task(env: Environment) -> bool:
    """Whether PBS itself started this process, beside the job script."""
    return re.fullmatch(r"[0-9A-Fa-f]{8}", env.get("PBS_TASKNUM", "")) is not None


def _path_of_train(env: Environment) -> str:
    path = Path(sys.executable).with_name("train")
    return str(path) if env.is_live and path.is_file() else "/PATH/TO/train"


def task(env: Environment, job: Hosts | None) -> Task | Rejected | None:
    """The task of PBS that this process is, or None for a job script and outside PBS.

    Raises:
        MusterError: the job's nodes are not known here, or several tasks may be on this one.
    """
    if job is None or not is_task(env):
        return None
    mark = f"PBS_TASKNUM={env['PBS_TASKNUM']}"
    # A task has PATH=/bin:/usr/bin and starts in $HOME, whatever the job script has.
    fix = (
        "for each host of the job, the index counted from 0, with the path of train: "
        "pbs_tmrsh HOST env MUSTER_HOSTS=HOST0,HOST1 MUSTER_NODE_RANK=INDEX "
        f"{shlex.quote(_path_of_train(env))} ddp"
    )
    if max(job.slots, default=1) > 1:
        raise MusterError(
            f"pbsdsh starts {max(job.slots)} tasks on a node of this job, and gives them no ranks",
            seen=f"{mark}, {job.sources['hosts']}",
            fix=f"{job.launch_line(['train', 'ddp'])}; or {fix}",
        )
    if job.problem:
        raise MusterError(job.problem.wrong, seen=f"{mark}, {job.problem.seen}", fix=f"{job.problem.fix}; then {fix}")
    return placing.by_host("pbsdsh", mark, env, job, fix)
