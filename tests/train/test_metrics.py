import io
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from train.display import Display
from train.metrics import Readout, StepTimes, Sums, percentile
from train.summary import Log


@pytest.mark.parametrize(("share", "value"), [(50, 50), (95, 95), (99, 99), (100, 100)])
def test_percentiles(share, value):
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value


def test_percentiles_of_few_values():
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0


def test_rates_are_over_the_steps_that_were_timed():
    times = StepTimes(torch.device("cpu"))
    for seconds in (9.0, 1.0, 2.0, 1.0):
        times.note(seconds)
    times.data_wait_s = 1.0
    summary = times.summary(global_batch=8, world_size=2)
    assert summary["first_step_s"] == 9.0
    assert summary["num_timed_steps"] == 3
    assert summary["images_per_second"] == 3 * 8 / 4
    assert summary["images_per_second_per_rank"] == 3.0
    assert summary["step_time_s"] == {"p50": 1.0, "p95": 2.0, "p99": 2.0}
    assert summary["data_wait_share"] == 0.25


def test_a_run_of_one_step_has_rates_too():
    times = StepTimes(torch.device("cpu"))
    times.note(2.0)
    summary = times.summary(global_batch=8, world_size=1)
    assert (summary["images_per_second"], summary["step_time_s"]["p50"], summary["num_timed_steps"]) == (4.0, 2.0, 0)


def test_waiting_counts_what_the_source_takes():
    times = StepTimes(torch.device("cpu"))
    assert list(times.waiting(range(3))) == [0, 1, 2]
    assert times.data_wait_s > 0


def test_sums_are_those_of_all_samples():
    sums = Sums(torch.device("cpu"))
    batches = [(torch.randn(size, 5), torch.randint(0, 5, (size,))) for size in (4, 4, 1)]
    for logits, labels in batches:
        sums.add(cross_entropy(logits, labels), logits, labels)
    logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = [cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum(), 9]
    assert sums.values.tolist() == pytest.approx([float(value) for value in expected], rel=1e-6)
    assert Readout(sums.values).values() == sums.values.tolist()


def test_the_log_drops_what_the_resumed_run_does_again(tmp_path):
    log = Log(tmp_path, 0)
    for step in (50, 100, 150):
        log.write({"kind": "steps", "step": step})
    with log.path.open("a") as file:
        file.write('{"kind": "st')
    Log(tmp_path, 100).write({"kind": "steps", "step": 150, "again": True})
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [record["step"] for record in records] == [50, 100, 150]
    assert records[-1]["again"]


SUMMARY = {
    "model": "resnet50",
    "data": "imagefolder:/scratch/project_with_a_long_name/datasets/imagenet-1k",
    "strategy": "ddp",
    "device": "cuda",
    "world_size": 1024,
    "images_per_second": 2_345_678.9,
    "images_per_second_per_rank": 2290.7,
    "step_time_s": {"p50": 0.1116, "p95": 0.1251, "p99": 1.2},
    "first_step_s": 12.3456,
    "data_wait_share": 0.012,
    "peak_memory_gib": 61.4,
    "final_accuracy": 0.7613,
    "best_accuracy": 0.7645,
    "final_train_loss": 1.0234,
    "final_valid_loss": 0.9876,
    "step": 112_590,
    "seconds": 1234.5,
    "bad_samples": [{"name": "x", "reason": "y"}],
    "folder": "/scratch/project_with_a_long_name/users/somebody/runs/resnet50-imagefolder-imagenet-1k-ddp-12",
}


def shown(monkeypatch, enabled=True):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    display = Display(enabled=enabled, epochs=90, global_batch=64)
    display.facts({"world": "2 processes", "run": "runs/[odd] name"})
    display.start_epoch(0, 10)
    record = {"epoch": 1, "train_loss": 1.5, "train_accuracy": 0.5, "valid_loss": 133.2, "valid_accuracy": 1.0}
    display.epoch({**record, "seconds": 1234.5})
    display.note("[red]careful[/red]")
    display.summary(SUMMARY)
    return out.getvalue()


def test_a_log_file_gets_plain_text_of_80_columns(monkeypatch):
    text = shown(monkeypatch)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    for words in ("[odd]", "[red]careful[/red]", "100.00%", "76.13%", "2,345,678.9", "111.6 ms", "1.20 s", "112,590"):
        assert words in text


def test_other_ranks_show_nothing(monkeypatch):
    assert shown(monkeypatch, enabled=False) == ""
