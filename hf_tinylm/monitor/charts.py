"""Curves as SVG text that stands inside a page and takes its colours from it."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MOST_POINTS = 800  # of one line
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
    """One picture; `limit` is a horizontal line at a value, with its label."""

    title: str
    lines: list[Line] = field(default_factory=list)
    log: bool = False
    limit: tuple[float, str] | None = None


def points(xs: np.ndarray, ys: np.ndarray) -> tuple[list[float], list[float]]:
    """Where both are known, thinned."""
    known = ~(np.isnan(xs) | np.isnan(ys))
    xs, ys = thin(xs[known], ys[known])
    return xs.tolist(), ys.tolist()


def thin(xs: np.ndarray, ys: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: the lowest and the highest of each stretch, so that no spike is lost, and the last."""
    if len(xs) <= most:
        return xs, ys
    kept = {len(xs) - 1}
    for part in np.array_split(np.arange(len(xs)), most // 2 - 1):
        kept |= {int(part[0] + ys[part].argmin()), int(part[0] + ys[part].argmax())}
    chosen = np.array(sorted(kept))
    return xs[chosen], ys[chosen]


def draw(chart: Chart) -> str | None:
    """The SVG element; None when no line has two points. Labels and titles are our own words, never a run's."""
    drawn = [line for line in chart.lines if len(line.xs) > (0 if line.dots else 1)]
    if not drawn:
        return None
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    # The salt makes identifiers of several pictures in one page differ; text stays text.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"chart {next(_SALT)}"}):
        figure = Figure(figsize=(6, 3.2))
        figure.subplots_adjust(left=0.12, right=0.98, top=0.9, bottom=0.16)  # a layout engine takes most of the time
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for line in drawn:
            style = {"marker": "o", "linestyle": "", "markersize": 4} if line.dots else {"linewidth": 1.1}
            axes.plot(line.xs, line.ys, label=line.label, color=COLOURS[line.colour % len(COLOURS)], **style)
        if chart.limit is not None:
            axes.axhline(chart.limit[0], linestyle="--", linewidth=1, color=COLOURS[1], label=chart.limit[1])
        values = [y for line in drawn for y in line.ys]
        if chart.log and min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif max(map(abs, values)) >= 1e4:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_title(chart.title, fontsize=11)
        axes.set_xlabel("tokens", fontsize=9)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=9)
        axes.grid(alpha=0.25)
        if len(drawn) > 1 or chart.limit is not None:
            axes.legend(fontsize=8, framealpha=0, labelcolor="black")
        return _inline(figure, chart.title)


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
