"""Scaling: speedups and efficiencies calculated by hand, and runs that are not compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.report import runs, scaling, tables
from tests.report.conftest import Make


def world(size: int, rate: float, batch: int, **changes: Any) -> dict[str, Any]:
    """The part of a summary that scaling reads."""
    return {"world_size": size, "images_per_second": rate, "global_batch": batch, **changes}


def find(*folders: Path) -> tuple[list[scaling.Scaling], list[str]]:
    found, _ = runs.read_all([str(folder) for folder in folders])
    return scaling.find(found)


def test_weak_scaling_by_hand(make: Make) -> None:
    (found,), notes = find(make("d", world(8, 2400, 256)), make("a", world(2, 800, 64)), make("b", world(4, 1200, 128)))
    assert (found.kind, found.batch, notes) == ("weak", 32, [])
    assert [(point.world, point.speedup, point.efficiency) for point in found.points] == [
        (2, 1.0, 1.0),
        (4, 1.5, 0.75),  # 1200 of 2 x 800
        (8, 3.0, 0.75),  # 2400 of 4 x 800
    ]
    heads, rows = tables.of_scaling(found)
    assert heads[2] == "efficiency"
    assert rows[1] == ["4", "1,200", "75.0%", "1.50", "300", "128"]


def test_strong_scaling_by_hand(make: Make) -> None:
    (found,), _ = find(make("a", world(1, 100, 64)), make("b", world(2, 150, 64)), make("c", world(4, 500, 64)))
    assert (found.kind, found.batch) == ("strong", 64)
    # More than ideal is possible: a smaller part may fit into a cache.
    assert [point.efficiency for point in found.points] == [1.0, 0.75, 1.25]


def test_the_kind_comes_from_the_batches_and_mixed_sets_are_grouped(make: Make) -> None:
    both, notes = find(
        make("one", world(1, 100, 32)), make("weak", world(2, 180, 64)), make("strong", world(2, 120, 32))
    )
    assert [(found.kind, [point.rate for point in found.points]) for found in both] == [
        ("weak", [100, 180]),
        ("strong", [100, 120]),
    ]
    assert notes == []


@pytest.mark.parametrize(
    "other",
    [
        {"model": "resnet50"},
        {"data": "cifar10:x"},
        {"strategy": "fsdp"},
        {"device": "cuda"},
        {"options": {"bf16": False}},
        {"options": {"image_size": 64}},
        {"versions": {"gpu": "another card"}},
    ],
)
def test_other_work_is_not_compared_and_that_is_said(make: Make, other: dict[str, Any]) -> None:
    found, notes = find(make("a", world(1, 100, 32)), make("b", world(2, 180, 64, **other)))
    assert found == []
    assert len(notes) == 2
    assert "no other run does the same work" in notes[0]


@pytest.mark.parametrize(
    "name",
    [
        *("backend", "bucket_mb", "powersgd_rank", "powersgd_start", "decoder", "share_gpus", "optimizer"),
        *("tensor_parallel", "pipeline_parallel"),
    ],
)
def test_an_option_that_changes_a_step_is_enough(make: Make, name: str) -> None:
    same, other = {"options": {name: "a"}}, {"options": {name: "b"}}
    found, notes = find(make("a", world(1, 100, 32, **same)), make("b", world(2, 180, 64, **other)))
    assert (found, len(notes)) == ([], 2)
    assert len(find(make("c", world(1, 100, 32, **same)), make("d", world(2, 180, 64, **same)))[0]) == 1


def test_what_is_not_finished_or_has_no_rate_is_not_compared(make: Make) -> None:
    (found,), notes = find(
        make("a", world(1, 100, 32)),
        make("b", world(2, 180, 64)),
        make("c", with_summary=False),
        make("d", {"world_size": 4, "images_per_second": None}),
    )
    assert [point.world for point in found.points] == [1, 2]
    assert [note.partition(" is in no scaling table")[0] for note in notes] == ["c", "d"]


def test_runs_of_one_world_are_no_scaling(make: Make) -> None:
    assert find(make("a", world(2, 100, 32)), make("b", world(2, 110, 32))) == ([], [])


def test_where_one_of_two_worlds_has_no_rate_the_reader_hears_why_there_is_no_scaling(make: Make) -> None:
    found, notes = find(make("a", world(1, 100, 32)), make("b", {"world_size": 2, "images_per_second": None}))
    assert found == []
    assert sorted(note.partition(" is in no scaling table: ")[::2] for note in notes) == [
        ("a", "no other run does the same work with the same batch on another number of ranks"),
        ("b", "its summary lacks the rate, the number of ranks or the batch"),
    ]


def test_of_several_runs_on_as_many_ranks_the_median_counts(make: Make) -> None:
    (found,), _ = find(make("a", world(1, 100, 32)), *(make(f"b{rate}", world(2, rate, 64)) for rate in (150, 190, 10)))
    assert found.points[1].rate == 150
    assert found.points[1].efficiency == 0.75
    assert "their median is shown: 3 on 2" in found.notes[0]


def test_ranks_on_cpus_are_said_to_share_cores(make: Make) -> None:
    (found,), _ = find(make("a", world(1, 100, 32)), make("b", world(4, 180, 128)))
    assert found.notes == (scaling.ON_CPUS,)
    (found,), _ = find(make("c", world(1, 100, 32, device="cuda")), make("d", world(4, 180, 128, device="cuda")))
    assert found.notes == ()


def test_the_recorded_runs_scale_as_their_files_say(recordings: Path) -> None:
    (found,), _ = find(recordings / "scale")
    rates = [
        json.loads((recordings / "scale" / f"w{n}" / "summary.json").read_text())["images_per_second"]
        for n in (1, 2, 4)
    ]
    assert found.kind == "weak"
    assert [point.efficiency for point in found.points] == pytest.approx(
        [1, rates[1] / rates[0] / 2, rates[2] / rates[0] / 4]
    )
