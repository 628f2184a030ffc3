"""The families of schedulers and launchers, in order: which owns the nodes, and which started this process.

Each family is a file of this folder, and is asked where one of its variables is set. It defines those of the following
names that it needs. The contents of recordings, and the variables that a container is given, are derived from them:

    job(env) -> Job | None                              of a scheduler: the job and its nodes
    TASKS = {"srun": task}                              of each launcher: task(env, job) -> Task | Rejected | None
    VARIABLES, PREFIXES                                 the variables that it reads; prefixes of its other variables
    TEXT_FILES, BINARY_FILES                            variables that name files which it reads
    CGROUP, MOUNT, PARENT                               patterns for traces of its jobs, see traces.py
    JOB_SCRIPT                                          the template of its job script, where jobs/templates has none

`None` means "not mine". Variables that are incomplete or contradict each other raise a MusterError. `Rejected` means
that they were made for another process. The `job` of a task is NO_SCHEDULER where there is none.
To add a family: its file, its line below, and a recording in tests/recordings with the expected result.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from muster.entrypoint.detect import hostlist, manual
from muster.entrypoint.detect.allocation import NO_SCHEDULER, Job, Rejected, Task
from muster.entrypoint.environment import Environment
from muster.errors import MusterError


class Family(NamedTuple):
    """A family, by the name of its file.

    Attributes:
        marks: prefixes of variables: the family is asked only where a variable has one of them.
        is_scheduler: whether it owns nodes. A scheduler's launcher starts processes in its own jobs only.
    """

    name: str
    marks: tuple[str, ...]
    is_scheduler: bool = False

    @property
    def module(self) -> ModuleType:
        """The family's file."""
        return importlib.import_module(f"{__package__}.{self.name}")


# The innermost launcher comes first: it is the one that knows this process. Those after it may have started its daemon,
# and their variables then describe the daemon: mpirun starts its daemons by srun, pbs_tmrsh, blaunch or qrsh.
FAMILIES = [
    Family("pals", ("PALS_",)),  # daemons of its own in jobs of PBS; srun and Flux set its variables for Cray MPI
    Family("flux", ("FLUX_",), True),  # runs inside the others' jobs; none of them runs inside a job of Flux
    Family("mpi", ("OMPI_", "PMI_", "MPI_", "MV2_", "MVP_", "PRTE_")),  # under any scheduler: it starts daemons there
    Family("slurm", ("SLURM_",), True),
    Family("lsf", ("LSB_", "LSF_", "JSM_"), True),
    Family("pbs", ("PBS_",), True),
    Family("grid_engine", ("SGE_", "PE_"), True),
    Family("kubernetes", ("KUBERNETES_",), True),  # a pod is like a machine: a launcher inside it knows more
    Family("manual", ("MUSTER_HOSTS",)),  # the user's list adds to what the others find
]


def schedulers() -> list[str]:
    """The names of all schedulers."""
    return [family.name for family in FAMILIES if family.is_scheduler]


def names(*kinds: str) -> list[str]:
    """The names in all families' lists of these `kinds`, by kind: VARIABLES, PREFIXES, TEXT_FILES or BINARY_FILES."""
    return [name for kind in kinds for family in FAMILIES for name in getattr(family.module, kind, ())]


def _present(env: Mapping[str, str]) -> Iterator[Family]:
    for family in FAMILIES:
        if any(name.startswith(family.marks) for name in env):
            yield family


class _Candidate(NamedTuple):
    """A scheduler whose variables are set, with its job, or with the error that they led to."""

    name: str
    found: Job | MusterError

    @property
    def seen(self) -> str:
        """The variable that shows it."""
        return self.found.sources["scheduler"] if isinstance(self.found, Job) else self.found.seen

    def fits(self, host: str | None) -> bool | None:
        """Whether `host` is a node of the job; None where `host` or the job's hosts are unknown."""
        if isinstance(self.found, MusterError) or not self.found.hosts or host is None:
            return None
        try:
            return hostlist.index_of(self.found.hosts, host) is not None
        except hostlist.HostListError:
            return True

    def why_lost(self, host: str | None) -> str:
        """The line that says why this process, on `host`, does not belong to this scheduler's job."""
        if isinstance(self.found, MusterError):
            why = self.found.wrong
        elif self.fits(host) is False:
            why = f"left over: this host, {host}, is not in its job"
        else:
            why = f"nothing shows that this host, {host}, is in its job"
        return f"{self.name} ({self.seen}): {why}"


