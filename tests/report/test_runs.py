"""Reading runs: complete, cut off, older and damaged ones; one run, several, a folder of runs."""

import contextlib
import json
import os
from pathlib import Path

import pytest

from muster.errors import MusterError
from muster.report import runs, tables
from tests.report.conftest import Make


def cells(found: list[runs.Run]) -> dict[str, tuple[str, ...]]:
    """The rows of the tables, by label."""
    return {label: tuple(row) for rows in tables.facts(found).values() for label, row in rows.items()}


def test_a_recorded_run_is_read_whole(recordings: Path) -> None:
    (run,), notes = runs.read_all([str(recordings / "scale" / "w2")])
    summary = json.loads((recordings / "scale" / "w2" / "summary.json").read_text())
    assert notes == []
    assert (run.label, run.unit, run.world_size, run.is_finished) == ("w2", "images", 2, True)
    assert run.rate == summary["images_per_second"]
    shown = cells([run])
    assert shown["model"] == ("resnet18",)
    assert shown["state"] == ("done",)
    assert shown["images a second, a rank"] == (f"{summary['images_per_second'] / 2:.2f}",)
    # A value that the run's version did not measure has no row.
    assert "MFU" not in shown


def test_a_run_on_tokens_is_counted_in_tokens(recordings: Path) -> None:
    (run,), _ = runs.read_all([str(recordings / "gpt" / "summary.json")])
    assert run.unit == "tokens"
    assert "tokens a second" in cells([run])


def test_all_that_a_run_measures_is_in_the_table(measured: Path) -> None:
    found, _ = runs.read_all([str(measured)])
    shown = cells(found)
    assert shown["MFU"] == ("41.5%",)
    assert shown["FLOP/s a rank"] == ("410 T",)
    assert shown["slowest rank, to median"] == ("1 on node02, +12%",)
    assert shown["energy, an image"] == ("0.257 J",)
    assert shown["time for communication"] == ("8.0%",)
    assert shown["time for data"] == ("2.0%",)
    assert shown["parameters"] == ("11.18 M",)


def test_a_folder_stands_for_the_runs_in_it(recordings: Path) -> None:
    found, _ = runs.read_all([str(recordings / "scale"), str(recordings / "gpt")])
    assert [run.label for run in found] == ["w1", "w2", "w4", "gpt"]
    # Each run once, however often it was named.
    again, _ = runs.read_all([str(recordings / "scale"), *(str(run.folder / "summary.json") for run in found)])
    assert [run.folder for run in again] == [run.folder for run in found]


def test_of_several_folders_those_without_a_run_are_left_out_with_a_note(make: Make) -> None:
    """runs/* may include the folder of a training that failed before its first result."""
    good, damaged = make("all/good"), make("all/damaged")
    (damaged / "summary.json").write_text("{")
    failed = good.parent / "failed"
    failed.mkdir()
    found, notes = runs.read_all([str(path) for path in sorted(good.parent.iterdir())])
    assert [run.label for run in found] == ["good"]
    for note, path in zip(notes, (damaged, failed), strict=True):
        assert note.startswith(f"left out: {path}")
    for given in ([failed], [failed, damaged], [good, good.parent / "nowhere"]):
        with pytest.raises(MusterError):
            runs.read_all(list(map(str, given)))


def test_runs_are_sorted_as_people_do(make: Make) -> None:
    for world in (16, 2, 1):
        make(f"all/w{world}")
    found, _ = runs.read_all([str(make("all/w4").parent)])
    assert [run.label for run in found] == ["w1", "w2", "w4", "w16"]


def test_equal_names_are_told_apart_by_their_folders(make: Make) -> None:
    found, _ = runs.read_all([str(make("a/run")), str(make("b/run")), str(make("b/other"))])
    assert [run.label for run in found] == ["a/run", "b/run", "other"]


def test_a_run_that_was_killed_while_it_wrote(make: Make) -> None:
    lines = [json.dumps({"kind": "steps", "step": 50, "train_loss": 1.5, "train_accuracy": 0.5}), '{"kind": "ste']
    (run,), _ = runs.read_all([str(make("killed", lines=lines, with_summary=False))])
    assert (run.is_finished, run.last_step, run.notes) == (False, 50, ())
    shown = cells([run])
    assert shown["state"] == ("not finished",)
    assert shown["training loss"] == ("1.5",)


def test_a_run_that_goes_on_after_its_summary_says_what_its_speed_is_of(make: Make) -> None:
    line = {"kind": "epoch", "epoch": 9, "step": 400, "train_loss": 0.01, "valid_loss": 0.02, "valid_accuracy": 0.999}
    (run,), _ = runs.read_all([str(make("resumed", {"step": 120}, [json.dumps(line), ""]))])
    shown = cells([run])
    assert shown["state"] == ("not finished: speeds are those up to step 120",)
    # The accuracy is that of the last line, not that of the older summary.
    assert shown["valid. accuracy"] == ("99.90%",)
    assert shown["steps in all"] == ("400",)


