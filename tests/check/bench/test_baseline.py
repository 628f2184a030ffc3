"""The comparison of figures with a baseline, and the baselines that are refused."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from muster.check.bench import baseline
from muster.check.bench.baseline import PASSES, Baseline, Kept, Setting, find_slow
from muster.check.bench.sweep import Row, Timing
from muster.errors import MusterError

HERE = Setting(site="here", backend="gloo", device="cpu", nodes=2, ranks=(4, 4))
KEY = ("all_reduce", 1 << 20)


def even(*seconds: float) -> tuple[Timing, ...]:
    return tuple(Timing(each, each, each) for each in seconds)


def row(*seconds: float, key: tuple[str, int] = KEY) -> Row:
    return Row(*key, 8, even(*seconds), 0)


def of_passes(passes: dict[tuple[str, int], tuple[Timing, ...]]) -> Baseline:
    return Baseline(setting=HERE, rows=tuple(Kept(*key, each) for key, each in passes.items()))


def kept(*seconds: float) -> Baseline:
    return of_passes({KEY: even(*seconds)})


@pytest.mark.parametrize(
    ("now", "is_slow"),
    [
        # The slowest pass took 1.1 s, 1.1 times as long as the fastest: more than 1.1 x 1.1 s is too slow.
        ((1.0,), False),
        ((1.2,), False),
        ((1.22,), True),
        ((2.0,), True),
        # The fastest of today's passes counts.
        ((5.0, 1.2, 7.0), False),
        ((5.0, 1.3, 7.0), True),
    ],
)
def test_when_a_row_is_too_slow(now, is_slow):
    found = find_slow([row(*now)], kept(1.0, 1.05, 1.1))
    assert bool(found) == is_slow
    if found:
        assert found[0].factor == pytest.approx(1.1)
        assert (found[0].now_us, found[0].slowest_us) == (1e6 * min(now), 1e6 * 1.1)


def test_a_row_whose_passes_were_alike_by_luck_has_the_factor_of_the_others():
    passes = {("reduce", size): even(1.0, 1.2) for size in (4, 8, 16)} | {KEY: even(1.0, 1.0001)}
    known = of_passes(passes)
    assert find_slow([row(1.15)], known) == []
    assert len(find_slow([row(1.21)], known)) == 1


def test_rows_that_the_baseline_does_not_have_are_not_held():
    known = kept(1.0, 1.1)
    rows = [row(9.0, key=("barrier", 0)), Row("send_recv", 0, 1, note="needs two ranks"), row(1.0)]
    assert find_slow(rows, known) == []


def test_the_middle_call_and_the_mean_are_both_held():
    known = kept(1.0, 1.1)
    rare = Row(*KEY, 8, (Timing(mean_s=2.0, p50_s=1.0, p99_s=20.0),), 0)
    assert [one.figure for one in find_slow([rare], known)] == ["mean"]
    # Where the mean varies on a healthy machine, the median does not: it shows that half the bandwidth is lost.
    rough = of_passes({KEY: (Timing(1.0, 1.0, 1.0), Timing(9.0, 1.05, 90.0))})
    half = Row(*KEY, 8, (Timing(4.0, 2.0, 20.0),), 0)
    assert [one.figure for one in find_slow([half], rough)] == ["p50"]


def timing_of(chance: random.Random, usual_s: float, noise: float) -> Timing:
    """A pass of 20 calls on a machine where each call varies, each pass drifts, and 1 call in 50 is delayed."""
    drift = chance.lognormvariate(0, noise / 2)
    calls = sorted(
        usual_s * drift * chance.lognormvariate(0, noise) * (chance.uniform(2, 30) if chance.random() < 0.02 else 1)
        for _ in range(20)
    )
    return Timing(sum(calls) / 20, calls[9], calls[19])


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_a_healthy_rerun_passes_and_half_the_bandwidth_fails(noise):
    """On simulated machines with little to much noise: 40 jobs of 60 rows each, with fixed seeds."""
    keys = [("all_reduce", 4 << number) for number in range(60)]
    num_alarms = num_found = 0
    for seed in range(40):
        chance = random.Random(seed)

        def rows(slower: float, chance: random.Random = chance) -> list[Row]:
            return [Row(*key, 8, tuple(timing_of(chance, slower, noise) for _ in range(PASSES)), 0) for key in keys]

        known = of_passes({(each.collective, each.size): each.passes for each in rows(1.0)})
        num_alarms += bool(find_slow(rows(1.0), known))
        num_found += bool(find_slow(rows(2.0), known))
    assert (num_alarms, num_found) == (0, 40)


def test_the_sensitivity_of_a_comparison():
    assert baseline.least_found(kept(1.0, 1.0, 1.1)) == pytest.approx(1.21)


def test_what_is_said_names_collective_size_and_figures():
    small = ("all_reduce", 4)
    known = of_passes({KEY: even(1.0, 1.0), small: even(1.0, 1.0)})
    found = find_slow([row(3.0), row(2.5, key=small)], known)
    (error,) = baseline.errors(found, "base.json")
    assert error.code == 1
    assert "all_reduce of 1M takes 3.00 times as long" in error.wrong
    assert error.wrong.endswith(", and too slow at 1 more size")
    assert "3000000.0 us in the fastest of 1 pass; in base.json 1000000.0 us" in error.seen


def test_a_baseline_comes_back_from_its_file(tmp_path):
    path = tmp_path / "new" / "base.json"
    baseline.write(path, HERE, [row(1.0, 1.25), Row("send_recv", 0, 1, note="needs two ranks")], {"torch": "2.15"})
    found = baseline.read(str(path), "--baseline", HERE)
    assert (found.setting, found.passes, found.about) == (HERE, {KEY: even(1.0, 1.25)}, {"torch": "2.15"})
    baseline.write(path, HERE, [row(2.0)], {})
    assert baseline.read(str(path), "--baseline", HERE).passes == {KEY: even(2.0)}
    assert [each.name for each in path.parent.iterdir()] == ["base.json"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"site": "there"}, 'site "there", not "here"'),
        ({"backend": "nccl"}, 'backend "nccl", not "gloo"'),
        ({"device": "cuda"}, 'device "cuda", not "cpu"'),
        ({"nodes": 4}, "nodes 4, not 2"),
        ({"ranks": (4, 2)}, "ranks [4, 2], not [4, 4]"),
        ({"gpus": ("NVIDIA H100",)}, 'gpus ["NVIDIA H100"], not []'),
    ],
)
def test_a_baseline_of_another_place_is_refused(changed, words, tmp_path):
    path = tmp_path / "base.json"
    baseline.write(path, replace(HERE, **changed), [row(1.0)], {})
    with pytest.raises(MusterError) as raised:
        baseline.read(str(path), "--baseline", HERE)
    assert raised.value.code == 2
    assert words in raised.value.seen


ALONE = Setting(site="", backend="gloo", device="cpu", nodes=1, ranks=(2,))
GOOD = {
    "muster_bench": 1,
    "setting": {"site": "", "backend": "gloo", "device": "cpu", "nodes": 1, "ranks": [2], "gpus": []},
    "about": {},
    "rows": [{"collective": "reduce", "size": 4, "passes": [{"mean_s": 1.0, "p50_s": 1.0, "p99_s": 1.0}]}],
}


@pytest.mark.parametrize(
    "changed",
    [
        {"muster_bench": 2},
        {"rows": []},
        {"rows": [{"collective": "reduce", "size": 4, "passes": []}]},
        {"rows": [{"collective": "reduce", "size": 4, "passes": [{"mean_s": 0.0, "p50_s": 1.0, "p99_s": 1.0}]}]},
        {"rows": [{"collective": "reduce", "size": 4, "passes": [{"mean_s": "x", "p50_s": 1.0, "p99_s": 1.0}]}]},
        {"rows": [{"collective": "reduce", "size": 4, "passes": [{"mean_s": float("inf"), "p50_s": 1.0, "p99_s": 1}]}]},
        {"rows": [{"collective": "reduce", "size": float("inf"), "passes": [{"mean_s": 1, "p50_s": 1, "p99_s": 1}]}]},
        {"setting": {"site": ""}},
        {"setting": None},
    ],
)
def test_a_file_that_is_no_baseline_is_told(changed, tmp_path):
    path = tmp_path / "base.json"
    path.write_text(json.dumps(GOOD))
    baseline.read(str(path), "--baseline", ALONE)
    path.write_text(json.dumps(GOOD | changed))
    with pytest.raises(MusterError, match="the file is no baseline") as raised:
        baseline.read(str(path), "--baseline", ALONE)
    assert "base.json" in raised.value.seen


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"nonsense", b"3", b"[" * 100_000, b"\xff\xfe"])
def test_any_other_file_is_told(content, tmp_path):
    path = tmp_path / "base.json"
    path.write_bytes(content)
    with pytest.raises(MusterError, match="the file is no baseline"):
        baseline.read(str(path), "--baseline", ALONE)


@pytest.mark.parametrize("name", ["none.json", os.devnull, "."])
def test_a_path_without_a_regular_file_is_refused(name: str, tmp_path: Path):
    """Reading a device or a pipe may never end."""
    with pytest.raises(MusterError, match="can't be read"):
        baseline.read(str(tmp_path / name), "--baseline", HERE)
