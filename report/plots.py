"""Charts as PNG files, by matplotlib."""

import logging
import os
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import svg, units
from report.charts import FORMATS, NUM_COLORS, Chart, Series

# After Okabe and Ito: told apart by the colour-blind too.
COLORS = ("#0067a8", "#c24a00", "#007a59", "#a83a74", "#7a5c00", "#4a4fb3", "#27788f", "#555b66")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
TEXT, MUTED, GRID = "#1b2130", "#596275", "#e2e6ec"
SIZE_INCHES, DPI = (7.2, 4.5), 160


def write(chart: Chart, path: Path) -> None:
    """Puts the chart at `path`. The same chart gives the same bytes."""
    figure = draw(chart)
    # Without the version of matplotlib in it, which would differ where the picture doesn't.
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def draw(chart: Chart) -> Any:
    """The chart as a matplotlib figure."""
    _quiet()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    if chart.categories:
        _stacks(axes, chart)
        return figure
    if chart.x_is_log:
        axes.set_xscale("log")
    if chart.y_is_log:
        axes.set_yscale("log")
    for series in chart.series:
        _line(axes, series, chart)
    axes.set_title(chart.title, loc="left", color=TEXT, fontsize=13, fontweight="bold", pad=12, parse_math=False)
    axes.set_xlabel(chart.x_label, color=MUTED, parse_math=False)
    axes.set_ylabel(chart.y_label, color=MUTED, parse_math=False)
    for axis, unit in ((axes.xaxis, chart.x_unit), (axes.yaxis, chart.y_unit)):
        axis.set_major_formatter(FuncFormatter(partial(_tick, unit)))
    xs = [x for series in chart.series for x, _ in series.points]
    ticks = list(chart.x_ticks) or (units.log_ticks(min(xs), max(xs)) if chart.x_is_log else [])
    if ticks:
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.y_is_log:
        axes.yaxis.set_major_locator(FixedLocator(units.log_ticks(*axes.get_ylim())))
        axes.yaxis.set_minor_locator(NullLocator())
    elif chart.from_zero:
        axes.set_ylim(0, None if chart.y_top is None else chart.y_top * 1.12)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    _legend(figure, axes, [series for series in chart.series if series.is_named])
    return figure


def _legend(figure: Any, axes: Any, named: list[Series]) -> None:
    """Names the lines: inside where there is room, else below a figure that is so much taller."""
    if len(named) < 2:
        return
    longest = max(len(_short(series.label)) for series in named)
    if len(named) <= 4 and longest <= 24:
        legend = axes.legend(frameon=False, fontsize=9, labelcolor=TEXT)
    else:
        columns = max(1, min(4, 96 // (longest + 8)))
        figure.set_size_inches(SIZE_INCHES[0], SIZE_INCHES[1] + 0.2 * -(-len(named) // columns))
        legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=TEXT)
    for label in legend.get_texts():
        label.set_parse_math(False)


def _stacks(axes: Any, chart: Chart) -> None:
    places = range(len(chart.categories))
    before = [0.0] * len(chart.categories)
    for series in chart.series:
        values = [y or 0.0 for _, y in series.points]
        axes.barh(
            places,
            values,
            0.6,
            left=before,
            color=COLORS[series.color % NUM_COLORS],
            edgecolor="white",
            label=series.label,
        )
        for place, start, value in zip(places, before, values, strict=True):
            if value > 0.08:
                said = svg.precise(chart, value)
                axes.text(start + value / 2, place, said, ha="center", va="center", color="white", fontsize=9)
        before = [start + value for start, value in zip(before, values, strict=True)]
    axes.set_title(chart.title, loc="left", color=TEXT, fontsize=13, fontweight="bold", pad=12)
    axes.set_yticks(places, [_short(name) for name in chart.categories], parse_math=False)
    axes.set_ylim(len(chart.categories) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(partial(_tick, "share"))
    axes.set_xlabel(chart.y_label, color=MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, labelcolor=TEXT, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def _tick(unit: str, value: float, position: int | None = None) -> str:
    return FORMATS[unit](value)


def _line(axes: Any, series: Series, chart: Chart) -> None:
    xs = [x for x, _ in series.points]
    ys = [float("nan") if y is None else y for _, y in series.points]
    label = _short(series.label) if series.is_named else "_"
    if series.style == "steps":
        if len(chart.series) == 1:
            widths = [right - left for left, right in pairwise(xs)]
            axes.bar(
                xs[:-1],
                ys[:-1],
                width=widths,
                align="edge",
                color=COLORS[series.color % NUM_COLORS],
                alpha=0.9,
                linewidth=0,
            )
        else:
            peak = max(range(len(ys)), key=lambda index: ys[index])
            axes.step(xs, ys, where="post", color=COLORS[series.color % NUM_COLORS], linewidth=1.6)
            axes.plot(
                [xs[peak]],
                [ys[peak]],
                color=COLORS[series.color % NUM_COLORS],
                marker=MARKERS[svg.shape(series.color)],
                label=label,
                linewidth=1.6,
            )
        return
    if series.style == "ideal":
        axes.plot(xs, ys, color=MUTED, linestyle=(0, (1, 2.5)), label=label, linewidth=1.8)
        return
    is_marked = series.style in ("marked", "dashed")
    axes.plot(
        xs,
        ys,
        color=COLORS[series.color % NUM_COLORS],
        linestyle="--" if series.style == "dashed" else "-",
        marker=MARKERS[svg.shape(series.color)],
        markevery=1 if is_marked else max(1, len(xs) // 6),
        markersize=5,
        label=label,
        linewidth=1.8,
    )
    if series.has_values:
        for x, y in zip(xs, ys, strict=True):
            axes.annotate(
                svg.precise(chart, y),
                (x, y),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color=TEXT,
                parse_math=False,
            )


def _short(label: str) -> str:
    """`label` as a legend takes it: not as long as the plot is wide, and shown even if it begins with an underscore."""
    return ("\u200b" if label.startswith("_") else "") + (
        label if len(label) <= 40 else f"{label[:22]} ... {label[-13:]}"
    )


def _quiet() -> None:
    """Keeps matplotlib from speaking of its cache where the home folder can't be written."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    home = Path(os.path.expanduser("~"))
    if "MPLCONFIGDIR" not in os.environ and not os.access(home, os.W_OK):
        os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="muster-matplotlib-")
