"""Where the time and the money of a run went, over all of its invocations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch

from ..planning.optimizer import RunFlops
from .metrics import positions_computed

# Clocks that a checkpoint's are added to.
_ADDED = ("training_seconds", "evaluation_seconds", "saving_seconds", "data_seconds", "startup_seconds")
# Events with which an invocation begins; they tell what it threw away.
STARTS = ("started", "resumed")


def process_start() -> float:
    """When this process was started, in seconds since 1970: a run that is timed from here counts its imports."""
    return psutil.Process().create_time()


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read next sees finished work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Clocks:
    """Seconds by what they were spent on, and what was computed.

    `wall_before` is what earlier invocations took, crashes included; updates that a crash threw away are counted in
    `thrown_away_*`, in the wall clock, in `flops` and in money, and nowhere else. `data_seconds` are not part of
    `training_seconds`. `began` is when this invocation began, in seconds since 1970.
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
    began: float = field(default_factory=time.time, repr=False, compare=False)
    _laps: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def invocation_seconds(self) -> float:
        """Seconds since this invocation began."""
        return max(0.0, time.time() - self.began)

    @property
    def wall_seconds(self) -> float:
        """Seconds of all invocations, as far as they left a record."""
        return self.wall_before + self.invocation_seconds

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the block's duration to `what` (such as `saving_seconds`)."""
        start = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - start)

    def lap(self, what: str) -> float:
        """Seconds of `what` since the last call, or in this invocation."""
        now = getattr(self, what)
        since, self._laps[what] = self._laps.get(what, 0.0), now
        return float(now - since)

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint keeps; `wall_seconds` becomes the next invocation's `wall_before`."""
        state = {name: value for name, value in asdict(self).items() if name not in ("began", "wall_before", "_laps")}
        return {**state, "wall_seconds": self.wall_seconds}

    def continue_from(
        self,
        state: dict[str, Any],
        step: int,
        rows: list[dict[str, Any]],
        events: list[dict[str, Any]],
        flops: RunFlops,
    ) -> dict[str, Any]:
        """Go on from a checkpoint's clocks; every update since it was thrown away, by whichever invocation.

        Args:
            state: what `to_state` gave; empty when the run starts from its first update.
            step: the checkpoint's update.
            rows: of metrics.jsonl, before those beyond `step` are dropped.
            events: of events.jsonl. Its `STARTS` hold what this method returned to earlier invocations.
            flops: what an update and a position take.

        Returns:
            `thrown_away_updates` and `thrown_away_flops`: what is thrown away now, and was not counted before.
        """
        for name in _ADDED:
            setattr(self, name, getattr(self, name) + float(state.get(name, 0.0)))
            self._laps[name] = float(state.get(name, 0.0))
        wall, self.flops = float(state.get("wall_seconds", 0.0)), state.get("flops", 0)
        starts = [event for event in events if event["event"] in STARTS]
        since = [event for event in starts if event["wall_seconds"] > wall]
        updates = [row for row in rows if "loss" in row and row["step"] > step and not _was_counted(row, since)]
        positions = {row["step"]: positions_computed(row) for row in rows if "loss" in row}
        now = {
            "thrown_away_updates": len(updates),
            "thrown_away_flops": flops(
                len(updates), sum(positions_computed(row) - positions.get(row["step"] - 1, 0) for row in updates)
            ),
        }
        self.thrown_away_updates = state.get("thrown_away_updates", 0)
        for what in (now, *since):
            self.thrown_away_updates += what["thrown_away_updates"]
            self.flops += what["thrown_away_flops"]
        told = [what["wall_seconds"] for what in (*rows, *events) if "wall_seconds" in what]
        self.wall_before = max([wall, *told])
        self.thrown_away_seconds = float(state.get("thrown_away_seconds", 0.0))
        if updates or since:
            self.thrown_away_seconds += self.wall_before - wall
        self.invocations = 1 + len(starts)
        return now

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


def _was_counted(row: dict[str, Any], starts: list[dict[str, Any]]) -> bool:
    """Whether an earlier start, killed before it dropped the row, counted it as thrown away."""
    return any(start["step"] < row["step"] and row["wall_seconds"] <= start["wall_seconds"] for start in starts)


def budget_reached(clocks: Clocks, updates: int, budgets: Any) -> str | None:
    """The budget of this invocation that is spent, in words, or None.

    Args:
        updates: those of this invocation.
        budgets: has `stop_after_updates`, `max_hours`, `max_cost` and `price_per_hour`, each a number or None.
    """
    hours = clocks.invocation_seconds / 3600
    spent = {
        "stop_after_updates": float(updates),
        "max_hours": hours,
        "max_cost": hours * (budgets.price_per_hour or 0.0),
    }
    limits = {name: getattr(budgets, name) for name in spent}
    return next((f"{n}={limit:g}" for n, limit in limits.items() if limit is not None and spent[n] >= limit), None)
