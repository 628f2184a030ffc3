"""Charts as SVG inside of HTML: colours by CSS variables, so that they follow light and dark."""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

from report import units
from report.charts import FORMATS, NUM_COLORS, Chart, Series

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 44

STACK = 52

MOST_HOVERS = 60
"""Points of a line that show their value under the pointer."""

NUM_MARKERS = 8

Scale = Callable[[float], float]


def drawing(chart: Chart) -> str:
    """The chart as one <svg> element; titles, legend and table are for the page around it."""
    if chart.categories:
        parts, height = stacks(chart)
    else:
        view = View(chart)
        parts, height = [view.axes(), *(view.line(series) for series in chart.series)], HEIGHT
    head = (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{chart.key}-t {chart.key}-d">'
        f'<title id="{chart.key}-t">{escape(chart.title)}</title>'
        f'<desc id="{chart.key}-d">{escape(description(chart))}</desc>'
    )
    return head + "".join(parts) + "</svg>"


def description(chart: Chart) -> str:
    """The chart in a sentence, for those who can't see it."""
    parts: list[str] = []
    write = FORMATS[chart.y_unit]
    for series in chart.series:
        known = [y for _, y in series.points if y is not None]
        if chart.categories:
            values = zip(chart.categories, series.points, strict=True)
            parts.append(
                f"{series.label} {', '.join(f'{name} {write(y)}' for name, (_, y) in values if y is not None)}"
            )
        elif known and series.style == "steps":
            parts.append(f"{series.label} from {FORMATS[chart.x_unit](series.points[0][0])} to "
                         f"{FORMATS[chart.x_unit](series.points[-1][0])}")  # fmt: skip
        elif known:
            parts.append(f"{series.label} from {write(known[0])} to {write(known[-1])}")
    return f"{chart.y_label} by {chart.x_label}: {'; '.join(parts)}"


def marker(kind: int, x: float, y: float, size: float = 3.6) -> str:
    """A small shape around (x, y), another one for each kind: colour is not all that tells lines apart."""
    kind = shape(kind)
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    s = size * 1.1
    shapes = {
        1: [(-s, -s), (s, -s), (s, s), (-s, s)],
        2: [(0, -s * 1.2), (s * 1.15, s * 0.9), (-s * 1.15, s * 0.9)],
        3: [(0, -s * 1.35), (s * 1.35, 0), (0, s * 1.35), (-s * 1.35, 0)],
        4: [(0, s * 1.2), (s * 1.15, -s * 0.9), (-s * 1.15, -s * 0.9)],
        5: [(-s * 1.4, -s * 0.6), (s * 1.4, -s * 0.6), (s * 1.4, s * 0.6), (-s * 1.4, s * 0.6)],
        6: [(-s * 0.6, -s * 1.4), (s * 0.6, -s * 1.4), (s * 0.6, s * 1.4), (-s * 0.6, s * 1.4)],
        7: [(0, -s * 1.4), (s * 1.2, -s * 0.4), (s * 0.8, s * 1.1), (-s * 0.8, s * 1.1), (-s * 1.2, -s * 0.4)],
    }  # fmt: skip
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shapes[kind])
    return f'<polygon points="{points}"/>'


