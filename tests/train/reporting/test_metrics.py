import json
import time

import pytest
import torch
from torch.nn.functional import cross_entropy

from muster.train.parallel.strategy import Sums, predictions_of
from muster.train.reporting.metrics import StepTimes
from muster.train.reporting.summary import Log, write_file


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(range(100, 0, -1), (50, 95, 99)), ([3], (3, 3, 3)), ([1, 2, 3], (2, 3, 3))],
)
def test_percentiles(steps, expected):
    times = StepTimes(torch.device("cpu"))
    for seconds in (9.0, *map(float, steps)):
        times.note(seconds)
    found = times.summary(global_batch=1, world_size=1)["step_time_s"]
    assert tuple(found[name] for name in ("p50", "p95", "p99")) == expected


def test_rates_are_over_the_steps_that_were_timed():
    times = StepTimes(torch.device("cpu"))
    for seconds in (9.0, 1.0, 2.0, 1.0):
        times.note(seconds)
    times.data.add(1.0)
    summary = times.summary(global_batch=8, world_size=2)
    assert summary["first_step_s"] == 9.0
    assert summary["num_timed_steps"] == 3
    assert summary["images_per_second"] == 3 * 8 / 4
    assert summary["images_per_second_per_rank"] == 3.0
    assert summary["step_time_s"] == {"p50": 1.0, "p95": 2.0, "p99": 2.0, "max": 2.0, "mean": round(4 / 3, 6)}
    assert summary["data_wait_share"] == 0.25
    assert times.of_this_rank(None) == {"step_s": 4 / 3, "data_wait_s": 1 / 3, "waits_s": None, "busy_s": None}
    assert times.of_this_rank(2.0) == {"step_s": 4 / 3, "data_wait_s": 1 / 3, "waits_s": 2 / 3, "busy_s": 2 / 3}


def test_a_run_of_one_step_has_rates_too():
    times = StepTimes(torch.device("cpu"))
    times.note(2.0)
    summary = times.summary(global_batch=8, world_size=1)
    assert (summary["images_per_second"], summary["step_time_s"]["p50"], summary["num_timed_steps"]) == (4.0, 2.0, 0)
    assert times.of_this_rank(1.0)["busy_s"] is None


def test_waits_are_counted_in_timed_steps_alone():
    """Neither in the first step nor after an epoch."""
    times = StepTimes(torch.device("cpu"))
    waits = times.waits
    seen = []
    times.start()
    for step in range(3):
        with times.waiting():
            pass
        seen.append((step, times.data.seconds > 0, waits.is_counting))
        with waits.running():
            pass
        times.step()
    times.stop()
    assert seen == [(0, False, False), (1, True, True), (2, True, True)]
    assert (len(times.seconds), times.first_s is not None, waits.is_counting) == (2, True, False)
    counted = waits.seconds
    with waits.running():
        pass
    assert waits.seconds == counted > 0


def test_lines_tell_of_the_steps_since_the_line_before():
    times = StepTimes(torch.device("cpu"), started=time.perf_counter() - 100)
    for seconds in (9.0, 1.0, 3.0):
        times.note(seconds)
    first = times.recent(8, "images")
    assert (first["step_time_s"], first["images_per_second"]) == (2.0, 4.0)
    assert 100 <= first["seconds"] < 200
    assert 0 < first["memory_gib"] < 100
    times.note(0.5)
    assert times.recent(8, "images")["step_time_s"] == 0.5
    assert times.recent(8, "images")["images_per_second"] is None


def test_sums_are_those_of_all_samples():
    sums = Sums(torch.device("cpu"))
    batches = [(torch.randn(size, 5), torch.randint(0, 5, (size,))) for size in (4, 4, 1)]
    for logits, labels in batches:
        sums.add(cross_entropy(logits, labels), predictions_of(logits), labels)
    logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    expected = [cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum(), 9]
    assert sums.values.tolist() == pytest.approx([float(value) for value in expected], rel=1e-6)


@pytest.mark.parametrize(("losses", "first"), [("012", -1), ("nn2", 0), ("0n2", 1), ("0nn", 1)])
def test_the_first_batch_whose_loss_is_no_number_is_known(losses, first):
    sums = Sums(torch.device("cpu"))
    for loss in losses:
        sums.add(torch.tensor(float("nan") if loss == "n" else float(loss)), torch.zeros(2), torch.zeros(2))
    assert sums.first_bad == first


def test_the_log_drops_what_the_resumed_run_does_again(tmp_path):
    log = Log(tmp_path, 0)
    for step in (50, 100, 150):
        log.write({"kind": "steps", "step": step, "seconds": step / 10})
    log.write({"kind": "epoch", "step": 100, "seconds": 3.0})
    with log.path.open("ab") as file:
        file.write(b'[1]\n7\n{"kind": "steps", "step": null}\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"kind": "steps", "step": 1, "seconds": "x"}\n{"kind": "steps", "step": 1, "seconds": null}\n')
        file.write(b'{"kind": "st')
    again = Log(tmp_path, 100)
    assert again.seconds == 10.0
    again.write({"kind": "steps", "step": 150, "again": True})
    records = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [record["step"] for record in records] == [50, 100, 100, 150]
    assert records[-1]["again"]


def test_a_name_that_is_no_text_costs_no_summary(tmp_path):
    write_file(tmp_path / "summary.json", json.dumps({"data": "imagefolder:/caf\udce9"}))
    assert json.loads((tmp_path / "summary.json").read_text()) == {"data": "imagefolder:/caf\udce9"}
