"""Container options of `muster env`: they pass all variables that are read, no secret, nothing that a shell runs."""

import ast
import csv
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from muster.entrypoint import container, recording
from muster.entrypoint.detect.allocation import Allocation
from muster.entrypoint.environment import Environment
from muster.errors import MusterError
from muster.paths import ROOT
from tests.entrypoint import recorded
from tests.entrypoint.test_cli import three_lines
from tests.entrypoint.test_environment import SECRETS

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Names in detection's code that are not passed: two values of PBS_ENVIRONMENT, and a variable with a path of the host.
NO_NAMES = {"PBS_BATCH", "PBS_INTERACTIVE", "PBS_CONF_FILE"}
SLURM = recorded.FOLDERS / "slurm" / "c_srun_N2_2per.node02.2.env"
PBS = recorded.FOLDERS / "pbs" / "pbs_scatter2x2_script.env"


class Watched(Mapping[str, str]):
    """Variables that record which names were looked up, present or not."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return self.variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.variables)

    def __len__(self) -> int:
        return len(self.variables)


def names(words: tuple[str, ...]) -> set[str]:
    return {word for option, word in zip(words[::2], words[1::2], strict=True) if option == "--env"}


def test_all_that_detection_asks_for_in_any_recording_is_passed_to_docker() -> None:
    passed = names(container.docker(Environment({})).words)
    asked: set[str] = set()
    for each in recorded.ALL:
        watched = Watched(each.environment.variables)
        recorded.find(replace(each.environment, variables=watched))
        asked |= watched.asked
    assert len(asked) > 80
    assert asked - {"TMPDIR"} <= passed


def test_all_that_detection_names_in_its_code_is_passed_to_docker() -> None:
    passed = names(container.docker(Environment({})).words)
    files = [*(ROOT / "entrypoint" / "detect").glob("*.py")]
    files += [ROOT / "entrypoint" / f"{name}.py" for name in ("resources", "rendezvous/address")]
    named: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"^[A-Z][A-Z0-9]*(?:_[A-Za-z0-9]+)+$", node.value))
    assert len(named) > 80
    assert named - NO_NAMES <= passed


def answer(env: Environment) -> tuple[Allocation, str] | None:
    """The allocation found in `env`, and the job's problem as text: exceptions with the same text are not equal."""
    found = recorded.find(env)
    return found and (replace(found, job=replace(found.job, problem=None)), str(found.job.problem))


@pytest.mark.parametrize("each", recorded.ALL, ids=str)
def test_a_container_that_gets_what_is_passed_finds_the_same(each: recorded.Recording) -> None:
    env = each.environment
    inside = {name: env[name] for name in names(container.docker(env).words) if name in env}
    assert answer(replace(env, variables=inside)) == answer(env)


def test_names_that_a_task_will_have_are_passed_from_the_job_script_too() -> None:
    script = recording.load(recorded.FOLDERS / "slurm" / "a_sbatch_N2.node01.0.env")
    assert "SLURM_STEP_ID" not in script
    passed = names(container.docker(script).words)
    assert {"SLURM_STEP_ID", "PMI_RANK", "SLURM_JOB_NAME"} <= passed


def test_a_single_rank_may_train_in_a_container_whose_options_were_made_before_it_started() -> None:
    """As in `muster run --nproc-per-node 1 --no-python docker run $(muster env --docker-args) IMAGE train ddp`."""
    of_rank = {"RANK": "0", "TORCHELASTIC_RUN_ID": "local.0", "WORLD_SIZE": "1"}
    given = " ".join(f"{name}={value}" for name, value in of_rank.items())
    passed = names(container.docker(Environment({})).words)
    rank = {**of_rank, "MUSTER_RANK_VARIABLES": f"- {given}"}
    inside = {name: value for name, value in rank.items() if name in passed}
    found = recorded.find(Environment(inside, host="laptop"))
    assert found is not None
    assert found.num_nodes == 1


