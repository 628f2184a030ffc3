"""The job scripts: the files in jobs/ are up to date, and profiles and options have their effect."""

import re
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from muster.entrypoint.sites import profiles
from muster.errors import MusterError
from muster.paths import JOBS
from tests.jobs.everything import EVERYTHING, site
from tests.jobs.kept import kept

KEPT = kept()
SCHEDULERS = ["slurm", "pbs", "lsf", "grid-engine", "flux"]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_a_kept_file_is_what_is_rendered(path: Path) -> None:
    assert path.read_text() == KEPT[path], "`make jobs` writes them anew"


def test_each_site_that_is_not_refused_has_its_script() -> None:
    assert {path for path in JOBS.iterdir() if path.is_file() and path.suffix != ".py"} == set(KEPT)
    for name in profiles.names_in(profiles.SITES):
        has_file = any(path.stem == name or path.stem.startswith(f"{name}-") for path in KEPT)
        assert has_file == (profiles.load_site(name).refused is None)


def test_what_the_profile_says_is_in_the_script(tmp_path: Path) -> None:
    text = making.make(site(tmp_path, "slurm"), Wanted(nodes=3, account="p1", gpus=2))
    for line in (
        "#SBATCH --nodes=3 --ntasks-per-node=1 --time=01:00:00",
        "#SBATCH --account=p1 --partition=gpu --cpus-per-task=48 --gpus-per-node=2 --mem=500G --opt=$(touch harm) x",
        "#SBATCH --signal=USR1@300 --requeue",  # a tenth of the time limit, and 5 minutes at most
        "module load a 'b;touch${IFS}harm'; module load 'sing$(touch harm)'",
    ):
        assert line in text.splitlines()
    assert """ '--flag=$(touch harm) '"'"'x'"'"'' --one""" in text
    assert " --signal=USR1@60 " in making.make("slurm", Wanted(time="10m"))
    # On one node the condition of the flags does not hold.
    assert "--one" not in making.make(site(tmp_path, "slurm"), Wanted(nodes=1))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_limits_in_each_schedulers_words(name: str) -> None:
    asked = Wanted(time="26h30m")
    start, option = {
        "slurm": ("#SBATCH ", "--time=26:30:00"),
        "pbs": ("#PBS ", "-l walltime=26:30:00"),
        "lsf": ("#BSUB ", "-W 26:30"),
        "grid-engine": ("#$ ", "-l h_rt=26:30:00"),
        "flux": ("# flux: ", "--time-limit=95400s"),
    }[name]
    assert re.search(rf"^{re.escape(start)}(.* )?{re.escape(option)}( |$)", making.make(name, asked), re.MULTILINE)


def test_directives_stand_before_the_first_command() -> None:
    marks = ("#SBATCH", "#PBS", "#BSUB", "#$ ", "# flux:")
    for path, text in KEPT.items():
        if path.suffix != ".yaml":
            lines = text.splitlines()
            first = lines.index("")
            assert not [line for line in lines[first:] if line.startswith(marks)]
            assert [line for line in lines[:first] if line.startswith(marks)]
            # Flux takes any line that begins with its name and a colon for a directive; they have to stand together.
            of_flux = [number for number, line in enumerate(lines) if re.match(r"\W*flux:", line, re.IGNORECASE)]
            is_flux = path.suffix == ".flux"
            assert of_flux == (list(range(of_flux[0], of_flux[-1] + 1)) if is_flux else [])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_word_of_the_user_becomes_a_directive(name: str) -> None:
    marks = ("#SBATCH", "#PBS", "#BSUB", "#$ ", "# flux:")
    hostile = "".join(f"\n{mark} -q harm\r{mark} -q harm\n" for mark in marks)
    text = making.make(name, Wanted(command=("muster", "run", hostile)), file=hostile)
    # Some programs take a carriage return for the end of a line too.
    lines = re.split("[\r\n]", text)
    assert not [line for line in lines if line.startswith(marks) and "harm" in line]
    with pytest.raises(MusterError, match="one line of printable characters"):
        making.make(name, Wanted(image=hostile))


def test_scripts_are_short_enough_to_be_read() -> None:
    lengths = {path.name: len(text.splitlines()) for path, text in KEPT.items() if path.suffix != ".yaml"}
    assert max(lengths.values()) <= 40, lengths
    assert sum(length <= 30 for length in lengths.values()) > len(lengths) / 2, lengths
    assert all(len(line) <= 142 for path, text in KEPT.items() for line in text.splitlines())


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "grid-engine"])
def test_all_options_of_a_job_leave_its_script_as_short(name: str) -> None:
    asked = Wanted(account="p1", partition="long", gpus=4, command=("muster", "run", "x.py"))
    assert len(making.make(name, asked).splitlines()) <= 40
    asked = Wanted(account="p1", partition="long", gpus=0)
    text = making.make(name, asked)
    assert len(text.splitlines()) <= 40
    # The job's container gets no GPUs, so the script asks for none, and does not say how to.
    assert not re.search(r"--nv|--gpus-|-gpu .num|ngpus=", text)


