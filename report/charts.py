"""What the charts show: data, names and units, the same for the page and for the PNG files."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from report import units
from report.runs import Record, Run, number, record
from report.scaling import Scaling

NUM_COLORS = 8

MOST_BARS = 16

MOST_POINTS = 400
"""More points of a line than a page can show are thinned out."""


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        points: (x, y), x ascending; y None where the line is broken.
        color: which of NUM_COLORS colours, counted on beyond them with other markers; -1 for what is ideal.
        style: `line`; `marked`: a marker at each point; `dashed`: that with a broken line; `steps`: y holds up to the
            next x; `ideal`; `stack`: x counts the chart's categories, and y is
            put on top of the series before.
        is_named: whether the legend names it.
        has_values: whether each point has its value written beside it.
    """

    label: str
    points: tuple[tuple[float, float | None], ...]
    color: int
    style: str = "line"
    is_named: bool = True
    has_values: bool = False


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        key: its file's name.
        y_unit, x_unit: how numbers are written: a name in FORMATS.
        x_ticks: where the x axis has its marks; empty to choose round numbers.
        from_zero: whether the y axis begins at 0.
        note: how to read it.
        categories: names of bars that are put together from the series, each a `stack`; empty for all other charts.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_unit: str = "plain"
    y_unit: str = "plain"
    x_ticks: tuple[float, ...] = ()
    x_is_log: bool = False
    y_is_log: bool = False
    from_zero: bool = True
    y_top: float | None = None
    note: str = ""
    categories: tuple[str, ...] = ()


def _percent(value: float) -> str:
    return f"{value * 100:.4g} %"


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.4g}"


FORMATS: dict[str, Callable[[float], str]] = {
    "plain": units.plain,
    "share": _percent,
    "seconds": _milliseconds,
    "rate": units.plain,
    "loss": lambda value: units.plain(float(f"{value:.4g}")),
}


def of_runs(runs: Sequence[Run]) -> list[Chart]:
    """The charts of `runs`; those without data are left out."""
    of_units = sorted({run.unit for run in runs})
    made = [
        _learning(runs, "loss", "Loss", "cross-entropy loss", "loss", from_zero=False),
        _learning(runs, "accuracy", "Accuracy", "share of right answers", "share", from_zero=True),
        *(_throughput(runs, unit, f"throughput-{unit}" if len(of_units) > 1 else "throughput") for unit in of_units),
        _step_times(runs),
        _shares(runs),
        Chart(
            "memory",
            "Memory over steps",
            "step",
            "GiB, rank 0",
            _over_steps(runs, lambda line, run: number(line.get("memory_gib"))),
        ),
    ]
    return [chart for chart in made if chart.series]


def of_scaling(scaling: Scaling, index: int) -> list[Chart]:
    """Rate and efficiency against the ideal; `index` tells several scalings' files apart."""
    end = "" if index == 0 else f"-{index + 1}"
    first = scaling.points[0]
    worlds = tuple(float(point.world) for point in scaling.points)
    is_log = worlds[-1] / worlds[0] > 8
    rates = tuple((float(point.world), point.rate) for point in scaling.points)
    ideal = tuple((world, world / first.world * first.rate) for world in worlds)
    shares = tuple((float(point.world), point.efficiency) for point in scaling.points)
    return [
        Chart(
            f"scaling-rate{end}",
            f"{scaling.kind.capitalize()} scaling: rate",
            "ranks",
            f"{scaling.unit} a second",
            (
                Series("ideal", ideal, -1, "ideal"),
                Series("measured", rates, 0, "marked", has_values=len(rates) <= 6),
            ),
            x_ticks=worlds,
            y_unit="rate",
            x_is_log=is_log,
            y_is_log=is_log,
        ),
        Chart(
            f"scaling-efficiency{end}",
            f"{scaling.kind.capitalize()} scaling: efficiency",
            "ranks",
            "share of the ideal rate",
            (
                Series("ideal", tuple((world, 1.0) for world in worlds), -1, "ideal"),
                Series("measured", shares, 0, "marked", has_values=len(rates) <= 6),
            ),
            x_ticks=worlds,
            y_unit="share",
            x_is_log=is_log,
            y_top=max(1.0, *(point.efficiency for point in scaling.points)),
        ),
    ]


