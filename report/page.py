"""The page: one HTML file that needs nothing else."""

from collections.abc import Sequence
from html import escape
from typing import Any

from report import facts, scaling, svg, units
from report.charts import FORMATS, Chart, Series
from report.facts import Section
from report.runs import Run, number, record, records
from report.scaling import Scaling
from report.style import CSS
from train.errors import one_line

MARK = '<meta name="generator" content="muster report">'
"""Tells a report from other pages: only a report is written over."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

MOST_ROWS, MOST_RANKS, LONG = 12, 64, 16


def page(
    runs: Sequence[Run],
    sections: Sequence[Section],
    scalings: Sequence[tuple[Scaling, list[Chart]]],
    charts: Sequence[Chart],
    notes: Sequence[str],
) -> str:
    """The whole file. The same input gives the same bytes."""
    title = name(runs)
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{text(title)}</title>\n<style>\n{CSS}\n</style>\n</head>\n<body>\n<main>\n",
        f'<header>\n<h1>{text(title)}</h1>\n<p class="lead">{text(lead(runs))}</p>\n</header>\n',
        cards(runs, [found for found, _ in scalings]),
        *(f'<p class="note warn">{text(note)}</p>\n' for note in notes),
    ]
    for found, drawn in scalings:
        said = "".join(f'<p class="note warn">{text(note)}</p>\n' for note in found.notes)
        said += f'<p class="note">{text(scaling.DEFINITION)}</p>\n'
        parts.append(section(found.title, scaling_table(found) + said + figures(drawn)))
    several = len(runs) > 1
    side = section("Side by side" if several else "Numbers", fact_table(runs, sections))
    over = section("Over the runs" if several else "Over the run", figures(charts)) if charts else ""
    # Of several runs one compares the numbers first; of one the lines tell more.
    parts += [side, over] if several else [over, side]
    if not several and (of_ranks := ranks(runs[0])):
        parts.append(section("Ranks", of_ranks))
    parts.append(section("Commands, software, options", "".join(details(run, with_ranks=several) for run in runs)))
    parts.append("<footer>Made by muster report. This file needs no network.</footer>\n</main>\n</body>\n</html>\n")
    return "".join(parts)


def section(title: str, body: str) -> str:
    """A part of the page with its heading."""
    return f"<section>\n<h2>{text(title)}</h2>\n{body}</section>\n"


def text(value: str) -> str:
    """`value` for HTML, on one line."""
    return escape(one_line(value))


def name(runs: Sequence[Run]) -> str:
    """The page's title: the run's name, that of the `train scale` which made all of them, or how many they are."""
    if len(runs) == 1:
        return runs[0].label
    folders = {run.folder.resolve().parent for run in runs}
    return folders.pop().name if len(folders) == 1 and runs[0].scale else f"{len(runs)} runs"


def lead(runs: Sequence[Run]) -> str:
    """What ran, in a line."""
    found = dict.fromkeys(
        f"{run.text('model')} on {run.text('data')}, {run.text('strategy')}" for run in runs if run.text("model")
    )
    if len(runs) > 1:
        shown = max(1, min(6, 120 // max(len(run.label) for run in runs)))
        names = ", ".join(run.label for run in runs[:shown])
        names += f" and {len(runs) - shown} more" if len(runs) > shown else ""
        return "; ".join([*list(found)[:3], *(["..."] if len(found) > 3 else [])]) + (". " if found else "") + names
    run = runs[0]
    where = [f"{units.count(run.world_size)} rank{'s' if run.world_size != 1 else ''}"] if run.world_size else []
    where += [facts.hardware(run)] if run.summary else []
    where += [facts.hosts(run)] if run.summary else []
    return ", ".join([*found, *where, facts.state(run)])


def cards(runs: Sequence[Run], scalings: Sequence[Scaling]) -> str:
    """The few numbers that one looks for first."""
    shown = [
        f'<div><dt>{text(name)}</dt><dd><span class="big">{text(big)}</span><br>'
        f'<span class="small">{text(small)}</span></dd></div>\n'
        for name, big, small in (_of_one(runs[0]) if len(runs) == 1 else _of_several(runs, scalings))
        if big != units.NONE
    ]
    return f'<dl class="cards">\n{"".join(shown)}</dl>\n' if shown else ""


def _of_one(run: Run) -> list[tuple[str, str, str]]:
    step = {name: units.seconds(run.number("step_time_s", name)) for name in ("p50", "p95", "p99")}
    peak = run.number("peak_flops_per_second")
    return [
        (f"{run.unit} a second", units.rate(run.rate), f"{units.rate(run.rate_per_rank)} a rank"),
        ("step, median", step["p50"], f"{step['p95']} p95, {step['p99']} p99"),
        (
            "validation accuracy",
            units.accuracy(facts.accuracy(run)),
            f"{units.accuracy(facts.best_accuracy(run))} at best",
        ),
        (
            "validation loss",
            units.loss(facts.last(run, "valid_loss")),
            f"{units.loss(facts.last(run, 'train_loss'))} training",
        ),
        ("MFU", units.share(run.number("mfu")), f"of {units.rate(peak)}FLOP/s" if peak else "model FLOPs of the peak"),
        ("peak memory", units.memory(run.number("peak_memory_gib")), "of the fullest rank"),
        ("energy", facts.energy(run), f"of all GPUs, {facts.ONE[run.unit]}"),
        ("time", units.duration(run.number("seconds")), f"{units.count(run.last_step)} steps in all"),
    ]


def _of_several(runs: Sequence[Run], scalings: Sequence[Scaling]) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for scaled in scalings[:2]:
        last = scaled.points[-1]
        found.append((f"efficiency on {last.world} ranks", units.share(last.efficiency), f"{scaled.kind} scaling"))
    units_seen = {run.unit for run in runs if run.rate}
    if len(units_seen) == 1:
        fastest = max(runs, key=lambda run: run.rate or 0.0)
        found.append((f"most {fastest.unit} a second", units.rate(fastest.rate), fastest.label))
    learned = [run for run in runs if facts.best_accuracy(run) is not None]
    if learned:
        best = max(learned, key=lambda run: facts.best_accuracy(run) or 0.0)
        found.append(("best validation accuracy", units.accuracy(facts.best_accuracy(best)), best.label))
    held = [run for run in runs if run.number("peak_memory_gib")]
    if held:
        most = max(held, key=lambda run: run.number("peak_memory_gib") or 0.0)
        found.append(("most memory, a rank", units.memory(most.number("peak_memory_gib")), most.label))
    return found


def run_head(run: Run, index: int) -> str:
    """The head of the run's column: its name with the marker that its lines have."""
    mark = svg.swatch(Series(run.label, (), index))
    long = ' class="long"' if len(run.label) > LONG else ""
    return f'<th scope="col"{long}>{mark} {text(run.label)}</th>'


