"""Pipelines of layers: group sizes, waits, stages and refusals, beside the combinations of test_matrix.py."""

import re
from types import SimpleNamespace

import pytest
import torch

from muster.config import Options, check
from muster.errors import MusterError
from muster.train import models
from muster.train.checkpoint import manager as checkpoint, storage
from muster.train.distributed.world import World
from muster.train.models import gpt
from muster.train.parallel import pipeline
from muster.train.reporting.metrics import Stopwatch
from tests.train.comparing import LIMIT, STEPS, TEXT, apart, losses, trained

SGD = ["--optimizer=sgd", "--lr=0.01", "--max-steps=3"]


@pytest.mark.process
def test_three_ranks(train, tmp_path):
    common = [*TEXT, *STEPS, *SGD]
    states = [
        trained(train, tmp_path, "single", 1, [*common, "--batch-size=1", "--accumulate=6"], "single"),
        trained(train, tmp_path, "pipeline", 3, [*common, "--batch-size=6", "--microbatches=6"], "pipeline"),
    ]
    assert max(apart(*states)) < LIMIT


@pytest.mark.process
@pytest.mark.parametrize("schedule", ["interleaved", pytest.param("zero-bubble", marks=pytest.mark.full)])
def test_a_group_of_one_may_have_several_stages(train, tmp_path, schedule):
    common = [*TEXT, *STEPS, *SGD, "--max-steps=2"]
    states = [
        trained(train, tmp_path, "single", 1, common, "single"),
        trained(train, tmp_path, "pipeline", 1, [*common, "--single-rank-group", f"--schedule={schedule}"], "pipeline"),
    ]
    assert max(*apart(*states), *losses(*states)) < LIMIT


@pytest.mark.process
def test_a_pipeline_of_one_micro_batch(train, tmp_path):
    common = [*TEXT, *STEPS, *SGD]
    if torch.__version__ < "2.11":
        ended = train(["pipeline", *common, "--microbatches=1", f"--runs-dir={tmp_path}"], 2)
        assert [rank.code for rank in ended] == [2, 2]
        assert "--microbatches=2" in "".join(rank.err for rank in ended)
        return
    states = [
        trained(train, tmp_path, "single", 1, common, "single"),
        trained(train, tmp_path, "pipeline", 2, [*common, "--microbatches=1"], "pipeline"),
    ]
    assert max(apart(*states)) < LIMIT


@pytest.mark.process
def test_the_wait_is_measured_and_told(train, summary_of, tmp_path):
    argv = [*TEXT, *STEPS, "--max-steps=4", "--batch-size=4", "--name=run", f"--runs-dir={tmp_path}"]
    [ended, *_] = train(["pipeline", *argv], 2, ok=True)
    summary = summary_of(tmp_path / "run")
    assert summary["ideal_bubble_share"] == 0.2
    assert 0 < summary["bubble_share"] < 1
    assert re.search(rf"waiting for stages +│ {summary['bubble_share']:.1%} of the time; 20.0% if", ended.out)


def test_the_bubble_share_is_the_time_outside_of_the_stages():
    stage, schedule = (SimpleNamespace(total=lambda seconds=seconds: seconds) for seconds in (3.0, 4.0))
    strategy = pipeline.Pipeline(World(world_size=2), Options())
    gradients = SimpleNamespace(stage_time=stage, schedule_time=schedule, world=World(), strategy=strategy)
    shares = pipeline.StagedGradients.report(gradients)
    assert shares == {"bubble_share": 0.25, "ideal_bubble_share": 0.2}


def test_a_stopwatch_counts_what_runs_within_it():
    watch = Stopwatch(torch.device("cpu"))
    with watch.running():
        sum(range(1000))
    first = watch.total()
    with watch.running():
        sum(range(1000))
    assert watch.total() > first > 0
    counted, watch.is_counting = watch.total(), False
    with watch.running():
        sum(range(1000))
    assert watch.total() == counted


