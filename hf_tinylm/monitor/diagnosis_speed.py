"""Diagnoses of where the time goes. Each gives its evidence in words, or None."""

from __future__ import annotations

import numpy as np

from .follow import column
from .history import History

_RECENT = 200
_START = 10  # updates of an invocation that may be slow: compilation, caches
_SLOWER = 0.5  # of the rate before
_STARVED = 0.2  # of the time
_SAVING = 0.1  # of the time
_LOW, _HIGH = 0.2, 0.6


def throughput_drop(history: History) -> str | None:
    """The median speed of the newest tenth is below half of that of the first half."""
    speeds = history["tokens_per_second"]
    speeds = speeds[~np.isnan(speeds)]
    if len(speeds) < 60:
        return None
    newest = min(_RECENT, max(20, len(speeds) // 10))
    before, now = float(np.median(speeds[_START : max(len(speeds) // 2, 30)])), float(np.median(speeds[-newest:]))
    if now >= _SLOWER * before:
        return None
    return f"{before:,.0f} tokens/s in the first half, {now:,.0f} over the last {newest} updates (medians)"


def input_starvation(history: History) -> str | None:
    """More than a fifth of the time of the last 200 updates was spent waiting for windows."""
    waited, worked = history["data_seconds"][_START:][-_RECENT:], history["seconds"][_START:][-_RECENT:]
    known = ~np.isnan(waited) & ~np.isnan(worked)
    if known.sum() < 20:
        return None
    share = float(waited[known].sum() / max(1e-9, waited[known].sum() + worked[known].sum()))
    if share <= _STARVED:
        return None
    return f"{share:.0%} of the last {known.sum()} updates' time was spent waiting for their windows"


def checkpoints_cost(history: History) -> str | None:
    """Two saves or more held training up for over a tenth of the time since the first update."""
    saves = [event for event in history.events if event.get("event") == "saved"]
    stalls, told = np.nan_to_num(column(saves, "stall_seconds")), history["wall_seconds"]
    wall = float(told[-1] - told[0]) if len(told) else 0.0  # without the start-up
    if len(stalls) < 2 or not wall > 0 or stalls.sum() <= _SAVING * wall:
        return None
    share = f"{stalls.sum() / wall:.0%}"
    return f"{len(stalls)} saves held training up for {stalls.sum():,.1f} of {wall:,.1f} seconds: {share}"


def mfu_too_low(history: History) -> str | None:
    """A median below 20%."""
    found = _mfu(history)
    return None if found is None or found >= _LOW else f"median MFU {found:.1%}"


def mfu_too_high(history: History) -> str | None:
    """A median above 60%."""
    found = _mfu(history)
    return None if found is None or found <= _HIGH else f"median MFU {found:.1%}"


def _mfu(history: History) -> float | None:
    known = history["mfu"][_START:][-_RECENT:]
    known = known[~np.isnan(known)]
    return float(np.median(known)) if len(known) >= 20 else None