def find_job(env: Environment) -> tuple[Job, tuple[str, ...]]:
    """The job that this process belongs to, and a line for each scheduler that was ruled out.

    Raises:
        MusterError: a scheduler's variables are broken, or those of two are set and nothing shows which is right.
    """
    candidates: list[_Candidate] = []
    for family in _present(env):
        try:
            found = family.module.job(env) if family.is_scheduler else None
        except MusterError as error:
            found = error
        if found:
            candidates.append(_Candidate(family.name, found))
    listed = manual.listed(env) if "MUSTER_HOSTS" in env else None
    job, rejected = _decide(candidates, env) if candidates else (NO_SCHEDULER, ())
    return (manual.override(job, listed) if listed else job), rejected


def _decide(candidates: list[_Candidate], env: Environment) -> tuple[Job, tuple[str, ...]]:
    """The job of the scheduler that the evidence supports, and a line for each of the others.

    The order of the schedulers does not decide, except for Flux, which runs inside the others' jobs.
    """
    # A shell's FLUX_URI may name an instance of Flux elsewhere: the shell is in no job of Flux by that alone.
    is_shell_of_flux = candidates[0].name == "flux" and not {"FLUX_JOB_ID", "FLUX_TASK_RANK"} & env.keys()
    in_pod = [candidate.name for candidate in candidates] == ["flux", "kubernetes"] and _has_flux(candidates[1], env)
    if len(candidates) > 1 and is_shell_of_flux and not in_pod:
        candidates = candidates[1:]
    first, *others = candidates
    if not others:
        if isinstance(first.found, MusterError):
            raise first.found
        if is_shell_of_flux and _has_flux(first, env):
            from muster.entrypoint.detect import flux

            return replace(first.found, launch=flux.launch(first.found.num_nodes)), ()
        return first.found, ()
    # One job id from two schedulers is one job: Grid Engine's slurm-shim sets Slurm's names, plugins of Slurm PBS's.
    if isinstance(first.found, Job) and {each.seen.partition("=")[2] for each in candidates} == {first.found.job_id}:
        return first.found, tuple(f"{other.name} ({other.seen}): the same job" for other in others)
    if first.name == "flux" and isinstance(first.found, Job) and all(_has_flux(other, env) for other in others):
        return first.found, tuple(f"{other.name} ({other.seen}): {first.seen} runs inside it" for other in others)
    # Flux names no hosts: it can't be shown to be left over, and several of its tasks may share this host.
    fitting = [] if first.name == "flux" else [candidate for candidate in candidates if candidate.fits(env.host)]
    if len(fitting) == 1 and isinstance(winner := fitting[0].found, Job):
        return winner, tuple(other.why_lost(env.host) for other in candidates if other is not fitting[0])
    names = " and ".join(candidate.name for candidate in candidates)
    raise MusterError(
        f"the variables of {names} are all set, and nothing shows which of them runs this process",
        seen=", ".join(candidate.seen for candidate in candidates),
        fix="submit from a shell outside of any job, without -V or --export=ALL, or unset the others' variables",
    )


