"""The learning rate as a pure function of the update: no scheduler object, no state to save or to step twice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warmup to `learning_rate`, then a cosine whose last update is exactly `learning_rate * min_lr_ratio`.

    Raises:
        ConfigError: the run has no update left after its warmup.
    """

    learning_rate: float
    min_lr_ratio: float
    warmup_steps: int
    updates: int

    def __post_init__(self) -> None:
        if self.updates <= self.warmup_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps:,} leaves no update of this run, which has {self.updates:,}. "
                f"Use at most {max(0, self.updates - 1):,} warmup steps, or raise train_tokens."
            )

    def __call__(self, update: int) -> float:
        """The rate of the zero-based `update`."""
        if update < self.warmup_steps:
            return self.learning_rate * (update + 1) / self.warmup_steps
        span = self.updates - 1 - self.warmup_steps
        progress = (update - self.warmup_steps) / span if span else 1.0
        floor = self.learning_rate * self.min_lr_ratio
        if progress >= 1.0:
            return floor
        return floor + 0.5 * (self.learning_rate - floor) * (1.0 + math.cos(math.pi * progress))
