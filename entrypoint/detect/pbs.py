"""PBS Professional and OpenPBS: the job's nodes, and this process's task of pbsdsh.

The nodes are in a file, one line for each MPI process. It is not sorted: hosts may alternate, and several chunks may
lie on one host.

    PBS_JOBID=7.pbshead                            in an array 2[1].pbshead; in NEC's NQSV 0:7.nqsv, by node
    PBS_NODEFILE=/var/spool/pbs/aux/7.pbshead      pbsn1 pbsn1 pbsn2 pbsn2, a line each
    PBS_TASKNUM=20000001                           a task; the job script has 1. Neither this nor PBS_NODENUM is a rank.
                                                   Torque's tasks have decimal numbers, from 2

pbsdsh starts a task for each line of PBS_NODEFILE, pbs_tmrsh one on the host that it is given. A task has
PATH=/bin:/usr/bin and starts in $HOME, whatever the job script has. On the job's first node it lacks PBS_NODEFILE.

Source: https://help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf (PBS_NODEFILE, PBS_ENVIRONMENT)
Source: https://github.com/openpbs/openpbs/blob/master/src/cmds/pbsdsh.c
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

from muster.entrypoint.detect.allocation import Job, Task
from muster.entrypoint.detect.hostlist import whole_number
from muster.entrypoint.detect.manual import by_host
from muster.entrypoint.detect.reader import Reader, slots_or_problem
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from muster.paths import text_of

VARIABLES = ("NCPUS", "PBS_ENVIRONMENT", "PBS_JOBID", "PBS_NODEFILE", "PBS_NODENUM", "PBS_NUM_PPN", "PBS_TASKNUM")
TEXT_FILES = ("PBS_NODEFILE",)

PREFIXES = ("PBS_",)
# /pbs_jobs.service/jobid/7.pbshead                            /pbs_jobs.service/jobs/... with cgroup v2
# Source: https://github.com/openpbs/openpbs/blob/master/test/tests/functional/pbs_cgroups_hook.py (.slice: earlier)
CGROUP = re.compile(r"/pbs_jobs\.service/[^/\s]+/[^/\s]+|/pbspro\.slice/pbspro-\d[^/\s]*")
MOUNT = re.compile(r"/(?:pbs|PBS|torque)/aux/+\d[^/\s]*$")
PARENT = re.compile(r"^pbs_mom$")

FIX_JOB = "start from a fresh job: `qsub SCRIPT`, without -V and without setting PBS_ variables by hand"
FIX_HOSTS = "in the job script: export MUSTER_HOSTS=$(awk '!seen[$1]++ {print $1}' \"$PBS_NODEFILE\" | paste -sd,)"


def job(env: Environment) -> Job | None:
    """The PBS job in `env`, or None where there is none."""
    if not {"PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE", "PBS_NODENUM", "PBS_TASKNUM"} & env.keys():
        return None
    read = Reader(env, FIX_JOB)
    job_id = re.sub(r"^[0-9]+:", "", env.get("PBS_JOBID", ""))
    is_id = re.fullmatch(r"[0-9]+(\[[0-9]*\])?(\.[A-Za-z0-9_.-]+)?", job_id) is not None
    read.agree(is_id, "PBS_JOBID is missing or no job id", "PBS_JOBID")
    is_complete = env.get("PBS_ENVIRONMENT") in ("PBS_BATCH", "PBS_INTERACTIVE")
    read.agree(is_complete, "PBS_ENVIRONMENT is neither PBS_BATCH nor PBS_INTERACTIVE", "PBS_ENVIRONMENT", "PBS_JOBID")
    slots, problem = slots_or_problem(lambda: _slots(read))
    nodes = read.seen("PBS_NODEFILE") or "PBS's own file of this job" if slots else "no PBS_NODEFILE that can be read"
    return Job(
        scheduler="pbs",
        job_id=job_id,
        hosts=tuple(slots),
        num_nodes=len(slots) or None,
        slots=tuple(slots.values()),
        cpus_on_node=read.optional("NCPUS"),
        default_threads=_default_threads(env),
        launch=_launch(env, len(slots) or "NODES"),
        # Torque writes the file on the first node alone.
        is_shared=not _is_torques(env) or len(slots) == 1,
        gpu_request=f"qsub -l select={len(slots) or 'NODES'}:ngpus={{gpus}}",
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
    """The line that starts `{command}` once on each node, with the options of the mpiexec that is installed here."""
    path = shutil.which("mpiexec", path=env.get("PATH")) if env.is_live else None
    program = Path(path or "/").resolve()
    # Debian's /usr/bin/mpiexec links by /etc/alternatives to orterun. Elsewhere Open MPI 5 names it mpirun or mpiexec.
    is_own = program.name in ("mpiexec", "mpirun") and program.with_name("ompi_info").is_file()
    if path is None or not (is_own or re.search("openmpi|orterun|prterun", str(program))):
        unbound = " --cpu-bind none" if "pals" in program.parts else ""  # /opt/cray/pals/1.8/bin/mpiexec
        return f"mpiexec -n {num_nodes} -ppn 1{unbound} {{command}}"
    # Open MPI passes only the variables of -x options to other nodes. By default it binds a process to one core.
    carried = " ".join(f"-x {name}" for name in ("PATH", "PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE"))
    return f"mpiexec -n {num_nodes} --hostfile $PBS_NODEFILE --map-by ppr:1:node --bind-to none {carried} {{command}}"


def _slots(read: Reader) -> dict[str, int]:
    """The number of lines of each host in the file of nodes, in the order of the hosts' first lines."""
    own = _own_node_file(read.env) if is_task(read.env) and not read.env.get("PBS_NODEFILE") else ""
    text = own or Reader(read.env, FIX_HOSTS).text_file("PBS_NODEFILE")
    lines = [(line.strip(), "1") for line in text.splitlines() if line.strip()]
    return read.slots(lines, "PBS's list of nodes", "PBS_NODEFILE", "PBS_JOBID")


