"""Where the time and the money of a run went, over all of its invocations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next sees finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Clocks:
    """Seconds by what they were spent on, and what was computed.

    `wall_before` is what earlier invocations took, crashes included; updates that a crash threw away are counted in
    `thrown_away_*`, in the wall clock, in `flops` and in money, and nowhere else.
    """

    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0
    data_seconds: float = 0.0
    startup_seconds: float = 0.0
    wall_before: float = 0.0
    flops: float = 0.0
    thrown_away_updates: int = 0
    thrown_away_seconds: float = 0.0
    invocations: int = 1
    began: float = field(default_factory=lambda: psutil.Process().create_time(), repr=False, compare=False)

    @property
    def invocation_seconds(self) -> float:
        """Seconds since this process was started, imports included."""
        return max(0.0, time.time() - self.began)

    @property
    def wall_seconds(self) -> float:
        """Seconds of all invocations."""
        return self.wall_before + self.invocation_seconds

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the block's duration to `what` (such as `saving_seconds`)."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - start)

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `wall_seconds` becomes the next invocation's `wall_before`."""
        state = {name: value for name, value in asdict(self).items() if name not in ("began", "wall_before")}
        return {**state, "wall_seconds": self.wall_seconds}

    def continue_from(self, state: dict[str, Any], thrown_away: list[dict[str, Any]], flops_per_token: int) -> None:
        """Go on from a checkpoint's clocks, counting metrics rows beyond it as thrown away.

        Args:
            state: what `to_state` gave.
            thrown_away: rows of metrics.jsonl that the resume drops.
        """
        startup = self.startup_seconds
        for name in ("training_seconds", "evaluation_seconds", "saving_seconds", "data_seconds", "startup_seconds"):
            setattr(self, name, float(state[name]))
        self.startup_seconds += startup
        self.flops = float(state["flops"])
        self.thrown_away_updates = int(state["thrown_away_updates"])
        self.thrown_away_seconds = float(state["thrown_away_seconds"])
        self.invocations = int(state["invocations"]) + 1
        self.wall_before = float(state["wall_seconds"])
        updates = [row for row in thrown_away if "loss" in row]
        if updates:
            last = max(float(row["wall_seconds"]) for row in updates)
            self.thrown_away_updates += len(updates)
            self.thrown_away_seconds += max(0.0, last - self.wall_before)
            self.flops += sum(flops_per_token * row["tokens_per_second"] * row["seconds"] for row in updates)
            self.wall_before = max(self.wall_before, last)

    def report(self, supervised_tokens: int, price_per_hour: float | None) -> dict[str, Any]:
        """Rates and shares: tokens per second while training and end to end, and where the difference went."""
        wall = self.wall_seconds
        named = {
            "training": self.training_seconds,
            "evaluation": self.evaluation_seconds,
            "saving": self.saving_seconds,
            "data": self.data_seconds,
            "start-up": self.startup_seconds,
            "thrown away": self.thrown_away_seconds,
        }
        return {
            "supervised_tokens": supervised_tokens,
            "wall_seconds": round(wall, 3),
            "tokens_per_second_training": round(supervised_tokens / self.training_seconds, 1)
            if self.training_seconds
            else None,
            "tokens_per_second_end_to_end": round(supervised_tokens / wall, 1) if wall else None,
            "seconds": {
                **{name: round(seconds, 3) for name, seconds in named.items()},
                "other": round(max(0.0, wall - sum(named.values())), 3),
            },
            "flops": self.flops,
            "cost": None if price_per_hour is None else round(wall / 3600 * price_per_hour, 6),
            "invocations": self.invocations,
            "thrown_away_updates": self.thrown_away_updates,
        }


def budget_reached(
    clocks: Clocks,
    updates: int,
    stop_after_updates: int | None,
    max_hours: float | None,
    max_cost: float | None,
    price_per_hour: float | None,
) -> str | None:
    """The budget of this invocation that is spent, in words, or None. `updates` are those of this invocation."""
    hours = clocks.invocation_seconds / 3600
    checks: list[tuple[str, float | None, Callable[[], float]]] = [
        ("stop_after_updates", stop_after_updates, lambda: updates),
        ("max_hours", max_hours, lambda: hours),
        ("max_cost", max_cost, lambda: hours * (price_per_hour or 0.0)),
    ]
    return next((f"{name}={limit:g}" for name, limit, spent in checks if limit is not None and spent() >= limit), None)
