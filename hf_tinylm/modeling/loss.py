"""Next-token loss as a sum over supervised targets, divided once by the count of the whole update."""

from __future__ import annotations

import torch
from torch.nn import functional

IGNORE_INDEX = -100


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """`labels` (B, T) moved one to the left, so that position t holds the target of input t; the last has none."""
    return functional.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def count_targets(shift_labels: torch.Tensor) -> torch.Tensor:
    """Number of supervised targets in (B, T) shifted labels, as an int64 scalar."""
    return (shift_labels != IGNORE_INDEX).sum()


def summed_loss(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies in nats of logits (B, T, V) over the supervised targets of `shift_labels` (B, T).

    Computed in float32, or in float64 when the logits are float64.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(
        logits.flatten(0, -2), shift_labels.flatten().to(logits.device), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def normalised(
    total: torch.Tensor, shift_labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """A summed loss over `num_items_in_batch`, or over the targets of this batch when it is None.

    With the count of a whole update, micro-batch losses and gradients add up to those of one large batch however it
    was split. A batch without any target gives 0, not NaN, when a count is given.
    """
    count = count_targets(shift_labels) if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if torch.is_tensor(count) else count)
