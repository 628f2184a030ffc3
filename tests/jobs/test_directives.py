"""The user's number of GPUs and what a profile's directives ask for: neither is lost."""

from pathlib import Path

import pytest

from muster.entrypoint.jobs import making
from muster.entrypoint.jobs.script import Wanted, ask_for_gpus, with_gpus
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
    ("scheduler", "directive", "expected"),
    [
        ("slurm", "--gres=gpu:4", "--gres=gpu:2"),
        ("slurm", "--gres gpu:4", "--gres gpu:2"),
        ("slurm", "--gres=gpu", "--gres=gpu:2"),
        ("slurm", "--gres=gpu:a100", "--gres=gpu:a100:2"),
        ("slurm", "--gres=gpu:a100:4", "--gres=gpu:a100:2"),
        ("slurm", "--gres=gpu:a100-80:4", "--gres=gpu:a100-80:2"),
        ("slurm", "--gres=gpu:a100-80", "--gres=gpu:a100-80:2"),
        ("slurm", "--gres=gpu:1g.10gb:4", "--gres=gpu:1g.10gb:2"),
        ("slurm", "--gres=gpu:4,nvme:1", "--gres=gpu:2,nvme:1"),
        ("slurm", "--gres=nvme:1,gpu:4,lustre:1", "--gres=nvme:1,gpu:2,lustre:1"),
        ("slurm", "--gres=gres/gpu:4", "--gres=gres/gpu:2"),
        ("slurm", "--gpus-per-node=4", "--gpus-per-node=2"),
        ("slurm", "--gpus-per-node 4", "--gpus-per-node 2"),
        ("slurm", "--gpus-per-node=a100:4", "--gpus-per-node=a100:2"),
        ("slurm", "--exclusive --gres=gpu:4 --hint=x", "--exclusive --gres=gpu:2 --hint=x"),
        ("lsf", '-gpu "num=4:mode=shared"', '-gpu "num=2:mode=shared"'),
        ("lsf", '-gpu "mode=shared:num=4"', '-gpu "mode=shared:num=2"'),
        ("lsf", "-gpu num=4", "-gpu num=2"),
        ("flux", "--gpus-per-node=4", "--gpus-per-node=2"),
    ],
)
def test_the_users_number_stands_in_the_directive(
    tmp_path: Path, scheduler: str, directive: str, expected: str
) -> None:
    word = {"slurm": "#SBATCH", "lsf": "#BSUB", "flux": "# flux:"}[scheduler]
    asks = ("gpus-per-node", "--gres", "-gpu ")
    for gpus, line in ((None, directive), (2, expected)):
        lines = script(tmp_path, scheduler, directive, gpus)
        head = [line for line in lines if line.startswith(f"{word} ") and any(ask in line for ask in asks)]
        assert head == [f"{word} {line}"]


@pytest.mark.parametrize(
    ("scheduler", "directive"),
    [
        ("slurm", "--gpus=8"),
        ("slurm", "-G 8"),
        ("slurm", "-G8"),
        ("slurm", "--gpus-per-task=4"),
        ("slurm", "--gpus-per-socket=2"),
        ("slurm", "--gres=gpu:a100:2,gpu:v100:2"),
        ("slurm", '--gres="gpu:4"'),
        ("slurm", "--gres=gpu:4 --gpus=8"),
        ("slurm", "--tres-per-task=gres/gpu:4"),
        ("lsf", "-gpu -"),
        ("lsf", '-gpu "num=2/task"'),
        ("lsf", '-R "rusage[ngpus_physical=4]"'),
        ("pbs", "-l ngpus=4"),
        ("flux", "-g 4"),
    ],
)
def test_a_form_that_no_number_fits_into_is_refused(tmp_path: Path, scheduler: str, directive: str) -> None:
    with pytest.raises(MusterError, match="in a form that --gpus can't change") as refusal:
        script(tmp_path, scheduler, directive, gpus=2)
    assert (refusal.value.code, refusal.value.seen) == (2, f"--gpus=2; launch.directives: {directive}")
    assert directive in " ".join(script(tmp_path, scheduler, directive))


def test_grid_engine_has_no_such_directives() -> None:
    assert with_gpus("grid_engine", ["-l gpu=4"], None) == ("-l gpu=4",)
    assert not ask_for_gpus("grid_engine", ["-l gpu=4"])
