"""Learning rate and momentum as pure functions of the update: no scheduler object, no state to save or step twice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..planning.updates import recorded_plan, stable_updates
from ..sections import DecayShape, LRSchedule

if TYPE_CHECKING:
    from .arguments import LMTrainingArguments


@dataclass(frozen=True)
class Schedule:
    """Linear warmup to `learning_rate`, then a course of that kind; the last update is exactly at its end.

    - `cosine`, `linear`: from the highest rate down to `learning_rate * min_lr_ratio`.
    - `constant`: the highest rate to the end.
    - `wsd` (warmup, stable, decay): the highest rate until the last `decay_fraction` of all updates, which go down to
      the floor in `decay_shape`. Source: Hu et al. 2024, arXiv 2404.06395; the shape 1 - sqrt of Haegele et al. 2024,
      arXiv 2405.18392.

    Raises:
        ConfigError: the run has no update left after its warmup, or its decay begins before the warmup ends.
    """

    learning_rate: float
    min_lr_ratio: float
    warmup_steps: int
    updates: int
    kind: LRSchedule = "cosine"
    decay_fraction: float = 0.2
    decay_shape: DecayShape = "linear"

    def __post_init__(self) -> None:
        if self.updates <= self.warmup_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps:,} leaves no update of this run, which has {self.updates:,}. "
                f"Use at most {max(0, self.updates - 1):,} warmup steps, or raise train_tokens."
            )
        if self.kind == "wsd" and self.stable_updates < self.warmup_steps:
            raise ConfigError(
                f"decay_fraction={self.decay_fraction:g} of {self.updates:,} updates begins after update "
                f"{self.stable_updates:,}, before the end of warmup_steps={self.warmup_steps:,}. Lower one of them."
            )

    @property
    def stable_updates(self) -> int:
        """Updates before the rate of a `wsd` course goes down, warmup included."""
        return stable_updates(self.updates, self.decay_fraction)

    def __call__(self, update: int) -> float:
        """The rate of the zero-based `update`."""
        if update < self.warmup_steps:
            return self.learning_rate * (update + 1) / self.warmup_steps
        floor = self.learning_rate * self.min_lr_ratio
        if self.kind == "constant":
            return self.learning_rate
        if self.kind == "wsd":
            done = update + 1 - self.stable_updates
            progress = done / (self.updates - self.stable_updates)
            return _between(self.learning_rate, floor, progress, self.decay_shape) if done > 0 else self.learning_rate
        span = self.updates - 1 - self.warmup_steps
        progress = (update - self.warmup_steps) / span if span else 1.0
        return _between(self.learning_rate, floor, progress, self.kind)


def schedule_of(args: LMTrainingArguments, updates: int) -> Schedule:
    """The schedule of a run of `updates` updates."""
    warmup = int(args.warmup_steps)
    course = (args.lr_schedule, args.decay_fraction, args.decay_shape)
    return Schedule(args.learning_rate, args.min_lr_ratio, warmup, updates, *course)


def recorded_schedule(training: dict[str, Any]) -> Schedule:
    """The schedule of the run whose contract has these `training` settings; those that it lacks have their default."""
    names = ("learning_rate", "min_lr_ratio", "warmup_steps")
    updates = recorded_plan(training).updates
    course = {name: training[name] for name in ("decay_fraction", "decay_shape") if name in training}
    kind = training.get("lr_schedule", "cosine")
    return Schedule(**{name: training[name] for name in names}, updates=updates, kind=kind, **course)


def _between(high: float, low: float, progress: float, shape: DecayShape) -> float:
    """From `high` at progress 0 to exactly `low` at 1."""
    if progress >= 1.0:
        return low
    if shape == "cosine":
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * progress))
    return low + (high - low) * (1.0 - (math.sqrt(progress) if shape == "sqrt" else progress))


# Muon's momentum at its first update, when no average of gradients exists yet.
FIRST_MOMENTUM = 0.85


def momentum_at(update: int, momentum: float, warmup_steps: int) -> float:
    """Muon's momentum at the zero-based `update`: from 0.85 to `momentum` over the first `warmup_steps`.

    Source: Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt.
    """
    if update >= warmup_steps or momentum <= FIRST_MOMENTUM:
        return momentum
    return FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * update / warmup_steps
