"""Requests for GPUs: by the scheduler's usual option or the profile's; once, and for as many as the user wants."""

import json
from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted
from muster.errors import MusterError

PROFILE = """title = "X"
scheduler = "{scheduler}"
status = "unverified"
sources = {{d = {{url = "https://a.example.org/", read = 2026-01-01}}}}
launch.{key} = {{value = {value}, source = "d"}}
nodes.gpus = {{value = 4, source = "d"}}
"""


def script(folder: Path, scheduler: str, key: str, value: str, gpus: int | None = None) -> str:
    path = folder / "site.toml"
    path.write_text(PROFILE.format(scheduler=scheduler, key=key, value=value))
    return making.make(str(path), Wanted(gpus=gpus))


def options(text: str, mark: str) -> str:
    """All options of a script's directives."""
    return " ".join(line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark))


@pytest.mark.parametrize(
    "directive",
    ["--gres=nvme:1600", "--gres=nvme:1600,gpumem:4", "--constraint=gpu", "--gpu-bind=none"],
)
def test_what_asks_for_other_things_leaves_the_gpus(tmp_path: Path, directive: str) -> None:
    for gpus in (None, 2):
        found = options(script(tmp_path, "slurm", "directives", f"['{directive}']", gpus), "#SBATCH ")
        assert {f"--gpus-per-node={gpus or 4}", directive} < set(found.split())


@pytest.mark.parametrize(
    ("scheduler", "usual", "mark", "pattern"),
    [
        ("slurm", "--gpus-per-node", "#SBATCH ", "--gres=gpu:a100:{gpus}"),
        ("pbs", "ngpus=", "#PBS ", "-l gpus={gpus}"),
        ("lsf", '"num=', "#BSUB ", '-gpu "num={gpus}:mode=shared"'),
        ("grid_engine", "none", "#$ ", "-l gpu={gpus}"),
        ("flux", "none", "# flux: ", "--gpus-per-node={gpus}"),
    ],
)
def test_the_profiles_line_takes_the_place_of_the_usual_one(
    tmp_path: Path, scheduler: str, usual: str, mark: str, pattern: str
) -> None:
    for gpus in (None, 2):
        found = options(script(tmp_path, scheduler, "gpus", f"'{pattern}'", gpus), mark)
        wanted = pattern.replace("{gpus}", str(gpus or 4))
        assert found.count(wanted) == 1
        assert usual not in found.replace(wanted, "")
    assert pattern.partition("=")[0] not in options(script(tmp_path, scheduler, "gpus", f"'{pattern}'", gpus=0), mark)


@pytest.mark.parametrize("directive", ["--comment=it's", '--comment="a', "--comment=#1", "--comment=a\\"])
def test_what_could_hide_other_options_has_a_line_of_its_own(tmp_path: Path, directive: str) -> None:
    text = script(tmp_path, "slurm", "directives", f"[{json.dumps(directive)}, '--exclusive']")
    assert f"#SBATCH {directive}" in text.splitlines()
    assert {"--exclusive", "--requeue"} < set(options(text, "#SBATCH ").split())


def test_a_parallel_environment_of_the_profile_need_not_be_named(tmp_path: Path) -> None:
    assert "qsub -pe PE SLOTS " in script(tmp_path, "grid_engine", "directives", "['-R y']")
    assert "-pe PE" not in script(tmp_path, "grid_engine", "directives", "['-pe mpi 16']")


@pytest.mark.parametrize(
    "directive",
    [
        *("--time=1:00:00", "-t 1:00:00", "-l walltime=1:0:0", "-l h_rt=60", "-W 2:00", "-t 90", "-t90m", "-W 60"),
        *("-N 4", "-N4", "-N 4 --exclusive"),
    ],
)
def test_directives_ask_for_no_nodes_and_no_time(tmp_path: Path, directive: str) -> None:
    with pytest.raises(MusterError, match="asks for nodes or for time"):
        script(tmp_path, "slurm", "directives", f"['{directive}']")


@pytest.mark.parametrize(
    "directive", ["--time-min=1:00:00", "-W group_list=a", "-t 1-10:2", "-t 1-10", "-N run4", "-n 4"]
)
def test_what_is_no_time_limit_stays(tmp_path: Path, directive: str) -> None:
    assert directive in options(script(tmp_path, "slurm", "directives", f"['{directive}']"), "#SBATCH ")


@pytest.mark.parametrize(
    "directive",
    [
        "--gres=gpu:4",
        "--gres=nvme:1,gpu:4",
        "--gpus=8",
        "--gpus-per-node=4",
        '-gpu "num=4"',
        "-l ngpus=4",
        "-G 4",
        "-G4",
    ],
)
def test_directives_do_not_ask_for_gpus(tmp_path: Path, directive: str) -> None:
    with pytest.raises(MusterError, match="asks for GPUs"):
        script(tmp_path, "slurm", "directives", f"['{directive}']")


@pytest.mark.parametrize(
    ("scheduler", "mark", "own", "account", "partition"),
    [
        ("slurm", "#SBATCH ", ("--account=own --mem=0", "-p own"), "--account=mine", "--partition=mine"),
        ("pbs", "#PBS ", ("-A own", "-qown"), "-A mine", "-q mine"),
        ("lsf", "#BSUB ", ("-P own", "-q own"), "-P mine", "-q mine"),
        ("grid_engine", "#$ ", ("-P own", "-q own"), "-P mine", "-q mine"),
        ("flux", "# flux: ", ("-B own", "--queue=own"), "--bank=mine", "--queue=mine"),
    ],
)
def test_the_users_account_and_partition_take_the_place_of_the_profiles(
    tmp_path: Path, scheduler: str, mark: str, own: tuple[str, str], account: str, partition: str
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(PROFILE.format(scheduler=scheduler, key="directives", value=list(own)))
    found = options(making.make(str(path), Wanted(account="mine", partition="mine")), mark)
    assert found.count(account) == found.count(partition) == 1
    assert "own" not in found
    assert ("--mem=0" in found) == (scheduler == "slurm")
    kept = options(making.make(str(path), Wanted()), mark)
    assert set(own[0].split()) | set(own[1].split()) <= set(kept.split())