def test_files_that_variables_name_are_shown_to_the_container() -> None:
    env = recording.load(PBS)
    path = env["PBS_NODEFILE"]
    assert ("--volume", f"{path}:{path}:ro") == container.docker(env).words[-4:-2]
    assert ("--bind", path) == container.apptainer(env).words[-2:]


def test_only_files_that_exist_are_shown_to_the_container(tmp_path: Path) -> None:
    nodes = tmp_path / "7[1].head"
    nodes.write_text("n1\n")
    refused = "/" + "a" * 300  # longer than a file's name may be
    files = {"PBS_NODEFILE": str(nodes), "PE_HOSTFILE": str(tmp_path / "none"), "PALS_APINFO": refused}
    env = Environment(files, is_live=True)
    assert [word for word in container.docker(env).words if str(tmp_path) in word] == [f"{nodes}:{nodes}:ro"]


@pytest.mark.parametrize(
    ("of", "name"),
    [
        *(("docker", "a:b"), ("docker", "a b"), ("docker", "$(id)")),
        *(("apptainer", "a:b"), ("apptainer", "a,b"), ("apptainer", "a\x1b[31m")),
    ],
)
def test_a_path_that_cannot_be_passed_is_an_error(tmp_path: Path, of: str, name: str) -> None:
    nodes = tmp_path / name
    nodes.write_text("n1\n")
    env = Environment({"PBS_NODEFILE": str(nodes)}, is_live=True)
    with pytest.raises(MusterError, match="can't be passed") as refusal:
        (container.docker if of == "docker" else container.apptainer)(env)
    assert str(nodes) in refusal.value.seen


@pytest.mark.parametrize(
    ("file", "is_shared"), [("slurm/c_srun_N2_2per.node02.2", True), ("slurm/g_array_0.node01.0", False)]
)
def test_the_hosts_network_where_nodes_have_to_meet(file: str, is_shared: bool) -> None:
    words = container.docker(recording.load(recorded.FOLDERS / f"{file}.env")).words
    # Without the host's network, --uts gives the container the host's name, which the job's lists have.
    assert words[-2:] == ("--network" if is_shared else "--uts", "host")


def test_the_hosts_network_where_the_number_of_nodes_is_unknown() -> None:
    assert container.docker(Environment({})).words[-2:] == ("--network", "host")


def test_no_secret_is_passed_and_a_line_says_how_many_were_not() -> None:
    env = Environment({**SECRETS, "SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO", "MASTER_ADDR": "http://u:hidden@h/"})
    for found in (container.docker(env), container.apptainer(env)):
        text = " ".join(found.words)
        # The others are not secret: a recording leaves them out because they are not one line of text.
        secrets = {name: value for name, value in SECRETS.items() if value.isprintable()}
        assert not [name for name, value in secrets.items() if name in text.split() or value in text]
        assert "hidden" not in text
        assert "NCCL_DEBUG" in text
        assert any(re.fullmatch(r"left out: \d+ that may be secret", note) for note in found.notes)


def test_a_secret_that_detection_reads_is_not_passed_by_name_either() -> None:
    assert "MASTER_ADDR" not in names(container.docker(Environment({"MASTER_ADDR": "http://u:p@h/"})).words)


def test_what_belongs_to_the_host_or_the_container_stays_there() -> None:
    own = {"APPTAINER_BIND": "/x", "SINGULARITY_NAME": "x", "TMPDIR": "/x", "HOSTNAME": "x", "CUDA_HOME": "/x"}
    for found in (container.docker(Environment(own)), container.apptainer(Environment(own))):
        assert not own.keys() & {word.partition("=")[0] for word in found.words}


def test_tmpdir_goes_along_where_flux_needs_it() -> None:
    env = Environment({"TMPDIR": "/var/tmp/pbs.27", "FLUX_URI": "local:///var/tmp/pbs.27/flux-x/local-0"})
    assert "TMPDIR" in names(container.docker(env).words)


def pflag(words: list[str]) -> dict[str, str]:
    """The variables that Apptainer 1.4.5 reads from --env options: a model of pflag's StringToString."""
    variables: dict[str, str] = {}
    for word in words:
        count = word.count("=")
        assert count
        pairs = [word.strip('"')] if count == 1 else next(csv.reader([word], strict=True))
        variables.update({name: value for name, _, value in (pair.partition("=") for pair in pairs)})
    return variables


