"""Settings that a job script leaves to the launch: the run's name, resuming in a later attempt, the job's end.

A script that puts its job back into the queue after exit code 75 says so by MUSTER_MAX_REQUEUES; without this variable
runs are not named. `muster.errors.code_for_job` handles the end of such an attempt.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from muster.entrypoint.detect import hostlist
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.launch.program import Additions, Program
from muster.errors import ATTEMPT, MAX_REQUEUES, whole_number

RUN = "MUSTER_RUN"
"""The run's name, where a job that was submitted anew goes on with another job's run."""
LIMIT = "MUSTER_JOB_LIMIT"
"""The job's start in Unix seconds, a +, and its time limit as the scheduler prints it: 1700000000+1-00:00:00."""
START, END, GRACE = "MUSTER_JOB_START_TIME", "MUSTER_JOB_END_TIME", "MUSTER_GRACE_S"


def find(program: Program, allocation: Allocation, env: Mapping[str, str]) -> tuple[Program, Additions]:
    """`program` with a run's name and --resume where the user gave none; the attempt and the job's times as variables.

    With the user's own --name the first attempt does not resume, so that no run is continued by accident.

    Raises:
        MusterError: a variable that the job script sets is no number.
    """
    times = _times(env, allocation)
    if not env.get(MAX_REQUEUES):
        return program, Additions(times)
    whole_number(env, MAX_REQUEUES)
    # Slurm counts restarts itself, and its jobs inherit variables of the one that submits them.
    given = 0 if allocation.scheduler == "slurm" else whole_number(env, ATTEMPT)
    if allocation.job_id is None:
        return program, Additions(times)
    attempt = max(given, allocation.attempt)
    options = {word.partition("=")[0] for word in program.words}
    more: list[str] = []
    if program.words[:1] == ("muster.train",) and "--resume" not in options:
        if "--name" not in options:
            name = env.get(RUN) or "muster-" + re.sub(r"[^A-Za-z0-9]", "-", allocation.job_id).strip("-")
            more = [f"--name={name}", "--resume=auto"]
        elif attempt:
            more = ["--resume=auto"]
    return replace(program, words=(*program.words, *more)), Additions({ATTEMPT: str(attempt), **times})


def _times(env: Mapping[str, str], allocation: Allocation) -> dict[str, str]:
    """Variables for the job's start, and its end by the limit; none where these are unknown, or the user set the end.

    Slurm 23.02 and newer give both, and send a warning before the end: only where this would come at the job's start,
    the training has to watch the time itself.
    """
    if env.get(END):
        return {}
    start, end, limit_s = allocation.job.start_time, allocation.job.end_time, None
    if start is not None and end is not None:
        limit_s = end - start
        grace_s = hostlist.whole_number(env.get(GRACE, ""))
        if grace_s is None or limit_s > grace_s + 60:
            return {}
    else:
        # 7200, 75.2, 2:0:0, 1-00:00:00; LSF: 120.0/hostA, in minutes
        match = re.fullmatch(
            r"([0-9]{10})\+(?:([0-9]{1,4})-)?([0-9]{1,8}(?::[0-9]{1,2}){0,2})(?:\.[0-9]*)?(?:/\S*)?", env.get(LIMIT, "")
        )
        if match is None:
            return {}
        start, limit_s = int(match[1]), 0
        for part in match[3].split(":"):
            limit_s = limit_s * 60 + int(part)
        if allocation.scheduler == "lsf" and match[3].count(":") < 2:
            limit_s *= 60
        limit_s += 86_400 * int(match[2] or 0)
    return {START: str(start), END: str(start + limit_s)} if limit_s else {}
