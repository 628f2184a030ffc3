"""What the launch does for a job script: it names the run, resumes it in later attempts, and knows the job's end."""

from dataclasses import replace
from pathlib import Path

import pytest

from muster.entrypoint import recording
from muster.entrypoint.detect import resolve
from muster.entrypoint.environment import Environment
from muster.entrypoint.launch import start
from muster.entrypoint.launch.program import Launch, Program
from muster.entrypoint.options import LaunchOptions
from muster.entrypoint.rendezvous import address
from muster.errors import MusterError, code_for_job

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings"
TASKS = {
    "slurm": "slurm/b_srun_N2_1per.node01.0",
    "pbs": "pbs/pbs_scatter2x2_pbsdsh-n1.pbsn1.task00000004",
    "lsf": "documented/lsf_blaunch.hosta.0",
    "grid_engine": "grid_engine/pe_two.qrsh_V.node01",
    "flux": "flux/flux_in_pbs_run-N2n2.pbsn1.task0",
}
SLURM = TASKS["slurm"]
# As the job scripts export them.
HOSTS = {"pbs": "pbsn1,pbsn2", "grid_engine": "node01,node02"}


def recorded(name: str, **variables: str) -> Environment:
    """A recorded process of a job whose script puts it back into the queue after exit code 75."""
    env = recording.load(RECORDINGS / f"{name}.env")
    hosts = HOSTS.get(name.partition("/")[0])
    own = {"MUSTER_MAX_REQUEUES": "10", **({"MUSTER_HOSTS": hosts} if hosts else {})}
    return replace(env, variables={**env, **own, **variables})


def planned(env: Environment, *words: str) -> Launch:
    program = Program("module", ("muster.train", "ddp", *words), is_ours=True)
    options = LaunchOptions()
    allocation = resolve.resolve(env, options, ["train", "ddp"])
    found = start.Context(env, options, allocation, address.meet(allocation, env, options))
    return start.plan(found, program, ["train", "ddp", *words])


def added(launch: Launch, *words: str) -> list[str]:
    """The words that the launch adds after `words`, those of the user."""
    argv = list(launch.argv)
    return argv[argv.index("ddp") + 1 + len(words) :]


@pytest.mark.parametrize("restarts", ["0", "2"])
def test_a_run_is_named_after_its_job_and_goes_on_in_later_attempts(restarts: str) -> None:
    env = recorded(SLURM, SLURM_RESTART_COUNT=restarts)
    launch = planned(env)
    assert added(launch) == [f"--name=muster-{env['SLURM_JOB_ID']}", "--resume=auto"]
    assert launch.additions.variables["MUSTER_ATTEMPT"] == restarts


@pytest.mark.parametrize(
    ("words", "attempt", "expected"),
    [
        (["--name", "x"], "0", []),
        (["--name", "x"], "1", ["--resume=auto"]),
        (["--name=x"], "1", ["--resume=auto"]),
        (["--resume", "runs/old"], "1", []),
        (["--resume=runs/old"], "0", []),
    ],
)
def test_what_the_user_says_of_the_run_stays(words: list[str], attempt: str, expected: list[str]) -> None:
    assert added(planned(recorded(SLURM, SLURM_RESTART_COUNT=attempt), *words), *words) == expected


def test_a_job_that_was_submitted_anew_goes_on_with_the_run_of_the_first() -> None:
    env = recorded(TASKS["grid_engine"], MUSTER_RUN="muster-3", MUSTER_ATTEMPT="2")
    launch = planned(env)
    assert added(launch) == ["--name=muster-3", "--resume=auto"]
    assert launch.additions.variables["MUSTER_ATTEMPT"] == "2"


def test_slurm_counts_its_restarts_itself() -> None:
    """A job that another job submits inherits that one's variables."""
    launch = planned(recorded(SLURM, MUSTER_ATTEMPT="7"))
    assert launch.additions.variables["MUSTER_ATTEMPT"] == "0"


def test_without_a_script_that_requeues_a_run_gets_no_name() -> None:
    assert added(planned(recorded(SLURM, MUSTER_MAX_REQUEUES=""))) == []


def test_other_programs_get_no_words_of_ours() -> None:
    env, options = recorded(SLURM, SLURM_RESTART_COUNT="1"), LaunchOptions()
    allocation = resolve.resolve(env, options, ["muster", "run"])
    context = start.Context(env, options, allocation, address.meet(allocation, env, options))
    launch = start.plan(context, Program("script", ("x.py", "--x")), ["muster", "run", "x.py", "--x"])
    assert list(launch.argv)[-2:] == ["x.py", "--x"]
    assert launch.additions.variables["MUSTER_ATTEMPT"] == "1"


