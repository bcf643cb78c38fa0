"""How figures look: colours that colour-blind readers can tell apart (Okabe and Ito), on light and on dark."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

THEMES = {
    "light": {"ink": "#24292f", "faint": "#d8dee4", "paper": "#ffffff"},
    "dark": {"ink": "#d5dbe1", "faint": "#3a424c", "paper": "#161b22"},
}
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2a86c8", "#e69f00", "#1fa37a", "#d55e00", "#c071a0", "#8b949e"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)


@contextmanager
def theme(name: str = "light") -> Iterator[None]:
    """Within it, figures are drawn in this theme: ``light`` or ``dark``. Matplotlib's settings come back afterwards."""
    ink, faint, paper = THEMES[name].values()
    settings: Any = {  # Any: matplotlib types the keys as literals
        "figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper,
        "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink,
        "axes.edgecolor": GREY, "axes.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": faint, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 10,
        "axes.labelsize": 9.5, "xtick.labelsize": 9, "ytick.labelsize": 9,
        "legend.frameon": False, "legend.fontsize": 9,
        "font.family": "DejaVu Sans", "lines.linewidth": 1.7, "lines.solid_capstyle": "round",
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        yield


def png(figure: Figure, dots_per_inch: int = 130) -> bytes:
    """The figure as PNG, drawn without a display and with nothing in it that changes from run to run."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as SVG text that is the same from run to run, so that it can be committed: no date, fixed ids."""
    buffer = io.StringIO()
    settings: Any = {"svg.hashsalt": "nemo_sspo"}
    with matplotlib.rc_context(settings):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def new_figure(columns: int = 1, rows: int = 1) -> Figure:
    """An empty figure, as wide and high as so many panels need."""
    padding = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, hspace=0.03, wspace=0.03)
    return Figure(figsize=(6.4 * columns, 3.7 * max(rows, 1)), layout=padding)


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def finish(axes: Axes, x_label: str, y_label: str, legend: Any = "best") -> None:
    """Labels, whole numbers on the x axis, and a legend where there is more than one thing to tell apart."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, loc=legend)
