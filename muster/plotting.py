"""matplotlib, as every chart here uses it: one look, no chatter, and text that is never read as a formula."""

import io
import logging
import os
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

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
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.color": MUTED,
    "ytick.labelsize": 9,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.constrained_layout.use": True,
    "figure.dpi": 160,
    "savefig.dpi": "figure",
    # Text stays text, and the same chart gives the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "muster",
}


@contextmanager
def style() -> Generator[None]:
    """Draws in our look, whatever the user's matplotlibrc says."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if "MPLCONFIGDIR" not in os.environ and not os.access(os.path.expanduser("~"), os.W_OK):
        # Else it speaks of its cache where the home folder can't be written.
        os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="muster-matplotlib-")
    # Here and not above: it takes half a second.
    from matplotlib import style

    with warnings.catch_warnings(), style.context(STYLE, after_reset=True):
        # A name in a script that the font lacks is drawn as boxes, and that is all.
        warnings.simplefilter("ignore")
        yield


def subplots(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes, without a window system."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height))
    return figure, figure.subplots(1, columns)


def svg(figure: Any) -> bytes:
    """The figure, drawn within `style`, as an SVG file that is see-through where nothing is drawn."""
    file = io.BytesIO()
    # Without date and version, which would differ where the picture doesn't.
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()
