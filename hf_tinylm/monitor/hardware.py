"""What hardware.jsonl says: the last sample and its age, and the energy of a run. Nothing is read from the machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .events import duration, size
from .follow import number

HARDWARE = "hardware.jsonl"
INTERVALS = 3  # without a sample: the last one is stale, and no energy is counted in between
_DEFAULT_SECONDS = 30.0


def energy(rows: Sequence[dict[str, Any]]) -> tuple[float | None, float]:
    """kWh at the cards, and the hours that they were measured over; None without two samples of power.

    The area under straight lines between samples. A stop or a sleep is not bridged: nothing is counted between samples
    more than three intervals apart, nor between the last of one invocation and the first of the next, nor beside a
    sample without power.
    """
    times = np.array([number(row, "time") for row in rows], dtype=np.float64)
    watts = np.array([np.nan if (found := power(row)) is None else found for row in rows], dtype=np.float64)
    limit = np.array([INTERVALS * interval_of(row) for row in rows])
    fresh = np.array([row.get("first") is not True for row in rows], dtype=bool)
    if len(rows) < 2:
        return None, 0.0
    seconds, mean = np.diff(times), (watts[1:] + watts[:-1]) / 2
    counted = (seconds > 0) & (seconds <= limit[1:]) & fresh[1:] & ~np.isnan(mean)
    if not counted.any():
        return None, 0.0
    return float((mean * seconds)[counted].sum() / 3.6e6), float(seconds[counted].sum() / 3_600)


def power(row: dict[str, Any]) -> float | None:
    """Watts of all GPUs of a sample; None when one of them is not known."""
    cards = cards_of(row)
    told = [number(card, "power_watts") for card in cards]
    known = [watts for watts in told if watts is not None]
    return sum(known) if cards and len(known) == len(cards) else None


def cards_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPUs of a sample."""
    found = row.get("gpus")
    return [card for card in found if isinstance(card, dict)] if isinstance(found, list) else []


def interval_of(row: dict[str, Any]) -> float:
    """Seconds between the samples of that time."""
    return number(row, "interval_seconds") or _DEFAULT_SECONDS


def hardware_state(
    rows: Sequence[dict[str, Any]], price_per_kwh: float | None = None, now: float | None = None
) -> dict[str, Any] | None:
    """The last sample with `age_seconds` and `stale`, and `energy_kwh`, `energy_hours`, `energy_cost` of all.

    None without a sample.
    """
    if not rows:
        return None
    last = rows[-1]
    age = (time.time() if now is None else now) - (number(last, "time") or 0.0)
    kwh, hours = energy(rows)
    return {
        **{key: value for key, value in last.items() if key not in ("first", "interval_seconds")},
        "age_seconds": round(max(0.0, age), 1),
        "stale": age > INTERVALS * interval_of(last),
        "energy_kwh": kwh,
        "energy_hours": hours,
        "energy_cost": None if kwh is None or price_per_kwh is None else kwh * price_per_kwh,
    }


def hardware_lines(state: dict[str, Any] | None) -> list[str]:
    """`hardware_state` for people: the machine, each GPU, the energy."""
    if state is None:
        return ["no sample: hardware.jsonl is not there"]
    age = f"{duration(state['age_seconds'])} ago{' (stale)' if state['stale'] else ''}"
    parts = [
        _told(state, "cpu_percent", "CPU {:.0f}%"),
        _of(state, "memory"),
        "disk free " + size(number(state, "disk_free_bytes")),
    ]
    lines = [f"{', '.join(parts)}; {age}"]
    for card in cards_of(state):
        shown = [
            str(card.get("name") or "GPU"),
            _told(card, "utilization_percent", "{:.0f}% used"),
            _told(card, "power_watts", "{:.0f} W"),
            _told(card, "temperature_celsius", "{:.0f} C"),
            _of(card, "memory"),
        ]
        lines.append(", ".join(shown))
    if state["energy_kwh"] is not None:
        cost = "" if state["energy_cost"] is None else f", cost {state['energy_cost']:.2f}"
        lines.append(f"{state['energy_kwh']:.2f} kWh at the GPUs in {state['energy_hours']:.1f} measured hours{cost}")
    return lines


def _told(row: dict[str, Any], key: str, words: str) -> str:
    value = number(row, key)
    return f"{key.split('_')[0]} unknown" if value is None else words.format(value)


def _of(row: dict[str, Any], what: str) -> str:
    used, total = number(row, f"{what}_used_bytes"), number(row, f"{what}_total_bytes")
    return f"{what} unknown" if used is None else f"{what} {size(used)} of {size(total)}"