def fact_table(runs: Sequence[Run], sections: Sequence[Section]) -> str:
    """Runs side by side."""
    several = len(runs) > 1
    parts: list[str] = ['<div class="scroll" tabindex="0" role="region" aria-label="Numbers of the runs">\n<table>\n']
    if several:
        heads = "".join(run_head(run, index) for index, run in enumerate(runs))
        parts.append(f'<thead><tr><th scope="col">run</th>{heads}</tr></thead>\n')
    for section in sections:
        parts.append(f'<tbody>\n<tr class="section"><th scope="rowgroup">{text(section.title)}</th>')
        parts.append(f'<td colspan="{len(runs)}"></td></tr>\n')
        for row in section.rows:
            cells = "".join(f"<td>{text(cell)}</td>" for cell in row.cells)
            parts.append(f'<tr><th scope="row">{text(row.label)}</th>{cells}</tr>\n')
        parts.append("</tbody>\n")
    return "".join([*parts, "</table>\n</div>\n"])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str) -> str:
    """A table in a box of its own, in which it scrolls."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>\n'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}">\n<table class="tight">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def scaling_table(found: Scaling) -> str:
    """One scaling as a table."""
    return table(*scaling.rows(found), found.title)


def figures(charts: Sequence[Chart]) -> str:
    """Charts, each with its legend and its numbers."""
    return f'<div class="charts">\n{"".join(figure(chart) for chart in charts)}</div>\n'


def figure(chart: Chart) -> str:
    """A chart with all that belongs to it."""
    named = [series for series in chart.series if series.is_named]
    items = "".join(f"<li>{svg.swatch(series)}{text(series.label)}</li>" for series in named)
    legend = f'<ul class="legend">{items}</ul>\n' if len(named) > 1 else ""
    note = f'<p class="note">{text(chart.note)}</p>\n' if chart.note else ""
    return (
        f"<figure>\n<figcaption><h3>{text(chart.title)}</h3><p>{text(chart.y_label)}</p></figcaption>\n"
        f"{svg.drawing(chart)}\n{legend}{note}<details><summary>Numbers</summary>\n{numbers(chart)}</details>\n</figure>\n"
    )


def numbers(chart: Chart) -> str:
    """What the chart shows, as a table: some of it where it is much."""
    write_x = FORMATS[chart.x_unit]
    if any(series.style == "steps" for series in chart.series):
        rows = [row for series in chart.series for row in _bins(series)]
        return table(["run", "from", "to", "share"], rows, chart.title)
    if chart.categories:
        rows = [
            [name, *(svg.precise(chart, dict(series.points).get(float(index))) for series in chart.series)]
            for index, name in enumerate(chart.categories)
        ]
        return table([chart.x_label, *(series.label for series in chart.series)], rows, chart.title)
    # Few points, as those of validations, must not fall between the rows that many are thinned out to.
    few = {x for series in chart.series if series.style == "dashed" for x, _ in series.points}
    kept = sorted({*_some({x for series in chart.series for x, _ in series.points}), *_some(few)})
    values = [dict(series.points) for series in chart.series]
    rows = [[write_x(x), *(svg.precise(chart, known.get(x)) for known in values)] for x in kept]
    return table([chart.x_label, *(series.label for series in chart.series)], rows, chart.title)


def _some(xs: set[float]) -> list[float]:
    """At most about MOST_ROWS of `xs`, evenly, with the last."""
    ordered = sorted(xs)
    stride = -(-len(ordered) // MOST_ROWS) or 1
    return [x for index, x in enumerate(ordered) if (len(ordered) - 1 - index) % stride == 0]


def _bins(series: Series) -> list[list[str]]:
    """A histogram in fewer parts."""
    points = series.points
    stride = max(1, -(-(len(points) - 1) // MOST_ROWS))
    rows: list[list[str]] = []
    for start in range(0, len(points) - 1, stride):
        end = min(start + stride, len(points) - 1)
        total = sum(y or 0.0 for _, y in points[start:end])
        rows.append([series.label, units.seconds(points[start][0]), units.seconds(points[end][0]), units.share(total)])
    return rows


def ranks(run: Run) -> str:
    """The run's ranks, the slowest first where there are too many."""
    found = records(run.summary.get("ranks"))
    if len(found) < 2:
        return ""
    slowest = number(record(run.summary.get("slowest_rank")).get("rank"))
    much = len(found) > MOST_RANKS
    if much:
        found = sorted(found, key=lambda rank: -(number(rank.get("busy_s")) or 0.0))[:MOST_RANKS]
    rows = [
        [
            units.count(number(rank.get("rank"))) + (" (slowest)" if number(rank.get("rank")) == slowest else ""),
            str(rank.get("host") or units.NONE),
            units.seconds(number(rank.get("busy_s"))),
            units.seconds(number(rank.get("step_s"))),
            units.seconds(number(rank.get("data_wait_s"))),
            units.memory(number(rank.get("peak_memory_gib"))),
        ]
        for rank in found
    ]
    heads = ["rank", "host", "busy a step", "step", "waiting for data", "peak memory"]
    note = f'<p class="note">The {MOST_RANKS} slowest.</p>\n' if much else ""
    return table(heads, rows, f"Ranks of {run.label}") + note


