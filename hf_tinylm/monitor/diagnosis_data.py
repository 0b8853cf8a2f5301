"""Diagnoses of what a run reads: repetition, memory, forgetting. Each gives its evidence in words, or None."""

from __future__ import annotations

import numpy as np

from .follow import column, number
from .history import History, noise_of, running_mean

_GAP = 0.25  # nats between training and validation, and by which it grew
_SHARPEST = 0.3  # correlation at one lag above that of its neighbours
_LONGEST = 4_000  # updates that are searched for repetition
_SHORTEST_LAG = 10
_RISE = 0.1  # nats


def training_and_validation_part(history: History) -> str | None:
    """Validation stands above training, by more than it did before, and is of the kind that is trained on."""
    if history.conversations:
        return None
    gaps = []
    for step, scored in zip(column(history.evaluations, "step"), column(history.evaluations, "eval_loss"), strict=True):
        near = (history["step"] <= step) & (history["step"] > step - 20)
        if near.sum() >= 10:
            gaps.append((float(step), float(scored), float(scored - history["loss"][near].mean())))
    if len(gaps) < 3:
        return None
    least, (step, scored, gap) = min(gaps, key=lambda one: one[2]), gaps[-1]
    if gap < _GAP or gap - least[2] < _GAP:
        return None
    return (
        f"validation {scored:.2f} stands {gap:.2f} above training at update {step:,.0f}; at update {least[0]:,.0f} it "
        f"was {least[2]:+.2f}"
    )


def text_replayed(history: History) -> str | None:
    """The loss around its running mean looks like itself some updates later, and not one earlier or later than that."""
    losses = history["loss"][history.warmup :][-_LONGEST:]
    if len(losses) < 100:
        return None
    course = np.convolve(np.pad(losses, 10, mode="edge"), np.ones(21) / 21, "valid")
    rest = losses - course
    rest = np.clip(rest, *(np.array([-4, 4]) * max(noise_of(losses), 1e-9)))
    lags = np.arange(_SHORTEST_LAG, len(rest) // 2)
    found = np.array([_correlation(rest[:-lag], rest[lag:]) for lag in lags])
    sharp = found[1:-1] - np.maximum(found[:-2], found[2:])
    if not len(sharp) or sharp.max() < _SHARPEST or found[1:-1][sharp.argmax()] < 1.5 * _SHARPEST:
        return None
    best = int(sharp.argmax()) + 1
    return f"the loss repeats itself every {lags[best]:,} updates: correlation {found[best]:.2f}"


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    scale = np.sqrt((a**2).mean() * (b**2).mean())
    return float((a * b).mean() / scale) if scale > 0 else 0.0


def cliffs_at_epoch_borders(history: History) -> str | None:
    """The loss falls from one side of the borders between epochs to the other, more than elsewhere.

    Not judged where the batch grows: its noise falls too, and borders are not equally far apart.
    """
    if not history.epoch_tokens or not history.batch_tokens or history.batch_grows:
        return None
    every, losses = history.epoch_tokens / history.batch_tokens, history["loss"]
    width = max(8, round(every / 8))
    borders = (
        np.round(np.arange(every, len(losses), every)).astype(int) - int(history["step"][0] if len(losses) else 1) + 1
    )
    borders = borders[(borders >= 2 * width) & (borders <= len(losses) - width)]
    if every < 2 * width or not len(borders):
        return None
    means = running_mean(losses, width)
    falls = means[borders - width] - means[borders]
    elsewhere = means[borders - 2 * width] - means[borders - width]  # how the loss fell just before
    cliff = float((falls - np.maximum(elsewhere, 0)).mean())
    if cliff < max(0.1, 4 * noise_of(losses) * np.sqrt(2 / (width * len(borders)))):
        return None
    return (
        f"at the borders of epochs ({every:,.0f} updates each, {len(borders)} borders) the loss falls by "
        f"{falls.mean():.2f} nats"
    )


def source_loss_rises(history: History) -> str | None:
    """The validation loss of one source stands above its lowest, which is two evaluations or more ago."""
    courses: dict[str, list[tuple[float, float]]] = {}
    for row in history.evaluations:
        parts, step = row.get("eval_loss_by_source"), number(row, "step")
        for name in parts if isinstance(parts, dict) else ():
            loss = number(parts, name)
            if loss is not None and step is not None:
                courses.setdefault(str(name), []).append((step, loss))
    told = []
    for name, course in courses.items():
        best = min(range(len(course)), key=lambda place: course[place][1])
        rise = course[-1][1] - course[best][1]
        if best <= len(course) - 3 and rise >= _RISE:
            told.append(
                f"{name}: {course[best][1]:.2f} at update {course[best][0]:,.0f}, {course[-1][1]:.2f} at update "
                f"{course[-1][0]:,.0f}"
            )
    return "; ".join(told) or None
