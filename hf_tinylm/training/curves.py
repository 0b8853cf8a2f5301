"""What the rows of a run say over tokens, FLOPs and hours, and several runs on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..files import atomic_file
from ..planning.optimizer import RunFlops
from .metrics import positions_computed

Axis = Literal["tokens", "flops", "hours"]
AXES: tuple[Axis, ...] = ("tokens", "flops", "hours")
_LABELS = {"tokens": "tokens", "flops": "FLOPs", "hours": "hours"}
MOST_POINTS = 800  # of a drawn line: about one for each of its pixels


@dataclass(frozen=True)
class Points:
    """Values at the axes of a run, float64 (n,) each; NaN where the axis is not known."""

    tokens: np.ndarray
    flops: np.ndarray
    hours: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def over(self, axis: Axis) -> np.ndarray:
        """(n,) of that axis."""
        found: np.ndarray = getattr(self, axis)
        return found


@dataclass(frozen=True)
class Curve:
    """Training (a point an update) and validation (a point an evaluation) of one run, by their values."""

    name: str
    training: Points
    validation: Points


def curve_of(name: str, rows: Sequence[dict[str, Any]], flops: RunFlops | None = None, metric: str = "loss") -> Curve:
    """The curves that the rows of a metrics.jsonl hold.

    Args:
        flops: of training, none if not given; they count the updates that the run consists of, not those thrown away.
        metric: `loss` in nats per token, or `bits_per_byte`, which is measured in validation only.
    """
    updates = [row for row in rows if row.get("loss") is not None]
    of_step = {row["step"]: row for row in updates}
    key = "eval_loss" if metric == "loss" else metric
    scored = [row for row in rows if row.get(key) is not None and row["step"] in of_step]
    trained = updates if metric == "loss" else []
    return Curve(
        name,
        _points(trained, [row["loss"] for row in trained], flops),
        _points([of_step[row["step"]] for row in scored], [row[key] for row in scored], flops),
    )


def _points(updates: Sequence[dict[str, Any]], values: Sequence[float], flops: RunFlops | None) -> Points:
    computed = [0 if flops is None else flops(row["step"], positions_computed(row)) for row in updates]
    tokens = np.array([row["supervised_tokens"] for row in updates], dtype=np.float64)
    hours = np.array([row["wall_seconds"] for row in updates], dtype=np.float64) / 3600
    return Points(tokens, np.array(computed, dtype=np.float64), hours, np.array(values, dtype=np.float64))


def thin(xs: np.ndarray, ys: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """The known points, at most `most`: the lowest and highest of each stretch, so that no spike is lost, and the last.

    Args:
        xs: (n,) rising; nan where it is not known.
        ys: (n,), the same.
    """
    known = ~(np.isnan(xs) | np.isnan(ys))
    xs, ys = xs[known], ys[known]
    if len(xs) <= most:
        return xs, ys
    kept = {len(xs) - 1}
    for part in np.array_split(np.arange(len(xs)), most // 2 - 1):
        kept |= {int(part[0] + ys[part].argmin()), int(part[0] + ys[part].argmax())}
    chosen = np.array(sorted(kept))
    return xs[chosen], ys[chosen]


def draw_losses(
    curves: Sequence[Curve], picture: Path, over: Sequence[Axis] = ("tokens",), unit: str = "loss, nats per token"
) -> None:
    """Write a PNG: a panel for each axis; training as lines, validation as marked ones, the later curve on top.

    Long lines are thinned.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 if len(over) == 1 else 6 * len(over), 5.5), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(over), squeeze=False)[0]
    unit = f"{unit} (dots: validation)" if any(len(curve.validation) for curve in curves) else unit
    for axes, axis in zip(panels, over, strict=True):
        for number, curve in enumerate(curves):
            style = {"color": f"C{number % 10}", "zorder": 2 + number}
            label = {"label": curve.name}
            if len(curve.training):
                axes.plot(*thin(curve.training.over(axis), curve.training.values), lw=0.8, alpha=0.6, **label, **style)
                label = {}
            if len(curve.validation):
                axes.plot(curve.validation.over(axis), curve.validation.values, "o-", lw=1, ms=4, **label, **style)
        axes.set_xlabel(_LABELS[axis])
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_file(picture) as temporary:
        FigureCanvasAgg(figure)
        figure.savefig(temporary, format="png", metadata={"Software": None})
