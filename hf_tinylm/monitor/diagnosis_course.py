"""Diagnoses of how a run is set: its rate, length, batch and clipping. Each gives its evidence in words, or None."""

from __future__ import annotations

import numpy as np

from .history import History, noise_of

_FIRST_QUARTER = 0.4  # of the whole drop, which a rate that is high enough makes at least there
_LAST_QUARTER = 0.1  # of the whole drop, which a run that is long enough makes at most there
_FLAT = 0.02  # of the whole drop over half of the run
_NOISE = 9.5  # times the batch: less than a tenth of each update is signal then
_RECENT = 200  # updates
_CLIPPED, _MUCH_CLIPPED = 0.8, 1.25  # a limit that most norms just exceed does little


def _levels(history: History) -> list[float]:
    """The loss at the start, at each quarter and at the end: means of 15 updates, of 3 at the start."""
    losses, count = history["loss"], len(history)
    places = [count // 4, count // 2, 3 * count // 4, count - 8]
    return [float(losses[:3].mean()), *(float(losses[max(0, p - 7) : p + 8].mean()) for p in places)]


def rate_too_low(history: History) -> str | None:
    """Less than 40% of the drop so far came in the first quarter, after half of the run."""
    if len(history) < 100 or history.done_share < 0.5 or history.branched or history["step"][0] != 1:
        return None
    start, quarter, *_, last = _levels(history)
    drop = start - last
    still = drop < 5 * noise_of(history["loss"])
    if drop <= 0 or (not still and start - quarter >= _FIRST_QUARTER * drop):
        return None
    return (
        f"loss {start:.2f}, {quarter:.2f} after a quarter of {len(history):,} updates, {last:.2f} at their end: "
        f"{(start - quarter) / drop:.0%} of the drop in the first quarter"
    )


def still_falling(history: History) -> str | None:
    """At the end of the run, more than 10% of its drop came in the last quarter."""
    if len(history) < 40 or history.done_share < 0.98 or history.branched or history["step"][0] != 1:
        return None
    start, *_, before, last = _levels(history)
    quarter = len(history) / 4
    fell = (before - last) * quarter / (quarter - 8)  # the last mean is of updates that end with the run
    share = fell / (start - last) if start > last else 0.0
    if share < _LAST_QUARTER or before - last < 4 * noise_of(history["loss"]) * np.sqrt(2 / 15):
        return None
    return f"loss {before:.2f} at three quarters, {last:.2f} at the end: {share:.0%} of the drop in that quarter"


def plateau_without_decay(history: History) -> str | None:
    """A constant rate over the last half of a run that is half done, and a loss that does not fall in it."""
    if len(history) < 100 or history.done_share < 0.5:
        return None
    half = len(history) // 2
    rates, losses = history["learning_rate"][half:], history["loss"]
    if rates.min() < 0.95 * history["learning_rate"].max():
        return None
    places = np.arange(len(losses) - half)
    slope = float(np.polyfit(places, losses[half:], 1)[0])
    fell, drop = -slope * len(places), float(losses[:3].mean() - losses[-15:].mean())
    if fell > max(_FLAT * drop, 2 * noise_of(losses) * np.sqrt(12 / len(places))):
        return None
    return (
        f"rate {rates[-1]:.2g} throughout the last {len(places):,} updates, loss {losses[half : half + 15].mean():.3f} "
        f"to {losses[-15:].mean():.3f}"
    )


def batch_below_noise_scale(history: History) -> str | None:
    """The noise scale is above 9.5 updates of tokens, even with two standard errors more signal than was seen."""
    if (found := _noise_scale_far_above_batch(history)) is None:
        return None
    least, batch = found
    measured = int(min(_RECENT, (~np.isnan(history["gradient_signal"])).sum()))
    return (
        f"noise scale above {least:,.0f} tokens over the last {measured} updates, {batch:,.0f} tokens an update: "
        f"at most {batch / (batch + least):.0%} of one is signal"
    )


def noise_behind_plateau(history: History) -> str | None:
    """Why a loss stays flat at a constant rate, where that is the noise of a batch far below the noise scale."""
    if (found := _noise_scale_far_above_batch(history)) is None:
        return None
    least, batch = found
    estimate = history.last("noise_scale")
    scale = f"{estimate:,.0f} tokens (at least {least:,.0f})" if estimate else f"at least {least:,.0f} tokens"
    return f"a batch of {batch:,.0f} tokens is far below the noise scale of {scale}"


def _noise_scale_far_above_batch(history: History) -> tuple[float, float] | None:
    """The least noise scale and an update's tokens where the one is far above the other; None if not, or unknown."""
    least, batch = _least_noise_scale(history), history.batch_tokens
    return (least, batch) if least is not None and batch and least > _NOISE * batch else None


def _least_noise_scale(history: History) -> float | None:
    """The noise scale in tokens if the signal is two standard errors above what was seen; None: too little is known."""
    signals, noises = history["gradient_signal"], history["gradient_noise"]
    known = ~np.isnan(signals) & ~np.isnan(noises)
    signals, noises = signals[known][-_RECENT:], noises[known][-_RECENT:]
    if len(signals) < 100:
        return None
    blocks = np.array([block.mean() for block in np.array_split(signals, 10)])
    most = float(signals.mean() + 2 * blocks.std(ddof=1) / np.sqrt(10))
    return float(noises.mean()) / most if most > 0 else 0.0


def clipping_always(history: History) -> str | None:
    """At least 80% of the last 200 updates after the warmup were clipped, and not just so."""
    limit, norms = history.max_grad_norm, history["grad_norm"][history.warmup :][-_RECENT:]
    if not limit or len(norms) < 30:
        return None
    share = float((norms > limit).mean())
    median = float(np.median(norms))
    if share < _CLIPPED or median < _MUCH_CLIPPED * limit:
        return None
    return f"{share:.0%} of the last {len(norms)} updates had a norm above {limit:g}; their median is {median:.2f}"
