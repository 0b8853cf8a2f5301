"""Next-token loss as a sum over supervised targets, divided once by the count of the whole update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

    Computed in float32, or in float64 when the logits are float64. Beside the logits their gradient is all that is
    kept, both in the dtype of the logits.
    """
    flat, targets = logits.flatten(0, -2), shift_labels.flatten().to(logits.device)
    if torch.compiler.is_compiling():  # the compiler fuses the plain form by itself
        wide = flat if flat.dtype == torch.float64 else flat.float()
        return functional.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    total: torch.Tensor = _SummedCrossEntropy.apply(flat, targets)
    return total


class _SummedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a few rows at a time.

    `functional.cross_entropy` on half-precision logits keeps a float32 copy, its log-softmax and two gradients of that
    size: 12 bytes for each logit at the peak, which are the largest tensors of a small model. Here 4 of bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum, a scalar, of logits (M, V) and targets (M,)."""
        wide_type = torch.float64 if logits.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide_type, device=logits.device)
        normaliser = torch.empty(len(targets), dtype=wide_type, device=logits.device)
        for rows in _slices(logits):
            wide, kept = logits[rows].to(wide_type), targets[rows] != IGNORE_INDEX
            torch.logsumexp(wide, dim=-1, out=normaliser[rows])
            chosen = wide.gather(-1, targets[rows].where(kept, 0)[:, None])[:, 0]
            total += (normaliser[rows] - chosen).where(kept, 0.0).sum()
        ctx.save_for_backward(logits, targets, normaliser)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(softmax - one-hot) x the gradient of the sum, zero where nothing is supervised."""
        logits, targets, normaliser = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _slices(logits):
            kept = (targets[rows] != IGNORE_INDEX)[:, None]
            wide = (logits[rows].to(normaliser.dtype) - normaliser[rows, None]).exp_()
            wide.scatter_add_(-1, targets[rows, None].where(kept, 0), torch.full_like(wide[:, :1], -1.0))
            gradient[rows] = wide.mul_(grad_total).masked_fill_(~kept, 0.0)
        return gradient, None


def _slices(logits: torch.Tensor) -> Iterator[slice]:
    """Rows whose float32 copy fits into a CPU's cache, or keeps a GPU busy."""
    elements = 2**18 if logits.device.type == "cpu" else 2**24
    rows = max(1, elements // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def normalised(
    total: torch.Tensor, shift_labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
) -> torch.Tensor:
    """A summed loss over `num_items_in_batch`, or over the targets of this batch when it is None.

    With the count of a whole update, micro-batch losses and gradients add up to those of one large batch however it
    was split. A batch without any target gives 0, not NaN, when a count is given.
    """
    count = count_targets(shift_labels) if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if torch.is_tensor(count) else count)
