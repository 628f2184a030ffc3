"""The charts of runs and of their scaling, drawn with matplotlib, which is imported only then."""

import io
import logging
import math
import warnings
from base64 import b64encode
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from muster.report.runs import Run
from muster.report.scaling import Scaling
from muster.units import quantity

WIDTH_INCHES, HEIGHT_INCHES = 5.6, 3.5

MAX_POINTS, MAX_TICKS = 400, 12

# After Okabe and Ito: the colour-blind can tell them apart too.
COLORS = ("#0067a8", "#c24a00", "#007a59", "#a83a74", "#7a5c00", "#4a4fb3", "#27788f", "#555b66")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
TEXT, MUTED, GRID = "#1b2130", "#596275", "#e2e6ec"

STYLE: dict[str, Any] = {
    # Names of runs and hosts may hold dollar signs.
    "text.parse_math": False,
    "text.color": TEXT,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "font.size": 9,
    "legend.frameon": False,
    "lines.markersize": 5,
    "figure.constrained_layout.use": True,
    # Text stays text, and the same chart gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "muster",
}

LEARNING = (
    "Solid lines: training, the mean over the epoch so far, each step by the weights that it had. Dashed lines: "
    "validation, after each epoch."
)


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        note: how to read it.
        base64: the SVG file, encoded for a data: URL in the page.
    """

    title: str
    note: str
    base64: str


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: its name in the legend; None without one.
        index: selects the colour and the marker: mostly the index of its run or scaling.
        points: y by x, x ascending.
        style: matplotlib's name of the line style.
    """

    label: str | None
    index: int
    points: Mapping[float, float]
    style: str = "-"


@contextmanager
def _style() -> Generator[None]:
    """A context in which charts have our look, whatever the user's matplotlibrc says."""
    # matplotlib logs warnings about its cache where the home directory can't be written.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # Here and not above: it takes half a second.
    from matplotlib import style

    with warnings.catch_warnings(), style.context(STYLE, after_reset=True):
        # Letters that the font lacks are drawn as boxes, without a warning.
        warnings.simplefilter("ignore")
        yield


def of_runs(runs: Sequence[Run]) -> list[Chart]:
    """The charts of `runs`; those that would show nothing, or one point, are left out."""
    rates = [(f"{unit}_per_second", f"{unit} a second") for unit in sorted({run.unit for run in runs})]
    with _style():
        charts = [
            _over_steps("Loss", "cross-entropy loss", _learning(runs, "loss"), LEARNING, of="loss"),
            _over_steps("Accuracy", "share of right answers", _learning(runs, "accuracy"), LEARNING, of="share"),
            _over_steps("Perplexity", "perplexity", _learning(runs, "perplexity"), LEARNING, of="loss"),
            *(
                _over_steps("Throughput over steps", label, _curves(runs, name), "All ranks together.")
                for name, label in rates
            ),
            _over_steps("Memory over steps", "GiB, rank 0", _curves(runs, "memory_gib")),
        ]
    return [chart for chart in charts if chart is not None]


def of_scalings(scalings: Sequence[Scaling]) -> list[Chart]:
    """Charts of throughput and efficiency over the ranks, with one line for each group of runs of the same work."""
    charts: list[Chart] = []
    with _style():
        for kind, unit in dict.fromkeys((found.kind, found.unit) for found in scalings):
            group = [found for found in scalings if (found.kind, found.unit) == (kind, unit)]
            title = f"{kind.capitalize()} scaling"
            charts += [
                _over_ranks(f"{title}: throughput", f"{unit} a second", group, "rate"),
                _over_ranks(f"{title}: efficiency", "share of the ideal rate", group, "efficiency"),
            ]
    return charts


def _learning(runs: Sequence[Run], name: str) -> list[Line]:
    """The lines of `name` over the steps, in training and in validation."""
    lines: list[Line] = []
    several = len(runs) > 1
    for index, run in enumerate(runs):
        if name == "accuracy" and run.unit == "tokens":
            continue  # for next tokens accuracy says little
        train, valid = _points(run, f"train_{name}"), _points(run, f"valid_{name}")
        if train:
            lines.append(Line(run.label if several else "training", index, train))
        if valid:
            # With several runs, colour and marker say which run it belongs to.
            label = "validation" if not several else None if train else f"{run.label}, validation"
            lines.append(Line(label, index if several else 1, valid, "--"))
    return lines