def shape(number: int) -> int:
    """Which of NUM_MARKERS markers the line of this number has: beyond the colours another one for each colour."""
    return (number + number // NUM_COLORS) % NUM_MARKERS


def swatch(series: Series) -> str:
    """A piece of the line, for the legend."""
    if series.style == "stack":
        bar = '<rect class="bar" x="2" y="1" width="24" height="12" rx="2"/>'
        return f'<svg class="swatch {_class(series)}" viewBox="0 0 28 14" aria-hidden="true">{bar}</svg>'
    line = f'<path class="l" d="M1,7H27"{_dash(series)}/>'
    mark = "" if series.style == "ideal" else marker(series.color, 14, 7)
    return f'<svg class="swatch {_class(series)}" viewBox="0 0 28 14" aria-hidden="true">{line}{mark}</svg>'


def _class(series: Series) -> str:
    return "ideal" if series.color < 0 else f"c{series.color % NUM_COLORS}"


def _dash(series: Series) -> str:
    return {"dashed": ' stroke-dasharray="5 4"', "ideal": ' stroke-dasharray="2 4"'}.get(series.style, "")


def stacks(chart: Chart) -> tuple[list[str], int]:
    """Bars one below the other, each with its name above it, and the height that they take."""
    parts: list[str] = []
    for index, name in enumerate(chart.categories):
        left, top = 0.0, index * STACK
        shown = name if len(name) <= 52 else f"{name[:32]} ... {name[-15:]}"
        parts.append(f'<text class="name" x="0" y="{top + 14}">{escape(shown)}</text>')
        for series in chart.series:
            share = dict(series.points).get(float(index)) or 0.0
            if share <= 0:
                continue
            width = min(share, 1.0) * WIDTH
            said = f"{escape(name)}, {escape(series.label)}: {escape(precise(chart, share))}"
            parts.append(f'<g class="{_class(series)}"><rect class="bar" x="{left:.1f}" y="{top + 20}" ')
            parts.append(f'width="{max(width - 1, 0.5):.1f}" height="22"><title>{said}</title></rect>')
            if width > 62:
                middle = left + width / 2
                parts.append(f'<text class="inside" x="{middle:.1f}" y="{top + 35}" text-anchor="middle">')
                parts.append(f"{escape(precise(chart, share))}</text>")
            parts.append("</g>")
            left += width
    return parts, len(chart.categories) * STACK


class View:
    """The scales of a chart, and what is drawn by them."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.is_bars = len(chart.series) == 1 and chart.series[0].style == "steps"
        xs = [x for series in chart.series for x, _ in series.points]
        ys = [y for series in chart.series for _, y in series.points if y is not None]
        low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        if chart.y_is_log:
            self.y_low, self.y_high = low * 0.85, high * 1.15
            self.y_ticks = units.log_ticks(self.y_low, self.y_high)
        else:
            low = 0.0 if chart.from_zero else low
            high = chart.y_top if chart.y_top is not None else high
            self.y_ticks = units.ticks(low, high if units.is_apart(low, high) else low + max(abs(low), 1e-3), 5)
            self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]
        self.x_low, self.x_high = min(xs), max(xs)
        if not units.is_apart(self.x_low, self.x_high):
            around = abs(self.x_low) * 0.1 or 1.0
            self.x_low, self.x_high = self.x_low - around, self.x_high + around
        self.inset = 18.0 if chart.x_ticks else 0.0
        if chart.x_ticks:
            self.x_ticks = list(chart.x_ticks)
        elif chart.x_is_log:
            self.x_ticks = units.log_ticks(self.x_low, self.x_high)
        else:
            self.x_ticks = [tick for tick in units.ticks(self.x_low, self.x_high, 6) if tick <= self.x_high]
            self.x_low = min(self.x_low, self.x_ticks[0]) if self.x_ticks else self.x_low
        self.x = _scale(self.x_low, self.x_high, LEFT + self.inset, WIDTH - RIGHT - self.inset, is_log=chart.x_is_log)
        self.y = _scale(self.y_low, self.y_high, HEIGHT - BOTTOM, TOP + 6, is_log=chart.y_is_log)

    def axes(self) -> str:
        """Grid, ticks and names of the axes."""
        chart = self.chart
        parts: list[str] = ['<g class="axis">']
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
            text = escape(FORMATS[chart.y_unit](value))
            parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        last = -math.inf
        for value in self.x_ticks:
            x, text = self.x(value), FORMATS[chart.x_unit](value)
            if x - last < 8 + 8 * len(text):
                continue
            last = x
            parts.append(f'<path class="tick" d="M{x:.1f},{HEIGHT - BOTTOM}v4"/>')
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>')
        parts.append(f'<path class="base" d="M{LEFT},{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="name" x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">')
        parts.append(f"{escape(chart.x_label)}</text></g>")
        return "".join(parts)

    def line(self, series: Series) -> str:
        """The line, its markers, and what the pointer shows."""
        if series.style == "steps":
            return self.steps(series)
        known = [(x, y) for x, y in series.points if y is not None]
        path = f'<path class="l" d="{self.path(series.points)}"{_dash(series)}/>'
        if series.style == "ideal":
            return f'<g class="{_class(series)}">{path}</g>'
        parts = [f'<g class="{_class(series)}">', path]
        marked = known if series.style in ("marked", "dashed") else _some(known, 6)
        parts += [marker(series.color, self.x(x), self.y(y)) for x, y in _some(marked, 40)]
        if series.has_values:
            parts += [self.value(x, y) for x, y in known]
        parts += [self.hover(series, x, y) for x, y in _some(known, MOST_HOVERS)]
        return "".join([*parts, "</g>"])

    def path(self, points: Sequence[tuple[float, float | None]]) -> str:
        """The commands that draw through `points`, anew after a gap."""
        words: list[str] = []
        is_down = False
        for x, y in points:
            if y is not None:
                words.append(f"{'L' if is_down else 'M'}{self.x(x):.1f},{self.y(y):.1f}")
            is_down = y is not None
        return "".join(words)

    def steps(self, series: Series) -> str:
        """A histogram: bars where it is alone, else an outline."""
        points = [(x, y or 0.0) for x, y in series.points]
        base = self.y(0.0)
        parts = [f'<g class="{_class(series)}">']
        outline = [f"M{self.x(points[0][0]):.1f},{base:.1f}"]
        for (x, share), (following, _) in pairwise(points):
            left, right, top = self.x(x), self.x(following), self.y(share)
            outline.append(f"V{top:.1f}H{right:.1f}")
            if self.is_bars and share:
                width = max(right - left - 0.8, 0.5)
                parts.append(f'<rect class="bar" x="{left + 0.4:.1f}" y="{top:.1f}" width="{width:.1f}" ')
                parts.append(f'height="{base - top:.1f}"/>')
            if share:
                said = f"{units.seconds(x)} to {units.seconds(following)}: {units.share(share)} of the steps"
                parts.append(f'<rect class="hover" x="{left:.1f}" y="{min(top, base - 8):.1f}" ')
                parts.append(f'width="{right - left:.1f}" height="{max(base - top, 8):.1f}">')
                parts.append(f"<title>{escape(series.label)}: {said}</title></rect>")
        if not self.is_bars:
            x, share = max(points, key=lambda point: point[1])
            following = next(after for after, _ in points if after > x)
            parts.append(f'<path class="l" d="{"".join(outline)}V{base:.1f}"/>')
            parts.append(marker(series.color, (self.x(x) + self.x(following)) / 2, self.y(share)))
        return "".join([*parts, "</g>"])

    def value(self, x: float, y: float) -> str:
        """The value of a point, written above it, or below where there is no room."""
        left, top = self.x(x), self.y(y)
        above = top - 9 if top > TOP + 26 else top + 19
        anchor = "start" if left < LEFT + 25 else "end" if left > WIDTH - RIGHT - 25 else "middle"
        left += {"start": -8, "end": 8, "middle": 0}[anchor]
        return f'<text class="value" x="{left:.1f}" y="{above:.1f}" text-anchor="{anchor}">{self.said(y)}</text>'

    def said(self, y: float) -> str:
        """A value of the y axis, precisely."""
        return escape(precise(self.chart, y))

    def hover(self, series: Series, x: float, y: float) -> str:
        """A spot that tells its value under the pointer."""
        where = f"{self.chart.x_label} {FORMATS[self.chart.x_unit](x)}"
        said = f"{escape(series.label)}, {escape(where)}: {self.said(y)}"
        return f'<circle class="hover" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="7"><title>{said}</title></circle>'


def precise(chart: Chart, y: float | None) -> str:
    """A value of the y axis, with more digits than the axis has."""
    if y is None:
        return units.NONE
    write = {"share": units.share, "rate": units.rate, "loss": units.loss}.get(chart.y_unit)
    return write(y) if write is not None else FORMATS[chart.y_unit](y)


def _scale(low: float, high: float, start: float, end: float, *, is_log: bool) -> Scale:
    """From values to positions: all in the middle where the ends are too near, or too far, to tell values apart."""
    if not units.is_apart(low, high):
        return lambda _: (start + end) / 2
    if is_log:
        return lambda value: (
            start + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (end - start)
        )
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _some(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` of `points`, evenly, with the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
