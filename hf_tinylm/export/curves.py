"""The curves of a run as one picture: loss, learning rate and gradient norm over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import atomic_file
from ..training.curves import thin


def draw_curves(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write a PNG of the rows of a metrics.jsonl; whether there was anything to draw.

    Long lines are thinned, so that no spike is lost.
    """
    updates = [row for row in rows if "loss" in row and row["loss"] is not None]
    if len(updates) < 2:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens_of = {row["step"]: row["supervised_tokens"] for row in updates}
    scored = [row for row in rows if "eval_loss" in row and row["step"] in tokens_of]
    tokens = np.array([row["supervised_tokens"] for row in updates], dtype=np.float64)

    def over_tokens(key: str) -> tuple[np.ndarray, np.ndarray]:
        return thin(tokens, np.array([row[key] for row in updates], dtype=np.float64))

    figure = Figure(figsize=(9, 3), layout="constrained")
    loss, rate, norm = figure.subplots(1, 3)
    loss.plot(*over_tokens("loss"), linewidth=0.8, label="training")
    if scored:
        over = [tokens_of[row["step"]] for row in scored]
        loss.plot(over, [row["eval_loss"] for row in scored], marker=".", label="validation")
        loss.legend()
    rate.plot(*over_tokens("learning_rate"))
    norm.plot(*over_tokens("grad_norm"), linewidth=0.8)
    norm.set_yscale("log")
    titles = ("loss (nats per token)", "learning rate", "gradient norm before clipping")
    for axes, title in zip((loss, rate, norm), titles, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
        axes.tick_params(labelsize=7)
    with atomic_file(path) as temporary:
        FigureCanvasAgg(figure)
        figure.savefig(temporary, format="png", dpi=110, metadata={"Software": None})
    return True
