"""How GPUs are asked for: in the scheduler's usual words, or in the profile's; once, and as many as the user wants."""

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


@pytest.mark.parametrize(
    "directive",
    ["--gres=nvme:1600", "--gres=nvme:1600,gpumem:4", "--constraint=gpu", "--gpu-bind=none"],
)
def test_what_asks_for_other_things_leaves_the_gpus(tmp_path: Path, directive: str) -> None:
    assert "#SBATCH --gpus-per-node=4\n" in script(tmp_path, "slurm", "directives", f"['{directive}']")
    assert "#SBATCH --gpus-per-node=2\n" in script(tmp_path, "slurm", "directives", f"['{directive}']", gpus=2)


@pytest.mark.parametrize(
    ("scheduler", "usual", "line"),
    [
        ("slurm", "--gpus-per-node", "#SBATCH --gres=gpu:a100:{gpus}"),
        ("pbs", "ngpus=", "#PBS -l gpus={gpus}"),
        ("lsf", '"num=', '#BSUB -gpu "num={gpus}:mode=shared"'),
        ("grid_engine", "none", "#$ -l gpu={gpus}"),
        ("flux", "none", "# flux: --gpus-per-node={gpus}"),
    ],
)
def test_the_profiles_line_takes_the_place_of_the_usual_one(
    tmp_path: Path, scheduler: str, usual: str, line: str
) -> None:
    pattern = f"'{line.partition(' ')[2].removeprefix('flux: ')}'"
    for gpus in (None, 2):
        lines = script(tmp_path, scheduler, "gpus", pattern, gpus).splitlines()
        wanted = line.replace("{gpus}", str(gpus or 4))
        assert wanted in lines
        assert [each for each in lines if each.startswith("#") and f" {usual}" in each and each != wanted] == []
    assert wanted.partition("=")[0] not in script(tmp_path, scheduler, "gpus", pattern, gpus=0)


@pytest.mark.parametrize(
    "directive",
    ["--gres=gpu:4", "--gres=nvme:1,gpu:4", "--gpus=8", "--gpus-per-node=4", '-gpu "num=4"', "-l ngpus=4"],
)
def test_directives_do_not_ask_for_gpus(tmp_path: Path, directive: str) -> None:
    with pytest.raises(MusterError, match="asks for GPUs"):
        script(tmp_path, "slurm", "directives", f"['{directive}']")
