"""How a token budget becomes updates, windows and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import nearest_multiple
from ..errors import ConfigError
from ..sections import TrainingSection


@dataclass(frozen=True)
class UpdatePlan:
    """How a token budget is cut into updates. All counts are supervised targets unless they say windows or rows.

    Windows of conversations also hold positions without a target; there every count is of positions, and
    `masked_tokens` of the run's positions have none.
    """

    train_tokens: int
    global_batch_tokens: int
    sequence_length: int
    per_device_train_batch_size: int
    world_size: int
    masked_tokens: int = 0

    @property
    def supervised_tokens(self) -> int:
        """Targets of the whole run."""
        return self.train_tokens - self.masked_tokens

    @property
    def updates(self) -> int:
        """Updates of the run; the last may be partial, so the budget is spent to the token."""
        return -(-self.train_tokens // self.global_batch_tokens)

    @property
    def last_update_tokens(self) -> int:
        """Targets of the last update, 1 to `global_batch_tokens`."""
        return self.train_tokens - (self.updates - 1) * self.global_batch_tokens

    @property
    def windows_per_update(self) -> int:
        """Windows of one update over all processes."""
        return self.global_batch_tokens // self.sequence_length

    @property
    def windows_per_process(self) -> int:
        """Windows of one update on one process."""
        return self.windows_per_update // self.world_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update on one process."""
        return self.windows_per_process // self.per_device_train_batch_size

    def tokens_of_update(self, update: int) -> int:
        """Targets of the zero-based update."""
        return self.last_update_tokens if update == self.updates - 1 else self.global_batch_tokens

    def tokens_of_process(self, update: int, process: int) -> int:
        """Those of them that are in the windows of a process: the last update may leave the later ones without any."""
        share = self.windows_per_process * self.sequence_length
        return min(max(self.tokens_of_update(update) - process * share, 0), share)

    def tokens_before(self, update: int) -> int:
        """Targets of all updates before the zero-based update."""
        return min(update * self.global_batch_tokens, self.train_tokens)


def plan_updates(
    train_tokens: int, global_batch_tokens: int, sequence_length: int, per_device_train_batch_size: int, world_size: int
) -> UpdatePlan:
    """Cut a budget into updates, windows and micro-batches.

    Raises:
        ConfigError: there is no token to train on, or the batch is not a whole number of micro-steps.
    """
    if train_tokens < 1:
        raise ConfigError(
            f"train_tokens={train_tokens:,} is nothing to train on; 1 or more are needed. "
            "Give more text, or a shorter sequence_length."
        )
    micro = per_device_train_batch_size * sequence_length * world_size
    if global_batch_tokens % micro:
        nearest = nearest_multiple(global_batch_tokens, micro)
        raise ConfigError(
            f"global_batch_tokens={global_batch_tokens:,} is not a multiple of the {micro:,} tokens of one micro-step "
            f"({per_device_train_batch_size} rows x {sequence_length} tokens x {world_size} processes). "
            f"Use {nearest:,}, or change per_device_train_batch_size."
        )
    return UpdatePlan(train_tokens, global_batch_tokens, sequence_length, per_device_train_batch_size, world_size)


def plan_of_config(
    training: TrainingSection, sequence_length: int, available_tokens: int, world_size: int = 1
) -> UpdatePlan:
    """The plan of a configured run; `train_tokens: epoch` means each of `available_tokens` `epochs` times."""
    epoch = training.train_tokens == "epoch"
    budget = round(training.epochs * available_tokens) if epoch else int(training.train_tokens)
    return plan_updates(
        budget, training.global_batch_tokens, sequence_length, training.per_device_train_batch_size, world_size
    )