@pytest.mark.process
def test_what_a_user_sees_and_each_rank_keeps(train, tmp_path):
    argv = ["pipeline", *TEXT, "--bf16", "--max-steps=4", "--name=run", f"--runs-dir={tmp_path}"]
    [ended, other] = train(argv, 2, ok=True)
    assert "gpt-tiny, 0.9 M parameters" in ended.out
    assert "the 2 ranks of a pipeline wait 20% of a step" in ended.out
    assert other.out == ""
    entries = storage.read_index(checkpoint.saved(tmp_path / "run")[0])["tensors"]
    files = {name: {chunk["file"] for chunk in entry["chunks"]} for name, entry in entries.items()}
    assert files["model/embed.weight"] == files["model/layers.1.attention.out.weight"] == {"rank-00000"}
    assert files["model/output.weight"] == files["model/layers.2.attention.out.weight"] == {"rank-00001"}


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_stages_are_the_model_cut_up(num_stages):
    options = Options(model="gpt-tiny")
    whole = models.place(models.build(options, 50, 16), torch.device("cpu"), torch.preserve_format, 0)
    layers = [gpt.layers_of(whole.shape, stage, num_stages) for stage in range(num_stages)]
    assert [number for numbers in layers for number in numbers] == [0, 1, 2, 3]
    x = inputs = torch.arange(32).view(2, 16)
    for stage in range(num_stages):
        own = models.build(options, 50, 16)
        gpt.keep_stages(own, [stage], num_stages)
        models.place(own, torch.device("cpu"), torch.preserve_format, 0)
        assert {name: tensor for name, tensor in whole.state_dict().items() if name in own.state_dict()}.keys() == set(
            own.state_dict()
        )
        x = gpt.stage_of(own, stage, num_stages)(x)
    assert torch.equal(x, whole(inputs))


@pytest.mark.parametrize(
    ("world_size", "options", "wrong", "fix"),
    [
        (4, {"pipeline_parallel": 3}, "4 processes can't form pipelines of 3", "divides the processes"),
        (6, {}, "4 layers are too few for 6 stages", "smaller --pipeline-parallel"),
        (4, {"schedule": "interleaved"}, "4 layers are too few for 8 stages", "--schedule=1f1b"),
        (5, {}, "4 layers are too few for 5 stages", "fewer processes"),
        (2, {"batch_size": 6}, "a batch of 6 can't be split into 4 parts", "--batch-size=4"),
        (4, {"microbatches": 2}, "parts for 1f1b", "without --microbatches"),
        (3, {"batch_size": 2}, "a batch of 2 can't be split into 6 parts", "--batch-size=6"),
        (1, {"pipeline_parallel": 2}, "1 process can't form pipelines of 2", "divides the processes, or leave it out"),
        (1, {"batch_size": 3}, "a batch of 3 can't be split into 2 parts", "--batch-size=2"),
    ],
)
def test_sizes_that_do_not_divide_evenly_are_refused(world_size, options, wrong, fix):
    with pytest.raises(MusterError) as raised:
        pipeline.Pipeline(World(world_size=world_size, backend="gloo"), Options(model="gpt-tiny", **options)).check()
    assert wrong in raised.value.wrong
    assert fix in raised.value.fix


def test_micro_batches_of_gpipe_need_not_be_a_multiple_of_the_ranks():
    options = Options(model="gpt-tiny", schedule="gpipe", batch_size=5, microbatches=5)
    pipeline.Pipeline(World(world_size=2), options).check()


def test_the_wait_is_that_of_the_paper():
    # Narayanan et al. 2021, 2.2: (p - 1) / m of the ideal time, and 1 / v of that with v stages a rank.
    for schedule, stages_each in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        plan = pipeline.Pipeline(World(world_size=4), Options(schedule=schedule, microbatches=8))
        assert plan.bubble / (1 - plan.bubble) == pytest.approx(3 / (8 * stages_each))


def test_recomputed_layers_are_refused_with_zero_bubble():
    with pytest.raises(MusterError, match="can't be split") as raised:
        check("pipeline", Options(model="gpt-tiny", schedule="zero-bubble", activation_checkpoint="full"))
    assert "--schedule=interleaved" in raised.value.fix
