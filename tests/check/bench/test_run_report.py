"""The report of bench: it prints the figures before it writes a file, which may fail."""

import errno
import json
import os
from importlib import metadata
from itertools import permutations
from pathlib import Path

import pytest

from muster.check.bench import pairwise
from muster.check.bench.baseline import Baseline, Kept, Setting
from muster.check.bench.collectives import WrongValues
from muster.check.bench.run import Report
from muster.check.bench.sweep import Row, Sweep, Timing
from muster.check.bench.transport import Transport
from muster.check.options import BenchOptions
from muster.train.distributed.world import World

HOSTS = ("a", "b", "c")
HERE = Setting(site="", backend="gloo", device="cpu", nodes=3, ranks=(1, 1, 1))
ROWS = [Row("all_reduce", 1024, 3, (Timing(1e-5, 1e-5, 1e-5),), 0)]


def report(folder: Path, **options: object) -> Report:
    """The report of three nodes; no file can be written to `folder`, which is a file."""
    folder.touch()
    chosen = {"save_baseline": str(folder / "base.json")} | options
    return Report(BenchOptions(**chosen), World(hosts=HOSTS, world_size=3), HERE)  # pyright: ignore[reportArgumentType]


def sweep(of: Report, *faults: WrongValues) -> Sweep:
    found = Sweep(of.world, of.options, [1024], ["all_reduce"])
    found.faults += faults
    found.num_checks = 1
    return found


USED = Transport(network="tcp", says="gloo over TCP")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_table_is_shown_although_no_file_can_be_written(tmp_path, capsys, as_json):
    of = report(tmp_path / "file", json=as_json)
    assert of.of_sweep(ROWS, sweep(of), USED, None) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == f"error: the baseline can't be written: {os.strerror(errno.EEXIST)}"
    if as_json:
        assert json.loads(said.out)["rows"][0]["size"] == 1024
    else:
        assert "all_reduce" in said.out
        assert said.out.splitlines()[-1].startswith("ok: ")


def test_where_muster_is_not_installed_as_a_package_its_version_is_not_known(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metadata.MetadataPathFinder, "find_distributions", lambda *_, **__: iter(()))
    of = report(tmp_path / "file", save_baseline=None, json=True)
    assert of.of_sweep(ROWS, sweep(of), USED, None) == 0
    assert json.loads(capsys.readouterr().out)["about"]["muster"] is None


def test_a_run_that_fails_is_not_kept(tmp_path, capsys):
    of = report(tmp_path / "file")
    fault = WrongValues("all_reduce", 1024, 1, "b", 7, 3.0, "nan", 2)
    assert of.of_sweep(ROWS, sweep(of, fault), USED, None) == 1
    said = capsys.readouterr().out
    # Wrong values of all sizes count, also of those that have no row.
    assert "# Out of bounds values : 2 FAILED" in said
    assert "was not written: a run that fails is no baseline" in said
    assert said.splitlines()[-1] == "failed: all_reduce gave wrong values to rank 1 on b, at 1K"


def test_a_run_that_measured_nothing_is_not_kept(tmp_path, capsys):
    """As with send_recv on one rank: a file without rows could not be read again."""
    of = report(tmp_path / "file", save_baseline=str(tmp_path / "base.json"))
    assert of.of_sweep([Row("send_recv", 0, 1, note="needs two ranks")], sweep(of), USED, None) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: nothing was measured")
    assert said.out.splitlines()[-1] == "warning: nothing was measured"
    assert not (tmp_path / "base.json").exists()


def links(slow: float = 1.0) -> list[pairwise.Row]:
    """All directions between three nodes; the one from the first to the second takes `slow` times as long."""
    rows: list[pairwise.Row] = []
    for source, target in permutations(HOSTS, 2):
        gb_s = 1 / slow if (source, target) == ("a", "b") else 1.0
        rows.append(pairwise.Row(source, target, gb_s, gb_s, 20, 4 << 20))
    return rows


def test_pairs_end_with_the_verdict(tmp_path, capsys):
    of = report(tmp_path / "file", save_baseline=None)
    assert of.of_pairs(links(slow=3), USED) == 1
    said = capsys.readouterr().out
    assert "GB/s, from" in said
    last = "failed: slow link: a -> b, 0.3333 GB/s where others have 1.00 GB/s, by their best messages"
    assert said.splitlines()[-1] == last
    assert of.of_pairs(links(), USED) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok: no link is slow"


def test_control_characters_from_a_node_do_not_reach_the_terminal(tmp_path, capsys):
    of = report(tmp_path / "file", save_baseline=None)
    of.world = World(hosts=("a\x1b[31m", "b"), world_size=2)
    rows = [pairwise.Row("a\x1b[31m", "b", 1, 1, 20, 4), pairwise.Row("b", "a\x1b[31m", 0.1, 0.1, 20, 4)]
    of.of_pairs(rows, Transport(network="IB", says="IB", notes=("NCCL warns on a: \x1b]0;name\x07",)))
    said = capsys.readouterr().out
    assert not {"\x1b", "\x07"}.intersection(said)
    assert said.splitlines()[-1].startswith("failed: slow link: ")


def test_rows_are_shown_although_the_baseline_has_none_of_them(tmp_path, capsys):
    known = Baseline(setting=HERE, rows=(Kept("reduce", 4, ROWS[0].passes),))
    of = report(tmp_path / "file", save_baseline=None, baseline="base.json")
    assert of.of_sweep(ROWS, sweep(of), USED, known) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: the baseline has none of")
    assert "all_reduce" in said.out
