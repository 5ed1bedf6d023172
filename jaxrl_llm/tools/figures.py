"""The style of figures, and the one function that writes them to files."""
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, distinguishable with any colour vision and in print; then two more for long lists.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#000000", "#7A4FBF", "#8B5A2B")
_DPI = 130
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextlib.contextmanager
def figure_file(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """An empty matplotlib figure, size in inches, without a window; written to `path` (PNG) if the block raises no error."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained", dpi=_DPI)
        FigureCanvasAgg(figure)
        yield figure
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine()  # none: with one, all would be drawn twice, the first time for the layout alone
        figure.savefig(path, dpi=_DPI, facecolor="white")
