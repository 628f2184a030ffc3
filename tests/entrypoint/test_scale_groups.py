"""`train scale` of strategies whose ranks work in groups: each world is whole groups."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from entrypoint import environment
from entrypoint.environment import Environment
from entrypoint.options import ScaleOptions
from tests.entrypoint.test_scale import on_one_node, plan, trained
from train.errors import MusterError
from train.options import Options

SIZES = {"tp": "tensor_parallel", "pipeline": "pipeline_parallel"}
GPT = Options(model="gpt-tiny", data="synthetic", batch_size=24)


@pytest.mark.parametrize(
    ("strategy", "size", "num_gpus", "worlds"),
    [("tp", 2, 6, (2, 4, 6)), ("tp", 4, 4, (4,)), ("pipeline", 3, 8, (3, 6)), ("tp", 1, 4, (1, 2, 4))],
)
@pytest.mark.parametrize("strong", [False, True])
def test_without_a_list_the_worlds_are_whole_groups(
    strategy: Literal["tp", "pipeline"], size: int, num_gpus: int, worlds: tuple[int, ...], *, strong: bool
) -> None:
    gpus = Environment({"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus)))}, host="here")
    planned = plan(ScaleOptions(strategy=strategy, strong=strong), replace(GPT, **{SIZES[strategy]: size}), env=gpus)
    assert planned.worlds == worlds
    shares = [24 * size // world if strong else 24 for world in worlds]
    assert [run.batch_size for run in trained(planned).values()] == shares


@pytest.mark.parametrize(
    ("strategy", "size", "world", "fix"),
    [
        ("tp", 2, "1,2,3", "--world 2,4"),
        ("tp", 2, "1", "--world 2"),
        ("tp", 4, "4,8,10", "--world 4,8,12"),
        ("pipeline", 3, "1,3", "--world 3"),
        ("pipeline", 3, "2,4", "--world 3,6"),
    ],
)
@pytest.mark.parametrize("strong", [False, True])
def test_worlds_that_are_no_whole_groups_are_refused(
    strategy: Literal["tp", "pipeline"], size: int, world: str, fix: str, *, strong: bool
) -> None:
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(world=world, strategy=strategy, strong=strong), replace(GPT, **{SIZES[strategy]: size}))
    assert (error.value.code, error.value.fix) == (2, fix)
    assert f"={size}, --world={world}" in error.value.seen


def test_a_group_that_is_larger_than_the_machine_is_refused() -> None:
    gpus = Environment({"CUDA_VISIBLE_DEVICES": "0,1"}, host="here")
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(strategy="tp"), replace(GPT, tensor_parallel=4), env=gpus)
    assert (error.value.code, error.value.seen) == (2, "--tensor-parallel=4, 2 GPUs to use")
    assert error.value.fix == "--tensor-parallel=2, or --device=cpu --world 4,8"
    env = Environment(on_one_node(1), host="n1")
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(strategy="pipeline"), replace(GPT, pipeline_parallel=3), env=env)
    assert error.value.fix == "--world 3,6"


def test_groups_in_a_job_of_several_nodes(recordings: Path) -> None:
    env = environment.load(recordings / "slurm" / "a_sbatch_N2.node01.0.env")
    for size, worlds in ((2, ["2", "4"]), (4, ["4"])):
        with pytest.raises(MusterError) as error:
            plan(ScaleOptions(strategy="tp"), replace(GPT, tensor_parallel=size), env=env)
        lines = error.value.fix.split(" && ")[:-1]
        assert [line.partition("--name=w")[2].partition(" ")[0] for line in lines] == worlds
    with pytest.raises(MusterError) as error:
        plan(ScaleOptions(strategy="tp"), replace(GPT, tensor_parallel=3), env=env)
    assert (error.value.code, error.value.fix) == (2, "--tensor-parallel=2")