def _learning(runs: Sequence[Run], key: str, title: str, y_label: str, y_unit: str, *, from_zero: bool) -> Chart:
    """Training and validation of `key` over steps."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        train = _points(run.of_kind("steps") or run.of_kind("epoch"), f"train_{key}")
        valid = _points(run.of_kind("epoch"), f"valid_{key}")
        several = len(runs) > 1
        if train:
            series.append(Series(run.label if several else "training", train, index))
        if valid:
            label = f"{run.label}, validation" if several else "validation"
            # Whose it is, colour and marker tell: one name a run is enough in the legend.
            series.append(Series(label, valid, index if several else 1, "dashed", is_named=not (several and train)))
    note = (
        "Full lines: training, the mean of the epoch so far, with the weights as they were. Broken lines: validation, "
        "after each epoch."
    )
    known = [y for one in series for _, y in one.points if y is not None]
    # A first loss that is far off would press all others against the axis.
    is_log = not from_zero and bool(known) and min(known) > 0 and max(known) / min(known) > 20
    return Chart(
        key,
        title,
        "step",
        f"{y_label}, logarithmic" if is_log else y_label,
        tuple(series),
        y_unit=y_unit,
        y_is_log=is_log,
        from_zero=from_zero,
        note=note,
    )


def _throughput(runs: Sequence[Run], unit: str, key: str) -> Chart:
    """The rates of those `runs` that count `unit`."""
    series = _over_steps(runs, lambda line, run: number(line.get(f"{unit}_per_second")))
    note = "All ranks together, between two lines of the log."
    return Chart(key, "Throughput over steps", "step", f"{unit} a second", series, y_unit="rate", note=note)


def _over_steps(runs: Sequence[Run], value: Callable[[Record, Run], float | None]) -> tuple[Series, ...]:
    series: list[Series] = []
    for index, run in enumerate(runs):
        points = _thin(
            (step, value(line, run))
            for line in run.of_kind("steps")
            if (step := number(line.get("step"))) is not None and value(line, run) is not None
        )
        if points:
            series.append(Series(run.label, points, index, is_named=len(runs) > 1))
    return tuple(series)


def _points(lines: Iterable[Record], name: str) -> tuple[tuple[float, float | None], ...]:
    points = [(step, number(line.get(name))) for line in lines if (step := number(line.get("step"))) is not None]
    return _thin(points) if any(value is not None for _, value in points) else ()


def _thin(points: Iterable[tuple[float, float | None]]) -> tuple[tuple[float, float | None], ...]:
    """`points` by x, at most MOST_POINTS of them; of two at one x the later."""
    ordered = sorted(dict(points).items())
    stride = -(-len(ordered) // MOST_POINTS) or 1
    return tuple(point for index, point in enumerate(ordered) if index % stride == 0 or index + 1 == len(ordered))


def _step_times(runs: Sequence[Run]) -> Chart:
    """How the steps' times are spread, by the histogram of each run's summary."""
    series: list[Series] = []
    for index, run in enumerate(runs):
        found = record(run.summary.get("step_histogram"))
        edges, counts = _numbers(found.get("edges_s")), _numbers(found.get("counts"))
        total = sum(counts)
        if len(edges) != len(counts) + 1 or not total or edges[0] <= 0 or sorted(set(edges)) != edges:
            continue
        points = (*_coarse(edges, [count / total for count in counts], total), (edges[-1], 0.0))
        series.append(Series(run.label, points, index, "steps", is_named=len(runs) > 1))
    note = "Rank 0's steps after the first."
    if len(runs) == 1:
        times = [(name, runs[0].number("step_time_s", name)) for name in ("p50", "p95", "p99")]
        known = [f"{name} {units.seconds(value)}" for name, value in times if value is not None]
        note += f" {', '.join(known)}." if known else ""
    return Chart(
        "step-times",
        "Step times",
        "milliseconds a step",
        "share of the steps",
        tuple(series),
        x_unit="seconds",
        y_unit="share",
        x_is_log=True,
        note=note,
    )


def _shares(runs: Sequence[Run]) -> Chart:
    """What the time of a step went to."""
    parts = {"compute": 0, "communication": 1, "data": 2}
    known = [run for run in runs if any(run.number("shares", part) is not None for part in parts)][:MOST_BARS]
    series = tuple(
        Series(
            part, tuple((float(index), run.number("shares", part)) for index, run in enumerate(known)), color, "stack"
        )
        for part, color in parts.items()
        if any(run.number("shares", part) is not None for run in known)
    )
    note = "The mean step of all ranks. Communication: what of it is not hidden behind compute."
    names = tuple(run.label for run in known)
    title = "Where the time goes"
    return Chart("time", title, "run", "share of a step", series, y_unit="share", note=note, categories=names)


def _coarse(edges: list[float], shares: list[float], num_steps: float) -> list[tuple[float, float]]:
    """(lower edge, share) of bins that are wide enough for so few steps: else one sees the gaps between them."""
    stride = max(1, round(len(shares) / max(8.0, min(40.0, 1.5 * num_steps**0.5))))
    return [(edges[start], sum(shares[start : start + stride])) for start in range(0, len(shares), stride)]


def _numbers(value: object) -> list[float]:
    """`value` where it is a list of numbers, else an empty one."""
    found = [number(item) for item in cast("list[object]", value)] if isinstance(value, list) else []
    return [item for item in found if item is not None] if None not in found else []
