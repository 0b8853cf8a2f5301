"""How a token budget becomes updates, windows and micro-batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import check_growth, nearest_multiple
from ..errors import ConfigError
from ..sections import TrainingSection


@dataclass(frozen=True)
class Stage:
    """Updates of one size: the zero-based first of them, the targets of the run before it, the targets of each."""

    first_update: int
    tokens_before: int
    batch_tokens: int


@dataclass(frozen=True)
class UpdatePlan:
    """How a token budget is cut into updates. All counts are supervised targets unless they say windows or rows.

    An update has the size of the stage that it begins in: `global_batch_tokens` at first, and that of each pair
    (targets, size) of `batch_growth` from the first update on that begins at or after so many targets. Micro-batches
    stay as large as they are; a larger update has more of them. Windows are counted on through the whole run, each
    update taking up where the one before it ended.

    Windows of conversations also hold positions without a target; there every count is of positions, and
    `masked_tokens` of the run's positions have none.
    """

    train_tokens: int
    global_batch_tokens: int
    sequence_length: int
    per_device_train_batch_size: int
    world_size: int
    masked_tokens: int = 0
    batch_growth: tuple[tuple[int, int], ...] = ()

    @property
    def supervised_tokens(self) -> int:
        """Targets of the whole run."""
        return self.train_tokens - self.masked_tokens

    @property
    def positions_per_token(self) -> float:
        """Positions of the run for each target: 1 where every position has one."""
        return self.train_tokens / self.supervised_tokens

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that hold an update of the run, in order; one when the batch does not grow."""
        found = [Stage(0, 0, self.global_batch_tokens)]
        for point, batch in self.batch_growth:
            last = found[-1]
            updates = max(0, -(-(point - last.tokens_before) // last.batch_tokens))
            before = last.tokens_before + updates * last.batch_tokens
            if before >= self.train_tokens:
                break
            if not updates:  # an update of an earlier stage went beyond this point as well
                found.pop()
            found.append(Stage(last.first_update + updates, before, batch))
        return tuple(found)

    def stage_of(self, update: int) -> Stage:
        """The stage of the zero-based update."""
        return self.stages[bisect_right(self.stages, update, key=lambda stage: stage.first_update) - 1]

    @property
    def updates(self) -> int:
        """Updates of the run; the last may be partial, so the budget is spent to the token."""
        last = self.stages[-1]
        return last.first_update - (last.tokens_before - self.train_tokens) // last.batch_tokens

    @property
    def last_update_tokens(self) -> int:
        """Targets of the last update, 1 to `batch_of(updates - 1)`."""
        return self.train_tokens - self._tokens_taken(self.updates - 1)

    @property
    def full_tokens(self) -> int:
        """Targets of the run's updates if the last were not cut off."""
        return self._tokens_taken(self.updates)

    def batch_of(self, update: int) -> int:
        """Targets of the zero-based update if it is not the last one's cut off part."""
        return self.stage_of(update).batch_tokens

    def windows_of(self, update: int) -> int:
        """Windows of the zero-based update over all processes."""
        return self.batch_of(update) // self.sequence_length

    def windows_of_process(self, update: int) -> int:
        """Windows of the zero-based update on one process."""
        return self.windows_of(update) // self.world_size

    def accumulation_of(self, update: int) -> int:
        """Micro-batches of the zero-based update on one process."""
        return self.windows_of_process(update) // self.per_device_train_batch_size

    def windows_before(self, update: int) -> int:
        """Windows of all updates before the zero-based update: the number of its first one."""
        return self.positions_before(update) // self.sequence_length

    def positions_before(self, update: int) -> int:
        """Positions that all updates before the zero-based update compute, those without a target too."""
        return self._tokens_taken(update)

    def tokens_of_update(self, update: int) -> int:
        """Targets of the zero-based update."""
        return self.last_update_tokens if update == self.updates - 1 else self.batch_of(update)

    def tokens_of_process(self, update: int, process: int) -> int:
        """Those of them that are in the windows of a process: the last update may leave the later ones without any."""
        share = self.windows_of_process(update) * self.sequence_length
        return min(max(self.tokens_of_update(update) - process * share, 0), share)

    def tokens_before(self, update: int) -> int:
        """Targets of all updates before the zero-based update."""
        return min(self._tokens_taken(update), self.train_tokens)

    def _tokens_taken(self, update: int) -> int:
        stage = self.stage_of(update)
        return stage.tokens_before + (update - stage.first_update) * stage.batch_tokens


def stable_updates(updates: int, decay_fraction: float) -> int:
    """Updates of a `wsd` run before its rate goes down, warmup included; the last update is always of the decay."""
    return updates - max(1, round(decay_fraction * updates))


def plan_updates(
    train_tokens: int,
    global_batch_tokens: int,
    sequence_length: int,
    per_device_train_batch_size: int,
    world_size: int,
    batch_growth: Sequence[Sequence[int]] = (),
) -> UpdatePlan:
    """Cut a budget into updates, windows and micro-batches.

    Raises:
        ConfigError: there is no token to train on, or a batch is not a whole number of micro-steps.
    """
    if train_tokens < 1:
        raise ConfigError(
            f"train_tokens={train_tokens:,} is nothing to train on; 1 or more are needed. "
            "Give more text, or a shorter sequence_length."
        )
    shares = (per_device_train_batch_size, sequence_length, world_size)
    micro = math.prod(shares)
    check_growth(global_batch_tokens, batch_growth)
    growth = tuple((int(point), int(batch)) for point, batch in batch_growth)
    _check_batch("global_batch_tokens=", global_batch_tokens, [nearest_multiple(global_batch_tokens, micro)], shares)
    before = global_batch_tokens
    for point, batch in growth:
        below = batch // micro * micro
        legal = [size for size in (below, below + micro) if size > before]
        _check_batch(f"batch_growth from {point:,} tokens on: ", batch, legal, shares)
        before = batch
    return UpdatePlan(
        train_tokens, global_batch_tokens, sequence_length, per_device_train_batch_size, world_size, batch_growth=growth
    )


def _check_batch(key: str, batch: int, legal: Sequence[int], shares: tuple[int, int, int]) -> None:
    """Refuse a batch that rows x tokens x processes do not divide, naming what they do divide."""
    if batch % math.prod(shares):
        rows, length, processes = shares
        raise ConfigError(
            f"{key}{batch:,} is not a multiple of the {math.prod(shares):,} tokens of one micro-step "
            f"({rows} rows x {length} tokens x {processes} processes). "
            f"Use {' or '.join(f'{size:,}' for size in legal)}, or change per_device_train_batch_size."
        )


def positions_of_budget(training: Any, windows: Any) -> int:
    """Positions that the budget of `training` takes: those of `epochs` rounds, or up to the last target of a number.

    Args:
        training: with `train_tokens` and `epochs`.
        windows: with `len()`, `sequence_length` and, where not every position is a target, `positions_of(targets)`.
    """
    if training.train_tokens == "epoch":
        return round(training.epochs * (len(windows) * int(windows.sequence_length)))
    return int(getattr(windows, "positions_of", int)(int(training.train_tokens)))


def plan_of_windows(training: Any, windows: Any, world_size: int) -> UpdatePlan:
    """Updates, windows and micro-batches of a run with these settings on these windows.

    Windows of conversations say how many positions a budget of targets takes (`positions_of`, `targets_of`); in all
    others each position is a target.

    Raises:
        ConfigError: as `plan_updates`.
    """
    budget = positions_of_budget(training, windows)
    positions_of = getattr(windows, "positions_of", int)
    growth = [(positions_of(point), batch) for point, batch in training.batch_growth]
    rows, batch = training.per_device_train_batch_size, training.global_batch_tokens
    plan = plan_updates(budget, batch, int(windows.sequence_length), rows, world_size, growth)
    return replace(plan, masked_tokens=budget - getattr(windows, "targets_of", int)(budget))


def recorded_plan(training: Mapping[str, Any]) -> UpdatePlan:
    """The plan of the run whose contract has these `training` settings; they do not tell windows: T and rows are 1."""
    growth = tuple((int(point), int(batch)) for point, batch in training.get("batch_growth") or ())
    tokens, batch = int(training["train_tokens"]), int(training["global_batch_tokens"])
    return UpdatePlan(tokens, batch, 1, 1, 1, batch_growth=growth)


def plan_of_config(
    training: TrainingSection, sequence_length: int, available_tokens: int, world_size: int = 1
) -> UpdatePlan:
    """The plan of a configured run; `train_tokens: epoch` means each of `available_tokens` `epochs` times."""
    epoch = training.train_tokens == "epoch"
    budget = round(training.epochs * available_tokens) if epoch else int(training.train_tokens)
    rows, batch = training.per_device_train_batch_size, training.global_batch_tokens
    return plan_updates(budget, batch, sequence_length, rows, world_size, training.batch_growth)
