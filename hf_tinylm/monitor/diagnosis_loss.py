"""Diagnoses of the loss itself and of the gradient norm. Each gives its evidence in words, or None."""

from __future__ import annotations

import math

import numpy as np

from .follow import column, number
from .history import History, noise_of, running_mean, trailing_median

# A new model stands above ln V by half the variance of its logits, about 0.2; see docs/reading-a-run.md.
_ABOVE_UNIFORM, _BELOW_UNIFORM = 1.0, 0.5
# Bits per byte of unseen text, and nats per token, that no model of any size reaches.
_TOO_FEW_BITS, _TOO_LOW_LOSS = 0.4, 0.7
_BEFORE = 30  # updates that a value is compared with
_SPIKE = 8.0  # standard deviations of the loss
_AFTER_SPIKE = 30  # updates until a loss that is still up is called stuck
_NORM = 3.0  # times the median norm before
_NORM_WINDOW, _NORM_SPIKES = 300, 3


def first_loss_far_from_uniform(history: History) -> str | None:
    """The loss of the first update against ln V; a run that began with trained weights has no such value."""
    if history.branched or not len(history) or history["step"][0] != 1 or not history.vocab_size:
        return None
    first, uniform = float(history["loss"][0]), math.log(history.vocab_size)
    if -_BELOW_UNIFORM <= first - uniform <= _ABOVE_UNIFORM:
        return None
    return f"first loss {first:.2f}; ln {history.vocab_size:,.0f} = {uniform:.2f}"


def loss_too_good(history: History) -> str | None:
    """Validation below 0.4 bits per byte, or a loss below 0.7 nats per token on text that is new to the model."""
    last = history.evaluations[-1] if history.evaluations else {}
    bits, scored = number(last, "bits_per_byte"), number(last, "eval_loss")
    if bits is not None and bits < _TOO_FEW_BITS:
        return f"validation {bits:.3f} bits per byte"
    if scored is not None and bits is None and scored < _TOO_LOW_LOSS:
        return f"validation {scored:.3f} nats per token"
    tokens = history.last("supervised_tokens") or 0
    if len(history) < 20 or (history.epoch_tokens and tokens > history.epoch_tokens) or history.branched:
        return None
    loss = float(history["loss"][-20:].mean())
    return f"training loss {loss:.3f} nats per token in the first pass over the data" if loss < _TOO_LOW_LOSS else None


def divergence(history: History) -> str | None:
    """The smoothed loss has lost half of what it had won, or an update was not finite and the run stopped."""
    stopped = [event for event in history.events if event.get("event") == "nonfinite"]
    if stopped and stopped[-1].get("action") == "stopped" and not history.finished:
        return f"the update after {number(stopped[-1], 'step') or 0:,.0f} had a loss or gradient that is not finite"
    means = running_mean(history["loss"], 20)
    if len(history) < 40:
        return None
    best, last, first = int(means.argmin()), float(means[-1]), float(history["loss"][:5].mean())
    if last - means[best] <= max(0.5, 0.5 * (first - means[best])):
        return None
    return (
        f"loss {means[best]:.2f} at update {history['step'][best + 19]:,.0f}, {last:.2f} at update "
        f"{history['step'][-1]:,.0f} (means of 20)"
    )


def spikes(history: History) -> list[tuple[int, int | None]]:
    """Places where the loss jumps above the median before it, each with where it is back; None: not so far."""
    losses, noise = history["loss"], noise_of(history["loss"])
    before = trailing_median(losses, _BEFORE)
    high = losses - before > max(0.15, _SPIKE * noise)
    found: list[tuple[int, int | None]] = []
    place = 0
    while place < len(losses):
        if not high[place]:
            place += 1
            continue
        level = before[place] + max(0.1, 2 * noise)
        calm = running_mean(losses[place:], 5) <= level
        end = place + int(calm.argmax()) + 4 if calm.any() else None
        found.append((place, end))
        if end is None:
            break
        place = end + 1
    return found


def spike_that_recovered(history: History) -> str | None:
    """A jump of the loss after which it came back to where it was."""
    back = [(start, end) for start, end in spikes(history) if end is not None]
    if not back:
        return None
    start, end = max(back, key=lambda one: float(history["loss"][one[0] : one[1]].max()))
    top = float(history["loss"][start:end].max())
    count = f"{len(back)} jumps; the highest, to" if len(back) > 1 else "to"
    return (
        f"{count} {top:.2f} from {_level(history, start):.2f} at update {history['step'][start]:,.0f}, "
        f"back after {end - start} updates"
    )


def spike_that_stayed(history: History) -> str | None:
    """A jump of the loss that is still there thirty updates later."""
    stuck = [start for start, end in spikes(history) if end is None]
    if not stuck or len(history) - stuck[0] < _AFTER_SPIKE or divergence(history) is not None:
        return None
    start, last = stuck[0], float(history["loss"][-10:].mean())
    return (
        f"from {_level(history, start):.2f} to {history['loss'][start]:.2f} at update {history['step'][start]:,.0f}, "
        f"still {last:.2f} after {len(history) - start} updates"
    )


def _level(history: History, place: int) -> float:
    return float(np.median(history["loss"][max(0, place - _BEFORE) : place]))


def norm_spikes(history: History) -> str | None:
    """Three norms far above the median before them within 300 updates, or one shortly before the loss jumps."""
    norms = history["grad_norm"]
    start = max(_BEFORE, history.warmup)
    ratio = norms / trailing_median(norms, _BEFORE)
    places = [place for place in np.flatnonzero(ratio > _NORM).tolist() if place >= start]
    if not places:
        return None
    jumps = [jump for jump, _ in spikes(history)]
    for place in places:
        ahead = [jump - place for jump in jumps if 0 < jump - place <= 20]
        if ahead:
            return (
                f"norm {norms[place]:.2f} at update {history['step'][place]:,.0f}, {ratio[place]:.1f} times the usual, "
                f"{min(ahead)} updates before the loss jumped"
            )
    ends = zip(places, places[_NORM_SPIKES - 1 :], strict=False)
    if not any(last - first < _NORM_WINDOW for first, last in ends):
        return None
    top = max(places, key=lambda place: float(ratio[place]))
    return (
        f"{len(places)} updates above {_NORM:g} times the median norm before them; the highest {norms[top]:.2f} at "
        f"update {history['step'][top]:,.0f}, {ratio[top]:.1f} times"
    )


def training_loss_a_multiple(history: History) -> str | None:
    """The training loss before a validation is more than half above it."""
    scored = column(history.evaluations, "eval_loss")
    steps = column(history.evaluations, "step")
    if history.conversations or not len(scored) or len(history) < 20:
        return None
    near = (history["step"] <= steps[-1]) & (history["step"] > steps[-1] - 20)
    if not near.any():
        return None
    trained = float(history["loss"][near].mean())
    if trained <= 1.5 * scored[-1] or trained < 1:
        return None
    times = f"{trained / scored[-1]:.1f} times"
    return f"training {trained:.2f}, validation {scored[-1]:.2f} at update {steps[-1]:,.0f}: {times}"
