"""Curves as SVG text that stands inside a page and takes its colours from it, and as a picture."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..files import atomic_file
from ..training.curves import Axis, thin

# Of the page's dark and light grounds each has a contrast of 3 or more (Okabe and Ito's colours, two darkened).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56a0d3")
_IDS = re.compile(r' id="(?:figure|axes|patch|line2d|matplotlib\.axis|xtick|ytick|text|legend|PathCollection)_\d+"')
_SALT = itertools.count()


@dataclass
class Line:
    """A curve; `dots` are drawn as marks."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    colour: int = 0


@dataclass
class Chart:
    """One picture over `tokens` or `hours`.

    `limit` is a horizontal line at a value, with its label; `marks` are vertical lines, which share `mark`.
    """

    title: str
    lines: list[Line] = field(default_factory=list)
    log: bool = False
    limit: tuple[float, str] | None = None
    over: Axis = "tokens"
    marks: Sequence[float] = ()
    mark: str = ""

    @property
    def drawn(self) -> list[Line]:
        """The lines that have enough points: two, or a dot."""
        return [line for line in self.lines if len(line.xs) > (0 if line.dots else 1)]


def points(xs: np.ndarray, ys: np.ndarray) -> tuple[list[float], list[float]]:
    """Where both are known, thinned."""
    xs, ys = thin(xs, ys)
    return xs.tolist(), ys.tolist()


def draw(chart: Chart) -> str | None:
    """The SVG element; None when no line has two points. Labels and titles are our own words, never a run's."""
    if not chart.drawn:
        return None
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The salt makes identifiers of several pictures in one page differ; text stays text.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"chart {next(_SALT)}"}):
        figure = Figure(figsize=(4.8, 2.9))
        figure.subplots_adjust(left=0.14, right=0.97, top=0.9, bottom=0.17)  # a layout engine takes most of the time
        FigureCanvasSVG(figure)
        _draw_on(figure.subplots(), chart)
        return _inline(figure, chart.title)


def write_picture(charts: Sequence[Chart], path: Path) -> bool:
    """Write the charts as one PNG or PDF, two in a row; whether there was anything to draw."""
    shown = [chart for chart in charts if chart.drawn]
    if not shown:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = -(-len(shown) // 2)
    figure = Figure(figsize=(12, 3.4 * down), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(down, 2, squeeze=False).ravel()
    for axes, chart in zip(places, shown, strict=False):
        _draw_on(axes, chart)
    for axes in places[len(shown) :]:
        axes.set_axis_off()
    kind = path.suffix.lstrip(".").lower()
    unstamped = {"Software": None} if kind == "png" else {"CreationDate": None}
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=110, metadata=unstamped)
    return True


def _draw_on(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    for line in chart.drawn:
        style = {"marker": "o", "linestyle": "", "markersize": 4} if line.dots else {"linewidth": 1.1}
        axes.plot(line.xs, line.ys, label=line.label, color=COLOURS[line.colour % len(COLOURS)], **style)
    if chart.limit is not None:
        axes.axhline(chart.limit[0], linestyle="--", linewidth=1, color=COLOURS[1], label=chart.limit[1])
    for number, x in enumerate(chart.marks):
        axes.axvline(x, linestyle=":", linewidth=1.2, color="#808080", label="" if number else chart.mark)
    values = [y for line in chart.drawn for y in line.ys]
    if chart.log and min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif max(map(abs, values)) >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    labelled = len(chart.drawn) > 1 or chart.limit is not None
    beside = (
        labelled and len(chart.drawn) < 3 and not chart.marks
    )  # a short legend stands beside the title, where it hides no line
    axes.set_title(chart.title, fontsize=10, loc="left" if beside else "center")
    axes.set_xlabel(chart.over, fontsize=9)
    if chart.over == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    if labelled:
        place: dict[str, Any] = {"loc": "upper right"}
        if beside:
            place = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "ncols": 2, "columnspacing": 1}
        axes.legend(**place, fontsize=8, handlelength=1.5, framealpha=0, labelcolor="black")


def _inline(figure: Any, title: str) -> str:
    """The figure's svg element without its fixed size, its black turned into the colour of the page's text."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    rest = _IDS.sub("", rest).replace("#000000", "currentColor").replace("stroke: #b0b0b0", "stroke: currentColor")
    # Text has no colour of its own unless it is given: SVG's default is black.
    return f'{head} role="img" aria-label="{title}" fill="currentColor">{rest}'