def _has_flux(outer: _Candidate, env: Environment) -> bool:
    """Whether the instance of Flux that this process sees was started in the job `outer`."""
    # The Flux Operator's pods are those of an indexed Job, which does not give the number of pods: Flux does.
    if outer.name == "kubernetes":
        return isinstance(outer.found, Job) and outer.found.num_nodes is None
    # FLUX_URI=local:///var/tmp/pbs.27.pbshead/flux-37ohsP/local-0: Flux keeps its sockets in the job's own TMPDIR.
    path = env.get("FLUX_URI", "").removeprefix("local://")
    folder = env.get("TMPDIR", "/tmp").rstrip("/") + "/"
    if not path.startswith(folder):
        return False
    job_id = outer.found.job_id if isinstance(outer.found, Job) else None
    if job_id and job_id in folder:
        return True
    # PBS gives each job a TMPDIR of its own. Another value, such as /tmp, was set inside this job: a FLUX_URI left over
    # from another job would lie in that job's own TMPDIR instead. On the node itself the socket has to exist.
    if outer.name == "pbs" and env.get("TMPDIR"):
        return not env.is_live or Path(path).is_socket()
    # A folder that all jobs share is not enough: the step must have one task a node too, as Flux starts its brokers.
    one_a_node = {"1", f"1(x{env.get('SLURM_STEP_NUM_NODES')})"}
    return set(env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")) <= one_a_node


def _is_below_broker(env: Environment) -> bool:
    """Whether Flux's broker started this process: the variables of other launchers then describe the broker."""
    if "FLUX_URI" not in env or {"FLUX_JOB_ID", "FLUX_TASK_RANK"} & env.keys():
        return False
    from muster.entrypoint.detect import traces

    return not env.is_live or any(name.startswith("flux-broker") for name in traces.ancestors())


def is_task_of_worker(env: Environment) -> bool:
    """Whether a worker of HyperQueue or Parsl started this process: a launcher's variables then describe the worker.

    A process that srun or PALS started inside a worker's task has its variable too, but a daemon of theirs as ancestor.

    Source: https://it4innovations.github.io/hyperqueue/stable/deployment/worker/ (srun --overlap hq worker start)
    Source: https://github.com/Parsl/parsl/blob/master/parsl/launchers/launchers.py (srun process_worker_pool.py)
    """
    if not {"HQ_TASK_ID", "PARSL_WORKER_RANK"} & env.keys():
        return False
    from muster.entrypoint.detect import traces

    above = traces.ancestors() if env.is_live else []
    return any(re.match("hq$|process_worker", name) for name in above) or traces.find("", "", above) is None


def find_task(env: Environment, job: Job) -> tuple[Task | None, tuple[str, ...]]:
    """This process's task, or None where no launcher started it; and a line for each launcher that was ruled out.

    Raises:
        MusterError: a launcher's variables are broken, or may be another process's; or two launchers disagree, and
            neither can have started the other.
    """
    winner: Task | None = None
    losers: dict[str, Rejected] = {}
    for family in _present(env):
        is_foreign = family.is_scheduler and job.scheduler not in (family.name, "local")
        reason = f"belongs to {family.name}, and this is a job of {job.scheduler}"
        if family.name != "flux" and _is_below_broker(env):
            is_foreign, reason = True, "started Flux, which started this process"
        elif (family.is_scheduler or family.name == "pals") and is_task_of_worker(env):
            is_foreign, reason = True, "started the worker that started this process"
        for launcher, detect in family.module.TASKS.items():
            found: Task | Rejected | None
            try:
                found = detect(env, NO_SCHEDULER if is_foreign else job)
            except MusterError as error:
                if winner is None and not is_foreign:
                    raise
                found = Rejected(error.wrong, is_certain=True)
            if is_foreign and found:
                found = Rejected(reason, is_certain=True)
            if isinstance(found, Rejected):
                losers[launcher] = found
            elif found and winner:
                losers[launcher] = _reject_outer(winner, found)
            elif found and family.is_scheduler and job is NO_SCHEDULER:
                raise MusterError(
                    f"{launcher} started this process, but its scheduler's variables are not set",
                    seen=found.sources["launcher"],
                    fix=f"don't unset the scheduler's variables; {env.way_in()}",
                )
            elif found:
                winner = found
    # A rejected launcher may be right: there is no winner, or the winner may have started that launcher's daemon.
    is_possible = winner is None or max(winner.tasks_per_node) == 1
    for launcher, rejected in losers.items():
        if is_possible and not rejected.is_certain:
            raise MusterError(
                f"the variables of {launcher} are set, but seem to belong to another process",
                seen=rejected.reason,
                fix=f"start the command by {launcher} itself, or unset its variables if they are left over",
            )
    return winner, tuple(f"{launcher}: {rejected.reason}" for launcher, rejected in losers.items())


def _reject_outer(winner: Task, outer: Task) -> Rejected:
    """The rejection of `outer`, a second launcher with complete variables, beside the `winner`.

    Raises:
        MusterError: it started several tasks on a node, so it can't have started the winner's daemons.
    """
    place = (outer.node_rank, outer.local_rank, outer.rank, outer.tasks_per_node)
    if place == (winner.node_rank, winner.local_rank, winner.rank, winner.tasks_per_node):
        return Rejected("it says the same", is_certain=True)
    if max(outer.tasks_per_node) == 1:
        return Rejected(f"{outer.sources['launcher']} belongs to the daemon that started this process", is_certain=True)
    raise MusterError(
        f"two launchers disagree on which process this is: {winner.launcher} says rank {winner.rank} of "
        f"{sum(winner.tasks_per_node)}, {outer.launcher} says rank {outer.rank} of {sum(outer.tasks_per_node)}",
        seen=f"{winner.sources['launcher']}, {outer.sources['launcher']}",
        fix="start the command by one of them; if the other's variables are left over from the shell that submitted "
        "the job, submit without -V or --export=ALL, or unset them",
    )
