"""The plot: bus bandwidth and time by size, one line a collective. It loads matplotlib."""

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from check.bench.results import Row
from check.bench.sizes import shown


def write(path: Path, rows: Sequence[Row], title: str) -> None:
    """Writes the PNG of `rows`; without a bus bandwidth, at one rank, the algorithm's is shown.

    Raises:
        OSError: it can't be written.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if "MPLCONFIGDIR" not in os.environ and not os.access(os.path.expanduser("~"), os.W_OK):
        # Else it speaks of its cache where the home folder can't be written.
        os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="muster-matplotlib-")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    figure: Any = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, time = figure.subplots(1, 2)
    measured = [row for row in rows if row.size and row.middle is not None]
    for name in dict.fromkeys(row.collective for row in measured):
        own = [row for row in measured if row.collective == name]
        sizes = [row.size for row in own]
        bandwidths = [row.algbw if row.busbw is None else row.busbw for row in own]
        speed.plot(sizes, bandwidths, marker="o", markersize=3, label=name)
        time.plot(sizes, [1e6 * (row.time_s or 0) for row in own], marker="o", markersize=3, label=name)
    is_alone = all(row.busbw is None for row in measured)
    speed.set_ylabel(f"{'algorithm' if is_alone else 'bus'} bandwidth, 10^9 bytes/s")
    time.set_ylabel("time of a call, us")
    ticks = sorted({row.size for row in measured if row.collective == measured[0].collective})
    for axes in (speed, time):
        axes.set_xlabel("message")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks[:: max(1, -(-len(ticks) // 8))]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_tick))
        axes.grid(alpha=0.3)
    time.set_yscale("log")
    time.yaxis.set_major_formatter(FuncFormatter(_plain))
    time.yaxis.set_minor_formatter(NullFormatter())
    if measured:
        speed.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium", parse_math=False)
    # Without the version of matplotlib in it, which would differ where the picture doesn't.
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _tick(size: float, _: Any) -> str:
    return shown(round(size))


def _plain(value: float, _: Any) -> str:
    return f"{value:g}"