@pytest.mark.parametrize("scheduler", [name.replace("-", "_") for name in SCHEDULERS])
def test_many_directives_of_a_profile_leave_its_script_as_short(scheduler: str) -> None:
    directives = ["-l place=scatter:excl", "-R y", "-m n", "--hint=nomultithread", "--qos=normal", "-G team", "-x"]
    text = EVERYTHING.format(scheduler=scheduler).replace('["--opt=$(touch harm) x"]', str(directives))
    # The script contains the path, so it is only as long as a path in a home folder.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "site.toml"
        path.write_text(text.replace("[launch]", "[launch]\ngpus = {value = '-l gpu={gpus}', source = 's'}"))
        assert len(making.make(str(path), Wanted(account="p1")).splitlines()) <= 40


def test_grid_engine_has_no_word_for_gpus() -> None:
    assert "--nv" not in making.make("grid-engine", Wanted(gpus=0, account="p1", partition="long"))
    with pytest.raises(MusterError, match="each Grid Engine site has its own name for GPUs"):
        making.make("grid-engine", Wanted(gpus=4))


@pytest.mark.parametrize(
    "name", [name for name in profiles.names_in(profiles.SITES) if profiles.load_site(name).refused]
)
def test_a_site_that_runs_no_such_image_says_why(name: str) -> None:
    with pytest.raises(MusterError, match="this image does not run") as refusal:
        making.make(name, Wanted())
    assert refusal.value.code == 2
    assert "https://" in refusal.value.fix


def test_containers_that_no_script_knows(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(EVERYTHING.format(scheduler="slurm").replace('"singularity"', '"enroot"'))
    with pytest.raises(MusterError, match="starts containers by enroot"):
        making.make(str(path), Wanted())


@pytest.mark.parametrize("image", ["other.sif", "oras://registry/muster:1"])
def test_podman_takes_no_file(image: str) -> None:
    with pytest.raises(MusterError, match="images from a registry only"):
        making.make("perlmutter", Wanted(image=image))


def test_podman_hands_on_the_variables_of_slurm_alone(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(EVERYTHING.format(scheduler="pbs").replace('"singularity"', '"podman-hpc"'))
    with pytest.raises(MusterError, match="starts containers by podman-hpc"):
        making.make(str(path), Wanted())


@pytest.mark.parametrize("name", ["a,b.toml", "a:b.toml"])
def test_a_profile_that_no_container_could_be_given(tmp_path: Path, name: str) -> None:
    with pytest.raises(MusterError, match="a comma or a colon"):
        making.make(site(tmp_path, "slurm", name), Wanted())


def test_the_command_that_made_a_script_makes_it_again() -> None:
    asked = Wanted(nodes=4, time="02:00:00", account="p", gpus=2, command=("train", "fsdp", "--name", "a b"))
    (line,) = [line for line in making.make("slurm", asked).splitlines() if line.startswith("# Made by:")]
    assert line == (
        "# Made by: muster job slurm --nodes 4 --time 02:00:00 --account p --gpus 2 -- train fsdp --name 'a b'"
    )


def test_generic_profiles_name_nothing_of_a_site() -> None:
    for name in SCHEDULERS:
        tables = tomllib.loads((profiles.SITES / f"{name}.toml").read_text())
        assert not {"recognise", "caches", "storage", "network", "variables", "extends"} & set(tables)
        assert set(tables.get("launch", {})) <= {"directives"}


@pytest.mark.parametrize(
    ("site_name", "lines"),
    [
        # Its queue prod takes no job of less than 10 nodes.
        ("polaris", (" -q debug\n", "10 to 496 nodes", " --cpu-bind none)")),
        ("polaris", ("load spack-pe-base; module load apptainer\n",)),
        # NERSC's plugin has to be that of the image's CUDA.
        ("perlmutter", (" --gpu --nccl-cu13 ",)),
        ("leonardo", ("\n  singularity exec --nv ",)),  # there is no apptainer
        ("leonardo", (' --bind "/leonardo_work" ',)),  # where $WORK is
        # ALCF allows --fakeroot job by job.
        ("polaris", (" -l singularity_fakeroot=true\n", " --fakeroot ")),
        ("pbs", ("/var/run/palsd ]", "--cpu-bind none")),
        # Without --mem a job gets the default memory, which may be a core's.
        ("slurm", ("#SBATCH --exclusive --mem=0 ",)),
        *((name, ("CPUs are aarch64", "has not been built")) for name in ("alps", "isambard-ai", "jupiter")),
        ("alps", ("documents no apptainer", "--environment=EDF")),
    ],
)
def test_what_a_site_takes_is_asked_for_or_said(site_name: str, lines: tuple[str, ...]) -> None:
    text = making.make(site_name, Wanted())
    assert [line for line in lines if line not in text] == []


def test_a_site_that_chooses_nodes_by_qos_has_no_partition_to_name() -> None:
    assert "partition" not in making.make("perlmutter", Wanted()).lower()
    assert "partition" in making.make("slurm", Wanted()).lower()