def _own_node_file(env: Environment) -> str:
    """The content of the job's file of nodes in PBS's own folder; empty where that can't be read.

    Source: https://help.altair.com/2022.1.0/PBS%20Professional/PBSAdminGuide2022.1.pdf (pbs.conf, PBS_HOME)
    """
    if not env.is_live:
        return ""
    home = re.search(r"^PBS_HOME=(.+)$", text_of(Path(env.get("PBS_CONF_FILE", "/etc/pbs.conf"))), re.MULTILINE)
    return text_of(Path(home[1].strip()) / "aux" / env["PBS_JOBID"]) if home else ""


def _default_threads(env: Environment) -> str | None:
    """OMP_NUM_THREADS where PBS set it, and not the user; else None.

    PBS sets it in every job, to the number of CPUs of a chunk or the value of `ompthreads`, and NCPUS to the same.

    Source: https://help.altair.com/2022.1.0/PBS%20Professional/PBSUserGuide2022.1.pdf (OMP_NUM_THREADS)
    """
    threads = env.get("OMP_NUM_THREADS", "")
    is_of_pbs = "PBS_ENVIRONMENT" in env and whole_number(threads) and threads == env.get("NCPUS")
    return threads if is_of_pbs else None


def _is_torques(env: Environment) -> bool:
    """Whether Torque set the variables. Sites of PBS (MetaCentrum) set PBS_NUM_PPN too, but only PBS sets NCPUS."""
    return "PBS_NUM_PPN" in env and "NCPUS" not in env


def is_task(env: Environment) -> bool:
    """Whether this process belongs to a task that PBS started beside the job script."""
    pattern = r"(?!1$)[0-9]{1,8}" if _is_torques(env) else r"[0-9A-Fa-f]{8}"
    return re.fullmatch(pattern, env.get("PBS_TASKNUM", "")) is not None


def task(env: Environment, job: Job) -> Task | None:
    """This process's task of pbsdsh, or None for a job script and outside PBS.

    Raises:
        MusterError: the job's nodes are not known here, or several tasks may be on this one.
    """
    if job.scheduler != "pbs" or not is_task(env):
        return None
    mark = f"PBS_TASKNUM={env['PBS_TASKNUM']}"
    train = Path(sys.executable).with_name("train")
    folder = shlex.quote(str(train.parent)) if env.is_live and train.is_file() else "/PATH/TO"
    remote = "pbsdsh -h" if _is_torques(env) else "pbs_tmrsh"
    fix = (
        "for each host of the job, the index counted from 0, with the path of this command: "
        f"{remote} HOST env MUSTER_HOSTS=HOST0,HOST1 MUSTER_NODE_RANK=INDEX {folder}/{{command}}"
    )
    if max(job.slots, default=1) > 1:
        raise MusterError(
            f"pbsdsh starts {max(job.slots)} tasks on a node of this job, and gives them no ranks",
            seen=f"{mark}, {job.sources['hosts']}",
            fix=f"{job.launch}; or {fix}",
        )
    if job.problem:
        raise MusterError(job.problem.wrong, seen=f"{mark}, {job.problem.seen}", fix=f"{job.problem.fix}; then {fix}")
    return by_host("pbsdsh", mark, env, job, fix)


TASKS = {"pbsdsh": task}
