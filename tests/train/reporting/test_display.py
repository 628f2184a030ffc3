"""The output of a run: header, progress, notes and the table of results."""

import io
import time

import pytest
import torch
from rich.cells import cell_len

from muster.config import Options
from muster.train.reporting.console import plain
from muster.train.reporting.display import Display, learning_rate
from muster.train.reporting.metrics import StepTimes
from muster.units import duration

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
    "shares": {"data": 0.012, "compute": 0.888, "communication": 0.1},
    "slowest_rank": {"rank": 17, "host": "node03", "seconds": 0.1, "median_s": 0.08, "ratio": 1.25},
    "flops_per_second_per_rank": 4.1e14,
    "peak_flops_per_second": 9.89e14,
    "mfu": 0.4146,
    "energy_j": 7_654_321.0,
    "energy_j_per_image": 0.31,
    "profile": None,
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


def shown(monkeypatch, enabled=True, **facts):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    display = Display(Options(epochs=90), "images", 64, enabled=enabled)
    display.header({"world": "2 processes", "run": "runs/[odd]\x1b[31m name"})
    display.start_epoch(0, 10)
    record = {
        "epoch": 1,
        "step": 10,
        "train_loss": 1.5,
        "train_accuracy": 0.5,
        "valid_loss": 133.2,
        "valid_accuracy": 1.0,
    }
    display.epoch({**record, "seconds": 1234.5})
    display.epoch({**record, "seconds": 1234.5, "valid_loss": 3.08e24})  # of a run that diverges
    display.note("[red]careful[/red]\x1b[31m")
    display.summary(SUMMARY | facts)
    return out.getvalue()


def test_a_log_file_gets_plain_text_of_80_columns(monkeypatch):
    text = shown(monkeypatch)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    for words in ("[odd]", "[red]careful[/red]", "100.00%", "76.13%", "2,345,678.9", "112 ms", "1.20 s", "3.08e+24"):
        assert words in text
    for words in ("89% computing, 10% for other ranks, 1.2% for data", "17 on node03", "410 TFLOP/s", "41.5%"):
        assert words in text
    for words in ("989 TFLOP/s (MFU)", "7,654.3 kJ, 0.31 J an image", "20 min 34 s"):
        assert words in text


def test_a_table_stays_whole_whatever_names_hold(monkeypatch):
    """The names hold escape sequences, a byte that is no text, a line break and wide letters."""
    slowest = SUMMARY["slowest_rank"] | {"host": "node\x1b[2J"}
    text = shown(monkeypatch, folder="runs/\x1b[31m\udc80\n日本", data="tokens:\x1b[31m", slowest_rank=slowest)
    assert "\x1b" not in text
    table = text[text.index("╭") :].splitlines()
    assert {cell_len(line) for line in table} == {80}
    assert "\\udc80\\n日本" in text


def test_a_folder_called_dog_is_not_shown_as_an_emoji(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    display = Display(Options(), "images", 64, enabled=True)
    display.header({"data": "imagefolder:dog: 20 train"})
    display.note("of host:a:")
    assert "imagefolder:dog: 20 train" in out.getvalue()
    assert "of host:a:" in out.getvalue()


def test_other_ranks_show_nothing(monkeypatch):
    assert shown(monkeypatch, enabled=False) == ""


def test_what_is_not_known_is_not_shown(monkeypatch):
    unknown = {name: None for name in ("shares", "slowest_rank", "mfu", "peak_flops_per_second", "energy_j")}
    text = shown(monkeypatch, **unknown)
    assert "410 TFLOP/s a GPU; MFU: unknown card" in text
    for words in ("slowest rank", "computing", "energy", "None"):
        assert words not in text
    older = shown(monkeypatch, **unknown, flops_per_second_per_rank=None)
    assert "operations" not in older
    parts = {"data": 0.003, "compute": 0.997, "communication": None}
    assert "99.7% computing and communicating, 0.3% for data" in shown(monkeypatch, shares=parts)


def test_a_rank_that_is_hardly_slower_is_not_named(monkeypatch):
    assert "slowest rank" not in shown(monkeypatch, slowest_rank=SUMMARY["slowest_rank"] | {"ratio": 1.04})


def test_what_a_trace_says_is_told(monkeypatch):
    facts = {
        "profile": "profile/rank-0.json.gz",
        "profile_steps": 5,
    }
    text = shown(monkeypatch, **facts)
    for words in ("profile/rank-0.json.gz", "5 steps of rank 0", "ui.perfetto.dev", "operations.txt"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    assert "1 step of rank 0" in shown(monkeypatch, **facts | {"profile_steps": 1})


@pytest.mark.parametrize(("warmup_steps", "words"), [(1, "1 step of warm-up"), (20, "20 steps of warm-up")])
def test_the_warm_up_is_counted(warmup_steps, words):
    assert words in learning_rate(Options(warmup_steps=warmup_steps).settled(), 1)


def test_a_run_that_had_but_to_validate_shows_no_speed(monkeypatch):
    times = StepTimes(torch.device("cpu")).summary(64, 1)
    assert (times["num_timed_steps"], times["images_per_second"], times["first_step_s"]) == (0, None, None)
    text = shown(monkeypatch, **times, flops_per_second_per_rank=None, slowest_rank=None)
    assert "76.13%" in text
    for words in ("per second", "time of a step", "first step", "FLOP/s"):
        assert words not in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_narrow_terminal_nothing_of_the_table_is_cut_off(monkeypatch):
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")  # rich gives a dumb terminal 80 columns
    Display(Options(), "images", 64, enabled=True).summary(SUMMARY)
    text = plain(out.getvalue())
    table = text[text.index("╭") :].splitlines()
    assert {len(line) for line in table} == {40}
    for words in ("2,345,678.9", "76.45%", "112,590"):
        assert words in text


def test_a_progress_bar_shows_the_time_that_is_left(monkeypatch):
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    display = Display(Options(epochs=3), "images", 64, enabled=True)
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)
    display.start_epoch(1, 10)
    monkeypatch.setattr(time, "perf_counter", lambda: 1060.0)
    display.step(4, 14)
    text = plain(out.getvalue())
    assert "epoch 2/3" in text
    assert "4/10" in text
    assert f"{4 * 64 / 60:,.0f} images/s" in text
    assert f"{duration(90)} left" in text
