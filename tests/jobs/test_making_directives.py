"""The user's number of GPUs and what a profile's directives ask for: no job asks for both."""

from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted, asks_for_gpus
from muster.errors import MusterError

PROFILE = """title = "X"
scheduler = "{scheduler}"
status = "unverified"
sources = {{d = {{url = "https://a.example.org/", read = 2026-01-01}}}}
launch.directives = {{value = ['{directive}'], source = "d"}}
nodes.gpus = {{value = 4, source = "d"}}
"""


def script(folder: Path, scheduler: str, directive: str, gpus: int | None = None) -> list[str]:
    path = folder / "site.toml"
    path.write_text(PROFILE.format(scheduler=scheduler, directive=directive))
    return making.make(str(path), Wanted(gpus=gpus)).splitlines()


@pytest.mark.parametrize(
    ("scheduler", "directive", "line"),
    [
        ("slurm", "--gres=nvme:1600", "#SBATCH --gpus-per-node="),
        ("slurm", "--gres=nvme:1600,gpumem:4", "#SBATCH --gpus-per-node="),
        ("slurm", "--constraint=gpu", "#SBATCH --gpus-per-node="),
        ("slurm", "--gpu-bind=none", "#SBATCH --gpus-per-node="),
        ("lsf", "-gpufoo", '#BSUB -gpu "num='),
    ],
)
def test_what_asks_for_other_things_leaves_the_gpus(tmp_path: Path, scheduler: str, directive: str, line: str) -> None:
    end = '"' if line.endswith("num=") else ""
    assert f"{line}4{end}" in script(tmp_path, scheduler, directive)
    assert f"{line}2{end}" in script(tmp_path, scheduler, directive, gpus=2)


@pytest.mark.parametrize(
    "directive",
    ["--gres=gpu:4", "--gres gpu:4", "--gres=gpu:a100-80:4", "--gpus-per-node=4", "--gpus-per-node a100:4"],
)
def test_the_users_number_takes_the_place_of_slurms(tmp_path: Path, directive: str) -> None:
    for gpus, expected in ((None, directive), (2, f"{directive[:-1]}2")):
        lines = script(tmp_path, "slurm", directive, gpus)
        asking = [line for line in lines if line.startswith(("#SBATCH --gpus-per-node", "#SBATCH --gres"))]
        assert asking == [f"#SBATCH {expected}"]


@pytest.mark.parametrize(
    ("scheduler", "directive"),
    [
        ("slurm", "--gres=gpu"),
        ("slurm", "--gres=gpu:1g.10gb:4"),
        ("slurm", "--gres=nvme:1,gpu:4,lustre:1"),
        ("slurm", "--gres=gres/gpu:4"),
        ("slurm", '--gres="gpu:4"'),
        ("slurm", "--exclusive --gres=gpu:4 --hint=x"),
        ("slurm", "--gpus=8"),
        ("slurm", "-G 8"),
        ("slurm", "-G8"),
        ("slurm", "--gpus-per-task=4"),
        ("slurm", "--tres-per-task=gres/gpu:4"),
        ("lsf", '-gpu "num=4:mode=shared"'),
        ("lsf", "-gpu num=4"),
        ("lsf", "-gpu -"),
        ("lsf", '-R "rusage[ngpus_physical=4]"'),
        ("pbs", "-l ngpus=4"),
        ("flux", "--gpus-per-node=4"),
        ("flux", "-g 4"),
    ],
)
def test_what_asks_for_gpus_in_another_form_stays_as_it_is(tmp_path: Path, scheduler: str, directive: str) -> None:
    with pytest.raises(MusterError, match="the profile's own lines ask for GPUs") as refusal:
        script(tmp_path, scheduler, directive, gpus=2)
    assert (refusal.value.code, refusal.value.seen) == (2, f"--gpus=2; launch.directives: {directive}")
    lines = script(tmp_path, scheduler, directive)
    assert directive in " ".join(lines)
    # What the profile says of nodes is not asked for a second time.
    of_slurm_and_lsf = [line for line in lines if line.startswith(("#SBATCH --gpus-per-node", "#BSUB -gpu"))]
    assert all(directive in line for line in of_slurm_and_lsf)


def test_grid_engine_has_no_such_directives(tmp_path: Path) -> None:
    assert "#$ -l gpu=4" in script(tmp_path, "grid_engine", "-l gpu=4")
    assert not asks_for_gpus("grid_engine", "-l gpu=4")