def _curves(runs: Sequence[Run], name: str) -> list[Line]:
    return [Line(run.label, index, points) for index, run in enumerate(runs) if (points := _points(run, name))]


def _points(run: Run, name: str) -> dict[float, float]:
    """The run's curve, thinned out to MAX_POINTS."""
    return dict(_some(list(run.curve(name).items()), MAX_POINTS))


def _some(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of `items`, evenly spaced, the last one included."""
    stride = max(1, math.ceil(len(items) / most))
    return list(items[::-1][::stride][::-1])


def _over_steps(
    title: str, y_label: str, lines: Sequence[Line], note: str = "", of: Literal["loss", "share", "amount"] = "amount"
) -> Chart | None:
    """A chart of lines over the steps; None where no line has two points.

    Args:
        of: the kind of quantity on the y axis; it decides where the axis begins and how its numbers are written.
    """
    if max((len(line.points) for line in lines), default=0) < 2:
        return None
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, axes = _figure(title, "step", y_label, lines)
    # A step is a whole number.
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(_tick)
    axes.yaxis.set_major_formatter(PercentFormatter(1) if of == "share" else _tick)
    low, high = axes.dataLim.intervaly
    if of == "loss" and 0 < low < high / 20:
        # A first loss that is far off would press all others against the axis.
        _log_scale(axes)
    elif of != "loss" and low >= 0:
        axes.set_ylim(bottom=0)
    return _chart(title, note, figure)


def _over_ranks(title: str, y_label: str, group: Sequence[Scaling], name: str) -> Chart:
    """A chart of the attribute `name` of the scalings' points over the number of ranks, with the ideal values."""
    from matplotlib.ticker import PercentFormatter

    measured: list[Line] = []
    ideal: list[Line] = []
    for index, found in enumerate(group):
        first = found.points[0]
        start = getattr(first, name)
        points = {float(point.world): getattr(point, name) for point in found.points}
        best = {world: start if name == "efficiency" else start * world / first.world for world in points}
        measured.append(Line(found.title.partition(": ")[2] if len(group) > 1 else "measured", index, points))
        ideal.append(Line(None if ideal else "ideal", index, best, ":"))
    figure, axes = _figure(title, "ranks", y_label, [*measured, *ideal])
    worlds = sorted({world for line in measured for world in line.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(_some(worlds, MAX_TICKS))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(_tick)
    if name == "efficiency":
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylim(bottom=0)
    else:
        _log_scale(axes)
    return _chart(title, "", figure)


def _figure(title: str, x_label: str, y_label: str, lines: Sequence[Line]) -> tuple[Any, Any]:
    """A figure and its axes, with lines that differ in colour and marker; with several labels, a legend below."""
    from matplotlib.figure import Figure  # without a window system

    figure: Any = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
    axes = figure.subplots()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    for line in lines:
        is_ideal = line.style == ":"
        axes.plot(
            list(line.points),
            list(line.points.values()),
            linestyle=line.style,
            color=MUTED if is_ideal else COLORS[line.index % len(COLORS)],
            marker="" if is_ideal else MARKERS[line.index % len(MARKERS)],
            markevery=max(1, len(line.points) // 8) if line.style == "-" else 1,
            label=line.label and _label(line.label),
        )
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, min(4, 80 // (max(map(len, labels)) + 8)))
        figure.set_figheight(HEIGHT_INCHES + 0.22 * math.ceil(len(labels) / columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure, axes


def _log_scale(axes: Any) -> None:
    """Makes the y axis logarithmic, with about five round numbers on it, whatever its range."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = axes.dataLim.intervaly
    axes.set_yscale("log")
    many = LogLocator(subs=(1, 2, 5) if high / 1e3 < low else (1,))
    axes.yaxis.set_major_locator(many if high / 4 > low else MaxNLocator(6))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(_tick)


def _tick(value: float, _: int | None = None) -> str:
    return quantity(value)


def _label(text: str) -> str:
    """`text` as a legend takes it: not wider than the chart, and shown even if it begins with an underscore."""
    short = text if len(text) <= 64 else f"{text[:44]} ... {text[-15:]}"
    return f"\u200b{short}" if short.startswith("_") else short


def _chart(title: str, note: str, figure: Any) -> Chart:
    file = io.BytesIO()
    # Without date and version, which would differ where the picture doesn't.
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Chart(title, note, b64encode(file.getvalue()).decode())