def arguments(line: str) -> list[str]:
    words = shlex.split(line)
    return [word for option, word in zip(words[::2], words[1::2], strict=True) if option == "--env"]


VALUES = {
    "SLURM_A": "gpu-a[1-2],gpu-b7",
    "SLURM_B": "2(x3),1",
    "SLURM_C": "a=b,c=d",
    "SLURM_D": 'say "it\'s"',
    "SLURM_E": "a b  c",
    "SLURM_F": "",
    "SLURM_G": '"=,',
    "SLURM_H": "; & | < > * ? ~ # {a,b} !x",
    "SLURM_I": "=",
    "SLURM_J": 'x"',
}


def test_values_reach_apptainer_by_eval() -> None:
    line = " ".join(container.apptainer(Environment(VALUES)).words)
    assert pflag(arguments(line)) == VALUES


@given(st.dictionaries(st.from_regex(r"SLURM_[A-C]{1,3}", fullmatch=True), st.text(st.characters(codec="ascii"))))
def test_any_value_reaches_apptainer_as_it_is_or_not_at_all(variables: dict[str, str]) -> None:
    variables = {name: value for name, value in variables.items() if "\0" not in value}
    found = container.apptainer(Environment(variables))
    passed = pflag(arguments(" ".join(found.words)))
    assert passed.items() <= variables.items()
    for name in variables.keys() - passed.keys():
        assert re.search(r"[$`\\]", variables[name]) or not variables[name].isprintable()
        assert any(name in note for note in found.notes)


def test_what_apptainers_own_shell_would_run_is_left_out() -> None:
    hostile = {"SLURM_JOB_NAME": "$(touch x)", "SLURM_X": "`id`", "SLURM_Y": "\\$HOME", "SLURM_JOB_ID": "7"}
    found = container.apptainer(Environment(hostile))
    assert found.words == ("--env", "SLURM_JOB_ID=7")
    assert any("SLURM_JOB_NAME, SLURM_X, SLURM_Y" in note for note in found.notes)


@pytest.mark.parametrize("name", ["NCCL_A --privileged", "SLURM_$(id)", "NCCL_*", "MUSTER_\x1b[31m"])
def test_a_name_that_no_shell_takes_is_in_no_line_of_options(name: str) -> None:
    env = Environment({"SLURM_JOB_ID": "1", name: "1"})
    for found in (container.docker(env), container.apptainer(env)):
        assert name not in " ".join(found.words)


def test_the_command_prints_one_line(command: Run) -> None:
    answer = command("muster", "env", "--apptainer-args", "--env-file", str(SLURM))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("\n") == 1
    assert "--env 'SLURM_JOB_NODELIST=node[01-02]'" in answer.stdout
    assert answer.stderr == ""
    answer = command("muster", "env", "--docker-args", "--env-file", str(PBS))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("\n") == 1
    assert answer.stdout.endswith(
        "--volume /var/spool/pbs/aux/7.pbshead:/var/spool/pbs/aux/7.pbshead:ro --network host\n"
    )
    assert answer.stderr == "muster: left out: 2 that may be secret\n"


def test_outside_of_a_job_the_command_prints_all_names(command: Run) -> None:
    answer = command("muster", "env", "--docker-args")
    assert answer.returncode == 0, answer.stderr
    assert {"SLURM_PROCID", "PBS_JOBID", "LSB_MCPU_HOSTS", "FLUX_JOB_ID"} <= set(answer.stdout.split())
    assert "no variables of a job are here" in answer.stderr


@pytest.mark.parametrize("other", ["--apptainer-args", "--format=jax"])
def test_two_kinds_of_output_at_once_are_refused(command: Run, other: str) -> None:
    answer = command("muster", "env", "--docker-args", other)
    assert answer.returncode == 2
    assert "only one of these" in three_lines(answer.stderr)[0]
