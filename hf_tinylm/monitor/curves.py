"""The curves of a run: what its charts show, over tokens or hours."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..training.curves import Axis
from .charts import Chart, Line, draw, points
from .follow import column, number
from .html import Html, element, missing
from .run import Run

_PLACES = {"tokens": ("supervised_tokens", 1.0), "hours": ("wall_seconds", 3600.0)}


def run_charts(run: Run, over: Axis = "tokens") -> list[Chart]:
    """Loss with validation, rate, gradient norm with its limit, speed, and MFU where the peak is known."""
    places = _places(run, over)
    limit = number(run.fact("identity", "training"), "max_grad_norm")

    def line(label: str, key: str) -> Line:
        return Line(label, *points(places, column(run.updates, key)))

    others = [validation(run, of, 2 + i, over, of) for i, of in enumerate(eval_sets(run))]
    norm = Chart("gradient norm before clipping", [line("norm", "grad_norm")], log=True, over=over)
    norm.limit = (limit, f"clipped above {limit:g}") if limit and norm.lines[0].ys else None
    return [
        Chart("loss, nats per token", [line("training", "loss"), validation(run, over=over), *others], over=over),
        Chart("learning rate", [line("rate", "learning_rate")], over=over),
        norm,
        Chart("tokens per second while training", [line("speed", "tokens_per_second")], over=over),
        Chart("MFU, share of the device's peak", [line("mfu", "mfu")], over=over),
    ]


def validation(
    run: Run, label: str = "validation", colour: int = 1, over: Axis = "tokens", of: str | None = None
) -> Line:
    """The validation losses, or those of the set `of`, at the tokens or hours of their updates."""
    places, losses = validation_points(run, over, of)
    return Line(plain(label), *points(places, losses), dots=True, colour=colour)


def validation_points(run: Run, over: Axis = "tokens", of: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Where each validation was, and its loss, both (evaluations,); nan where it is not known."""
    steps, places, scored = column(run.updates, "step"), _places(run, over), run.evaluations
    wanted = column(scored, "step")
    known = np.isin(steps, wanted)
    place_of = dict(zip(steps[known].tolist(), places[known].tolist(), strict=True))
    found = np.array([place_of.get(step, np.nan) for step in wanted.tolist()], dtype=np.float64)
    rows = scored if of is None else [_of_set(row, of) for row in scored]
    return found, column(rows, "eval_loss")


def eval_sets(run: Run) -> list[str]:
    """Names of the sets that are validated beside the run's own."""
    last = run.evaluations[-1].get("eval_sets") if run.evaluations else None
    return list(last) if isinstance(last, dict) else []


def _of_set(row: dict[str, Any], name: str) -> dict[str, Any]:
    sets = row.get("eval_sets")
    found = sets.get(name) if isinstance(sets, dict) else None
    return found if isinstance(found, dict) else {}


def plain(name: str) -> str:
    """A name from a run as a label: what a picture would take for markup is a `?`."""
    return "".join(c if c.isascii() and (c.isalnum() or c in " .:-") else "?" for c in name)[:40]


def drawn(charts: list[Chart]) -> Html:
    """The charts beside each other, those that have something to show."""
    pictures = [Html(picture) for chart in charts if (picture := draw(chart))]
    return element("div", *pictures, name="charts") if pictures else missing("There are no two updates to draw.")


def clipped_share(run: Run) -> Html:
    """How many of the updates were clipped."""
    share = run.updates.share("clipped")
    return missing("" if share is None else f"{100 * share:.1f}% of the updates were clipped.")


def _places(run: Run, over: Axis) -> np.ndarray:
    key, unit = _PLACES[over]
    return column(run.updates, key) / unit