def details(run: Run, *, with_ranks: bool) -> str:
    """The command, the software and the options of a run; and its ranks, where they have no section of their own."""
    parts = [f'<details class="run"><summary>{text(run.label)}</summary>\n']
    if run.text("command"):
        parts.append(f"<pre>{text(run.text('command') or '')}</pre>\n")
    parts += [f'<p class="note warn">{text(note)}</p>\n' for note in run.notes]
    software = {name: value for name, value in record(run.summary.get("versions")).items() if value is not None}
    known = {"folder": str(run.folder), "resumed from": run.text("resumed_from"), "trace": run.text("profile")}
    parts.append(pairs({**{name: value for name, value in known.items() if value}, **software}))
    options = record(run.summary.get("options"))
    if options:
        parts.append(f"<h3>Options</h3>\n{pairs(options)}")
    if with_ranks and (of_ranks := ranks(run)):
        parts.append(f"<h3>Ranks</h3>\n{of_ranks}")
    return "".join([*parts, "</details>\n"])


def pairs(values: dict[str, Any] | Any) -> str:
    """Names and values."""
    shown = "".join(
        f"<div><dt>{text(str(name))}</dt><dd>{text(_value(value))}</dd></div>\n" for name, value in values.items()
    )
    return f'<dl class="pairs">\n{shown}</dl>\n'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return units.NONE if value is None else str(value)
