"""`hf-tinylm report A B`: several runs on the same axes, and what they differ in."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from .charts import Chart, Line, points
from .curves import drawn, validation
from .events import duration
from .follow import column, number
from .html import Html, element, leaves, missing, page, section, table
from .run import Run

_CURVES = (
    ("loss", "training loss, nats per token", False),
    ("learning_rate", "learning rate", False),
    ("grad_norm", "gradient norm before clipping", True),
    ("tokens_per_second", "tokens per second while training", False),
)
_TAIL = 0.1  # of the updates: what the last training loss is the mean of


def comparison_page(runs: Sequence[Run]) -> str:
    """The page of several runs, which are called A, B, C in its tables and curves."""
    letters = string.ascii_uppercase[: len(runs)]
    named = list(zip(letters, runs, strict=True))
    notes = [element("p", f"{letter}: {note}", name="bad") for letter, run in named for note in run.missing]
    listed = table(("", "run", "folder", ""), [(a, run.name, run.folder.resolve(), run.status()) for a, run in named])
    caution = (
        "Training losses of different batches or data are not comparable point by point; one seed each is no proof of "
        "a small difference."
    )
    return page(
        f"{len(runs)} runs compared",
        listed,
        *notes,
        section("Last values", table(("", *letters), _last_values(runs)), missing(caution)),
        section("Curves", drawn(comparison_charts(runs))),
        section("Differences", *_differences(runs, letters)),
    )


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """The curves of several runs on the same axes, each under its letter."""
    named = list(zip(string.ascii_uppercase, runs, strict=False))
    charts = [
        Chart(title, [_line(a, run, key, colour=i) for i, (a, run) in enumerate(named)], log=log)
        for key, title, log in _CURVES
    ]
    scored = [validation(run, letter, colour=i) for i, (letter, run) in enumerate(named)]
    charts.insert(1, Chart("validation loss, nats per token", scored))
    return charts


def _line(letter: str, run: Run, key: str, colour: int) -> Line:
    return Line(letter, *points(column(run.updates, "supervised_tokens"), column(run.updates, key)), colour=colour)


def _last_values(runs: Sequence[Run]) -> list[tuple[Any, ...]]:
    def cells(value: Any, form: str) -> list[str | None]:
        return [None if (found := value(run)) is None else format(found, form) for run in runs]

    return [
        ("updates", *cells(lambda run: run.step, ",")),
        ("tokens", *cells(lambda run: run.tokens, ",.0f")),
        ("training loss, mean of the last tenth", *cells(last_loss, ".4f")),
        ("validation loss", *cells(lambda run: _last(run, "eval_loss"), ".4f")),
        ("validation bits per byte", *cells(lambda run: _last(run, "bits_per_byte"), ".4f")),
        ("wall time", *(duration(run.wall_seconds) for run in runs)),
        ("money", *cells(lambda run: run.cost, ".2f")),
    ]


def last_loss(run: Run) -> float | None:
    """Mean training loss of the last tenth of the updates."""
    losses = column(run.updates, "loss")
    losses = losses[~np.isnan(losses)]
    return float(losses[-max(1, round(_TAIL * len(losses))) :].mean()) if len(losses) else None


def _last(run: Run, key: str) -> float | None:
    return number(run.evaluations[-1], key) if run.evaluations else None


def _differences(runs: Sequence[Run], letters: str) -> list[Html]:
    """What run.json says differently, part by part; the code's own changes only as a word."""
    found = []
    for part in ("identity", "execution", "config", "environment"):
        values = [dict(leaves(run.fact(part) or {})) for run in runs]
        names = list(dict.fromkeys(name for one in values for name in one))
        rows = []
        for name in names:
            cells = [one.get(name, "(not recorded)") for one in values]
            if any(cell != cells[0] for cell in cells[1:]):
                shown = ["(differs)" if name == "git_diff" else str(cell) for cell in cells]
                rows.append((name, *shown))
        found.append(element("h3", part))
        found.append(table(("", *letters), rows) if rows else missing("No difference."))
    return found
