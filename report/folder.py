"""The folder that a report is written to: a new one, or that of an earlier report."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from report.charts import Chart
from report.page import MARK
from report.runs import Run
from train.errors import MusterError

PAGE = "index.html"

OURS = re.compile(
    r"(loss|accuracy|throughput(-images|-tokens)?|step-times|time|memory|scaling-(rate|efficiency)(-[0-9]+)?)\.png"
)


def choose(given: Sequence[str], runs: Sequence[Run], output: Path | None) -> Path:
    """Where the report goes: `output`, else report/ in the one folder that was given, else here.

    Raises:
        MusterError: what is there is no report.
    """
    if output is None:
        only = Path(given[0])
        inside = runs[0].folder if len(runs) == 1 else only
        output = (inside if len(given) == 1 else Path()) / "report"
    page = output / PAGE
    try:
        is_taken = os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir()))
        is_report = is_taken and page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")[:1000]
    except OSError as error:
        raise _unwritable(output, error) from None
    if is_taken and not is_report:
        raise MusterError(
            "there is something here already that is no report, and it is not written over",
            seen=str(output),
            fix="--output FOLDER: a new one, or that of an earlier report",
        )
    return output


def write(folder: Path, html: str, charts: Sequence[Chart]) -> Path:
    """The page's path, after writing it and a PNG of each chart; those of an earlier report are gone.

    Raises:
        MusterError: the folder can't be written.
    """
    # Here and not above: it loads matplotlib.
    from report import plots

    try:
        folder.mkdir(parents=True, exist_ok=True)
        # First, as it marks the folder as a report: one that was stopped half-way can be made again.
        (folder / PAGE).write_text(html, encoding="utf-8")
        for old in folder.iterdir():
            if OURS.fullmatch(old.name):
                old.unlink()
        for chart in charts:
            plots.write(chart, folder / f"{chart.key}.png")
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / PAGE


def _unwritable(folder: Path, error: OSError) -> MusterError:
    return MusterError(
        f"the report can't be written: {error.strerror}",
        seen=str(folder),
        fix="--output FOLDER that this user may write",
    )
