"""Runs of the job scripts, with the stand-ins of standins.py for programs that only a cluster has.

Slurm and Grid Engine run them for real: tests/clusters/test_jobs.py, tests/image/test_jobs.py. PBS, LSF and Flux can't
be started here: that their commands take these arguments is known from their documentation only.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from tests.jobs.everything import site
from tests.jobs.standins import LAUNCHERS, NAMES, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def launched(cluster: Cluster, name: str) -> list[str]:
    """The arguments of the call that starts containers."""
    calls = cluster.words(NAMES[name])
    (words,) = [call for call in calls if call[0] not in ("getattr", "job", "--version", "--parent")]
    return words


def resubmitted(cluster: Cluster) -> list[list[str]]:
    """The arguments of each call that puts a Flux job back into the queue."""
    return [words for words in cluster.words("flux") if words[:2] == ["--parent", "batch"]]


def container(cluster: Cluster, words: Sequence[str], engine: str = "apptainer") -> list[str]:
    """`words` from the container's command on, without the launcher's own arguments."""
    return list(words[words.index(engine) :])


@pytest.mark.parametrize("name", ["slurm", "pbs", "lsf", "flux"])
def test_one_container_a_node_with_the_arguments_of_the_job(cluster: Cluster, name: str) -> None:
    arguments = ["--data", "imagefolder:/a b", "--name=it's", "$(touch harm)", "--lr", "0.1"]
    quoted = "--data 'imagefolder:/a b' --name=\"it's\" '$(touch harm)' --lr 0.1"
    # qsub damages quotes: such arguments are written into the script.
    text = making.make(name, Wanted(command=("train", "ddp", *arguments)) if name == "pbs" else Wanted())
    done = cluster.run(
        name,
        text,
        *(arguments if name in ("slurm", "flux") else []),
        **({"MUSTER_ARGS": quoted} if name == "lsf" else {}),
    )
    assert done.returncode == 0, done.stderr
    words = launched(cluster, name)
    expected = ["apptainer", "exec", "--nv", "--bind", "/:/host:ro", cluster.image.name]
    assert container(cluster, words) == [*expected, "train", "ddp", *arguments]
    before = {
        "slurm": [
            "--nodes=2",
            "--ntasks=2",
            "--ntasks-per-node=1",
            "--export=ALL",
            "--kill-on-bad-exit=0",
            "--no-kill",
            "--cpus-per-task=4",
        ],
        "pbs": ["-n", "2", "-ppn", "1"],
        "lsf": ["-z", "h1 h2"],
        "flux": ["run", "--nodes=2", "--ntasks=2", "--exclusive", "--signal=USR1@300s"],
    }[name]
    assert words[: words.index("apptainer")] == before
    variables = cluster.environment(NAMES[name])
    # A generic profile does not set MUSTER_SITE: the launch may recognise the site by itself.
    assert ("MUSTER_SITE" in variables, variables["MUSTER_MAX_REQUEUES"]) == (False, "10")
    if name in ("pbs", "lsf"):
        assert variables["MUSTER_HOSTS"] == "h1 h2"
    assert not (cluster.folder / "harm").exists()


def test_grid_engine_tells_each_host_what_to_run_by_its_input(cluster: Cluster) -> None:
    arguments = ["--name", "it's a $(touch harm)", "&&", ";", "a\nb", ""]
    given = {"NCCL_DEBUG": "a b\nc", "HF_TOKEN": "hf_secret", "APPTAINER_DOCKER_PASSWORD": "it's $(touch harm)"}
    done = cluster.run("grid-engine", making.make("grid-engine", Wanted()), *arguments, OTHER="x", **given)
    assert done.returncode == 0, done.stderr
    # All users of a host can see command lines, so secrets go through the input.
    assert cluster.words("qrsh") == [["-inherit", host, "/bin/bash", "-s"] for host in ("h1", "h2")]
    first, second = (path.read_text() for path in cluster.records.glob("input.*"))
    assert first == second
    # apptainer's stand-in records the result, in a shell with no other variables.
    env = {"RECORDS": str(cluster.records)}
    subprocess.run(["/bin/bash", "-s"], input=first, text=True, cwd="/", env=env, check=True, timeout=240)
    (words,) = cluster.words("apptainer")
    assert words[words.index(cluster.image.name) + 1 :] == ["train", "ddp", *arguments]
    variables = cluster.environment("apptainer")
    assert (variables["MUSTER_HOSTS"], variables["PWD"]) == ("h1 h2", str(cluster.folder))
    assert {name: variables[name] for name in given} == given
    assert "OTHER" not in variables
    assert not (cluster.folder / "harm").exists()


@pytest.mark.parametrize("scheduler", LAUNCHERS)
def test_whatever_is_in_a_profile_does_no_harm(cluster: Cluster, tmp_path: Path, scheduler: str) -> None:
    command = ("muster", "run", "my script.py", "$(touch harm)", "`touch harm`", "a\nb", "it's", "--name=x")
    text = making.make(site(tmp_path, scheduler), Wanted(nodes=3, image="/$(touch harm)'.sif", command=command))
    name = scheduler.replace("_", "-")
    done = cluster.run(name, text, SCRATCH="/", LSB_DJOB_RANKFILE="/etc/hostname")
    assert done.returncode == 0, done.stderr
    assert sorted(cluster.words("module")) == [["load", "a", "b;touch${IFS}harm"], ["load", "sing$(touch harm)"]]
    if scheduler != "grid_engine":
        words = launched(cluster, name)
        assert words[-len(command) - 1 :] == [cluster.image.name, *command]
        assert "--opt=a 'b' $(touch harm)" in container(cluster, words, "singularity")
        # A profile's flags for LSF are for jsrun; blaunch, which runs here, does not get them.
        if scheduler != "lsf":
            assert "--flag=$(touch harm) 'x'" in words
    assert not list(tmp_path.rglob("harm"))
    assert cluster.run(name, text, MUSTER_IMAGE="", SCRATCH="").returncode == 0
    program = "singularity" if scheduler == "grid_engine" else LAUNCHERS[scheduler]
    if scheduler != "grid_engine":
        assert any("/$(touch harm)'.sif" in call for call in cluster.words(program))
    assert not list(tmp_path.rglob("harm"))


def test_the_path_of_ones_own_profile_is_bound_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "d$HOME `x` ${A}"
    folder.mkdir()
    path = site(folder, "slurm", "it's.toml")
    done = cluster.run("slurm", making.make(path, Wanted()), SCRATCH="/")
    assert done.returncode == 0, done.stderr
    words = container(cluster, launched(cluster, "slurm"), "singularity")
    assert words[words.index(path) - 1] == "--bind"


def test_a_job_of_pbs_goes_back_into_the_queue_for_the_project_that_it_is_charged_to(cluster: Cluster) -> None:
    """As at NCI and ABCI, which charge the project of `qsub -P`. Elsewhere PBS fills in a default of its own."""
    done = cluster.run("pbs", making.make("pbs", Wanted()), CODE="75", PROJECT="vp 91")
    assert done.returncode == 75, done.stderr
    (words,) = cluster.words("qsub")
    assert words[words.index("-P") + 1] == "vp 91"
    assert words[words.index("-A") + 1] == "my project"


@pytest.mark.parametrize("code", [0, 1, 2, 75])
@pytest.mark.parametrize("name", NAMES)
def test_exit_codes_and_which_jobs_go_back_into_the_queue(cluster: Cluster, name: str, code: int) -> None:
    done = cluster.run(name, making.make(name, Wanted()), "--epochs", "3", CODE=str(code), MUSTER_ARGS="--epochs 3")
    # LSF requeues a job that ends with 75, by its directive `-Q 75`.
    assert done.returncode == code, done.stderr
    again = [*cluster.words("scontrol"), *cluster.words("qsub")]
    again += resubmitted(cluster)
    if code != 75:
        assert again == []
        assert not list(cluster.folder.glob("*.attempts"))
        return
    script = str(cluster.folder.parent / "script")
    expected = {
        "slurm": ["requeue", "7"],
        "pbs": ["-q", "workq", "-N", "muster", "-A", "my project", "-l", "select=2:ncpus=4", "-v", script],
        "grid-engine": ["-N", "muster", "-pe", "two", "4", "-v", script, "--epochs", "3"],
        "flux": [
            "--parent",
            "batch",
            "--nodes=2",
            "--env=MUSTER_RUN=muster-7",
            "--env=MUSTER_ATTEMPT=1",
            script,
            "--epochs",
            "3",
        ],
        "lsf": None,
    }[name]
    if expected is None:
        assert again == []
        assert [path.name for path in cluster.folder.glob("*.attempts")] == ["muster-7.attempts"]
        return
    (words,) = again
    names = words.pop(words.index("-v") + 1).split(",") if "-v" in words else []
    assert words == expected
    if names:
        variables = cluster.environment("qsub")
        assert {"MUSTER_ATTEMPT", "MUSTER_IMAGE", "MUSTER_RUN"} <= set(names) <= set(variables)
        assert (variables["MUSTER_ATTEMPT"], variables["MUSTER_ARGS"]) == ("1", "--epochs 3")


@pytest.mark.parametrize("name", NAMES)
def test_other_programs_have_a_last_attempt_too(cluster: Cluster, name: str) -> None:
    """Training ends with 1 in place of 75 by itself (tests/entrypoint/launch/test_job.py)."""
    text = making.make(name, Wanted(command=("sh", "x")))
    variables = {"CODE": "75", "MUSTER_MAX_REQUEUES": "1", "MUSTER_ATTEMPT": "1", "SLURM_RESTART_COUNT": "1"}
    if name == "lsf":
        assert cluster.run(name, text, **variables).returncode == 75
    done = cluster.run(name, text, **variables)
    # 75 would put it back into LSF's queue.
    assert done.returncode == (1 if name == "lsf" else 75)
    assert not cluster.words("scontrol") + cluster.words("qsub")
    assert not resubmitted(cluster)
    assert not list(cluster.folder.glob("*.attempts"))


def test_a_task_of_an_array_of_pbs_comes_back_as_that_task_alone(cluster: Cluster) -> None:
    done = cluster.run("pbs", making.make("pbs", Wanted()), CODE="75", PBS_JOBID="7[3].head", PBS_ARRAY_INDEX="3")
    assert done.returncode == 75, done.stderr
    (words,) = cluster.words("qsub")
    # The script may have the whole array's range in a directive, and PBS refuses a single number.
    assert words[words.index("-J") + 1] == "3-4:2"
    assert cluster.environment("qsub")["MUSTER_RUN"] == "muster-7-3--head"


def test_flux_takes_the_same_queue_and_time_again(cluster: Cluster) -> None:
    done = cluster.run("flux", making.make("flux", Wanted()), CODE="75", LIMIT="7200.5", QUEUE="long")
    assert done.returncode == 75, done.stderr
    (words,) = resubmitted(cluster)
    assert {"--time-limit=7200s", "--queue=long"} < set(words)
    assert not [word for word in words if word.startswith("--bank")]


@pytest.mark.parametrize(("index", "job", "file"), [("0", "7", "muster-7"), ("3", "7[3]", "muster-7-3")])
def test_lsf_calls_0_the_index_of_a_job_that_is_no_array(cluster: Cluster, index: str, job: str, file: str) -> None:
    done = cluster.run("lsf", making.make("lsf", Wanted()), CODE="75", LSB_JOBINDEX=index)
    assert done.returncode == 75, done.stderr
    (words,) = cluster.words("bjobs")
    assert words[-1] == job
    assert [path.name for path in cluster.folder.glob("*.attempts")] == [f"{file}.attempts"]


CACHES = """title = "X"
scheduler = "{scheduler}"
status = "unverified"
sources = {{d = {{url = "https://a.example.org/", read = 2026-01-01}}}}
container.command = {{value = "{engine}", source = "d"}}
caches.HF_HOME = {{value = "$SCRATCH/hf", source = "d"}}
"""


def own(folder: Path, scheduler: str, engine: str = "apptainer", name: str = "my site.toml") -> str:
    path = folder / name
    path.write_text(CACHES.format(scheduler=scheduler, engine=engine))
    return str(path)


def test_variables_of_caches_reach_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    text = making.make(own(tmp_path, "grid_engine"), Wanted())
    assert cluster.run("grid-engine", text, SCRATCH="/a b").returncode == 0
    assert all('SCRATCH="/a b"' in path.read_text() for path in cluster.records.glob("input.*"))
    text = making.make(own(tmp_path, "pbs"), Wanted())
    assert cluster.run("pbs", text, SCRATCH="/a b", VERSION="mpiexec (OpenRTE) 4.1.4").returncode == 0
    words = launched(cluster, "pbs")
    assert words[words.index("SCRATCH") - 1] == "-x"


def test_podman_sees_ones_own_profile(cluster: Cluster, tmp_path: Path) -> None:
    path = own(tmp_path, "slurm", "podman-hpc")
    done = cluster.run("slurm", making.make(path, Wanted(image="docker://a/b:1")), MUSTER_IMAGE="", SCRATCH="/")
    assert done.returncode == 0, done.stderr
    words = container(cluster, launched(cluster, "slurm"), "podman-hpc")
    assert words[words.index(f"{path}:{path}:ro") - 1] == "--volume"
    assert words[-3:] == ["a/b:1", "train", "ddp"]


def test_other_programs_have_a_last_attempt_under_parastation_too(cluster: Cluster) -> None:
    text = making.make("slurm", Wanted(command=("sh", "x")))
    variables = {"CODE": "75", "MUSTER_MAX_REQUEUES": "1", "SLURM_JOB_RESTART_COUNT": "1"}
    assert cluster.run("slurm", text, **variables).returncode == 75
    assert not cluster.words("scontrol")


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_of_attempts_that_is_no_number_is_not_endless(cluster: Cluster, name: str) -> None:
    """`muster run` refuses it; a job of another program may go on being requeued for ever."""
    done = cluster.run(name, making.make(name, Wanted(command=("sh", "x"))), CODE="75", MUSTER_MAX_REQUEUES="ten")
    assert done.returncode == (1 if name == "lsf" else 75)
    assert not cluster.words("scontrol") + cluster.words("qsub") + resubmitted(cluster)


def test_jsrun_where_it_is_there(cluster: Cluster) -> None:
    cluster.add("jsrun")
    text = making.make("lsf", Wanted())
    done = cluster.run("lsf", text, LSB_MCPU_HOSTS="batch2 1 h1 42 h2 42", LSB_DJOB_RANKFILE="/etc/hostname")
    assert done.returncode == 0, done.stderr
    (words,) = cluster.words("jsrun")
    before = "--nrs 2 --rs_per_host 1 --tasks_per_rs 1 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind rs"
    assert " ".join(words[: words.index("apptainer")]) == before
    assert words[words.index("/etc/hostname") - 1] == "--bind"


def test_open_mpi_is_told_which_variables_to_hand_on(cluster: Cluster) -> None:
    done = cluster.run("pbs", making.make("pbs", Wanted()), VERSION="mpiexec (OpenRTE) 4.1.4", NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    words = launched(cluster, "pbs")
    assert words[:6] == ["-n", "2", "--map-by", "ppr:1:node", "--bind-to", "none"]
    carried = {words[index + 1] for index, word in enumerate(words) if word == "-x"}
    assert {"PATH", "NCCL_DEBUG", "MUSTER_HOSTS", "MUSTER_MAX_REQUEUES", "MUSTER_JOB_LIMIT"} <= carried
    # Without these the ranks on other hosts would take another port than the first.
    assert {"PBS_JOBID", "PBS_ENVIRONMENT", "PBS_NODEFILE"} <= carried
    assert "HOME" not in carried


def test_arguments_with_half_a_quote_are_refused(cluster: Cluster) -> None:
    done = cluster.run("lsf", making.make("lsf", Wanted()), MUSTER_ARGS="--name 'x")
    assert done.returncode == 2
    assert "quote" in done.stderr
    assert not cluster.words(NAMES["lsf"])


@pytest.mark.parametrize("arguments", ["--name 'x'", '--name "x"', "--name \\\\x"])
def test_arguments_that_qsub_damages_are_refused(cluster: Cluster, arguments: str) -> None:
    done = cluster.run("pbs", making.make("pbs", Wanted()), MUSTER_ARGS=arguments)
    assert done.returncode == 2
    assert "MUSTER_ARGS" in done.stderr
    assert not cluster.words(NAMES["pbs"])


def test_plain_arguments_come_through_qsub(cluster: Cluster) -> None:
    done = cluster.run("pbs", making.make("pbs", Wanted()), MUSTER_ARGS="  --epochs 3\t--data * --lr=0,1\n--seed 1 ")
    assert done.returncode == 0, done.stderr
    words = launched(cluster, "pbs")
    given = ["--epochs", "3", "--data", "*", "--lr=0,1", "--seed", "1"]
    assert words[words.index("ddp") + 1 :][: len(given)] == given