def test_a_run_that_went_back_before_its_summary_is_not_done(make: Make) -> None:
    line = {"kind": "steps", "step": 60, "train_loss": 0.5}
    (run,), _ = runs.read_all([str(make("back", {"step": 120}, [json.dumps(line), ""]))])
    shown = cells([run])
    assert shown["state"] == ("not finished: speeds are those up to step 120",)
    assert shown["training loss"] == ("0.5",)


def test_a_loss_that_became_no_number_is_told_and_not_the_one_before(make: Make) -> None:
    losses = (0.3, float("nan"))
    lines = [json.dumps({"kind": "epoch", "epoch": n, "step": n, "valid_loss": loss}) for n, loss in enumerate(losses)]
    folders = [make("whole", {"final_valid_loss": losses[1]}, lines), make("cut", lines=lines, with_summary=False)]
    found, _ = runs.read_all([str(folder) for folder in folders])
    assert cells(found)["validation loss"] == ("nan", "nan")


def test_a_damaged_line_in_the_middle_is_counted(make: Make) -> None:
    good = json.dumps({"kind": "steps", "step": 10, "train_loss": 1.0})
    (run,), _ = runs.read_all([str(make("run", lines=[good, "{", "[1]", good, ""]))])
    assert run.notes == ("2 lines of metrics.jsonl could not be read",)
    assert len(run.lines) == 2


@pytest.mark.parametrize("value", [None, "fast", True, [], {}, float("nan"), float("inf"), 10**400])
def test_what_is_no_number_is_a_dash_and_no_wrong_number(make: Make, value: object) -> None:
    changes = {"images_per_second": value, "step_time_s": value, "mfu": value, "ranks": value, "hosts": value}
    folder = make("odd", {**changes, "slowest_rank": value, "shares": value, "world_size": value, "options": value})
    found, _ = runs.read_all([str(folder)])
    shown = cells(found)
    assert not {"MFU", "step, p99", "ranks", "slowest rank, to median"} & shown.keys()
    assert shown["model"] == ("resnet18",)


def test_one_damaged_run_hides_no_others(make: Make) -> None:
    (make("all/bad") / "summary.json").write_text("{")
    found, notes = runs.read_all([str(make("all/good").parent)])
    assert [run.label for run in found] == ["good"]
    assert len(notes) == 1
    assert "all/bad/summary.json" in notes[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", "\xff", "[" * 100_000])
def test_a_damaged_summary_is_refused(make: Make, content: str) -> None:
    folder = make("bad")
    (folder / "summary.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(MusterError) as error:
        runs.read_all([str(folder)])
    assert error.value.code == 2
    assert str(folder / "summary.json") in error.value.seen
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(make: Make) -> None:
    folder = make("piped")
    (folder / "summary.json").unlink()
    os.mkfifo(folder / "summary.json")
    with pytest.raises(MusterError, match="can't be read") as error:
        runs.read_all([str(folder)])
    assert str(folder / "summary.json") in error.value.seen
    assert "no regular file" in error.value.seen


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_closed_folders_hide_no_runs(make: Make, mode: int, request: pytest.FixtureRequest) -> None:
    shut = make("all/shut")
    make("all/good")
    shut.chmod(mode)
    request.getfixturevalue("as_other")
    try:
        found, notes = runs.read_all(["all"])
        assert [run.label for run in found] == ["good"]
        assert notes == ["left out: all/shut: the folder can't be read: Permission denied"]
        assert runs.read_all(["all/good", "all/shut"]) == (found, notes)  # as the shell expands all/*
        for given in ("all/shut", "all/shut/summary.json"):
            with pytest.raises(MusterError) as error:
                runs.read_all([given])
            assert (error.value.code, error.value.seen) == (2, "all/shut")
            assert "Permission denied" in error.value.wrong
    finally:
        with contextlib.suppress(PermissionError):
            shut.chmod(0o755)


def test_odd_names_are_no_traceback(make: Make) -> None:
    for name in ("10²", "2", "x²", "٣"):
        make(f"all/{name}")
    found, _ = runs.read_all([str(make("all/10").parent)])
    assert [run.label for run in found] == ["2", "٣", "10", "10²", "x²"]
    with pytest.raises(MusterError, match="there is no run"):
        runs.read_all(["a" * 300])


def test_no_run_is_refused(tmp_path: Path, make: Make) -> None:
    empty = make("empty", lines=[""], with_summary=False)
    for path in (tmp_path / "none", empty, tmp_path / "folder", tmp_path / "file"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "file").write_text("")
        with pytest.raises(MusterError) as error:
            runs.read_all([str(path)])
        assert error.value.code == 2
        assert str(path) in error.value.seen