@pytest.mark.parametrize(
    ("grace", "counts"), [("3600", True), ("300", False), ("", False), ("soon", False), ("9" * 5000, False)]
)
def test_a_job_hardly_longer_than_its_warning_counts_the_time_itself(grace: str, counts: bool) -> None:
    times = {"SLURM_JOB_START_TIME": "1800000000", "SLURM_JOB_END_TIME": "1800003600"}
    variables = planned(recorded(SLURM, MUSTER_GRACE_S=grace, **times)).additions.variables
    assert variables.get("MUSTER_JOB_END_TIME") == ("1800003600" if counts else None)


@pytest.mark.parametrize(
    ("scheduler", "told", "limit_s"),
    [
        ("pbs", "02:00:00", 7200),
        ("lsf", "120.0/hostA", 7200),
        ("lsf", "02:00:00", 7200),
        ("grid_engine", "7200", 7200),
        ("grid_engine", "2:0:0", 7200),
        ("flux", "7200.5", 7200),
        ("slurm", "59:30", 3570),
        ("slurm", "1-02:00:00", 93_600),
        ("slurm", "UNLIMITED", None),
        ("pbs", "", None),
        ("lsf", "unlimited", None),
        ("grid_engine", "0", None),
        ("flux", "$(touch harm)", None),
    ],
)
def test_the_end_of_the_job_is_known_to_the_training(scheduler: str, told: str, limit_s: int | None) -> None:
    env = recorded(TASKS[scheduler], MUSTER_JOB_LIMIT=f"1800000000+{told}", SLURM_JOB_START_TIME="")
    variables = planned(env).additions.variables
    times = {name: value for name, value in variables.items() if name.startswith("MUSTER_JOB_")}
    expected = {"MUSTER_JOB_START_TIME": "1800000000", "MUSTER_JOB_END_TIME": str(1_800_000_000 + (limit_s or 0))}
    assert times == (expected if limit_s else {})


def test_an_end_that_the_user_gives_stays() -> None:
    launch = planned(recorded(TASKS["lsf"], MUSTER_JOB_LIMIT="1800000000+7200", MUSTER_JOB_END_TIME="1800000009"))
    assert not {"MUSTER_JOB_END_TIME", "MUSTER_JOB_START_TIME"} & set(launch.additions.variables)


@pytest.mark.parametrize(("limit_s", "is_counted"), [(300, True), (350, True), (3600, False)])
def test_a_slurm_job_that_is_warned_at_its_start_counts_the_time_itself(limit_s: int, is_counted: bool) -> None:
    times = {"SLURM_JOB_START_TIME": "1800000000", "SLURM_JOB_END_TIME": str(1_800_000_000 + limit_s)}
    launch = planned(recorded(SLURM, **times, MUSTER_GRACE_S="300"))
    assert ("MUSTER_JOB_END_TIME" in launch.additions.variables) == is_counted


@pytest.mark.parametrize("name", ["MUSTER_MAX_REQUEUES", "MUSTER_ATTEMPT"])
@pytest.mark.parametrize("text", ["x", "-1", "1e9", 20 * "9"])
def test_what_is_no_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(MusterError) as refusal:
        planned(recorded(TASKS["lsf"], **{name: text}))
    assert (refusal.value.code, refusal.value.seen) == (2, f"{name}={text}")
    # Also without a job, as the variables are read at the end of every launch.
    with pytest.raises(MusterError) as refusal:
        planned(Environment({"MUSTER_MAX_REQUEUES": "10", name: text}))
    assert (refusal.value.code, refusal.value.seen) == (2, f"{name}={text}")


@pytest.mark.parametrize(
    ("code", "attempt", "most", "expected"),
    [(75, "0", "1", 75), (75, "1", "1", 1), (75, "3", "1", 1), (75, "0", "0", 1), (0, "1", "1", 0), (2, "1", "1", 2)],
)
def test_the_last_attempt_does_not_ask_for_another(
    code: int, attempt: str, most: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_for_job(code, {"MUSTER_ATTEMPT": attempt, "MUSTER_MAX_REQUEUES": most}) == expected
    said = capsys.readouterr().err
    assert ("last" in said) == (code != expected)
    assert (f"attempt {int(attempt) + 1} of {int(most) + 1} " in said) == (code == 75)


def test_where_nothing_requeues_75_stays() -> None:
    assert code_for_job(75, {"MUSTER_ATTEMPT": "9"}) == 75
