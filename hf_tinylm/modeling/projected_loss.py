"""Output projection and cross-entropy in one step, a chunk of rows at a time.

The logits of a micro-batch are the largest tensor of training a small model: (B x T, V) in float32 for the softmax, and
again for its gradient. Here each chunk of rows becomes logits, then its loss, then, in the same memory, the gradient of
the logits, which is multiplied on at once; no more than one chunk exists at any time.

Shapes: N supervised rows, D hidden size, V vocabulary. Source of the idea: Liger kernels, arXiv 2410.10989, 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..planning.memory import CHUNK_ELEMENTS
from .loss import IGNORE_INDEX

ChunkLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropies (n,) in nats of logits (n, V); the logits become the gradient of their sum, in place."""
    log_probabilities = torch.log_softmax(_wide(logits), dim=-1)
    rows = torch.arange(len(targets), device=targets.device)
    losses = -log_probabilities[rows, targets]
    gradient = log_probabilities.exp_()
    gradient[rows, targets] -= 1
    logits.copy_(gradient)
    return losses


def compilable_chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`chunk_loss` written for a compiler that fuses element-wise steps: three passes over logits, no copy of them."""
    wide = _wide(logits)
    highest = wide.amax(dim=-1, keepdim=True)
    log_sum = (wide - highest).exp().sum(dim=-1, keepdim=True).log() + highest
    losses = (log_sum - wide.gather(1, targets[:, None]))[:, 0]
    is_target = torch.arange(logits.shape[1], device=logits.device)[None, :] == targets[:, None]
    logits.copy_((wide - log_sum).exp() - is_target.to(wide.dtype))
    return losses


def chunk_loss_of_any(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`chunk_loss` of rows of which some have no target: their loss and their gradient are zero."""
    without = targets == IGNORE_INDEX
    losses = compilable_chunk_loss(logits, targets.masked_fill(without, 0))
    logits.masked_fill_(without[:, None], 0.0)
    return losses.masked_fill(without, 0.0)


@torch.compiler.disable
def projected_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    shift_labels: torch.Tensor,
    loss_of_chunk: ChunkLoss = chunk_loss,
    of_targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of cross-entropies in nats of `hidden @ weight.T` over the supervised targets.

    Equal to `loss.summed_loss` of those logits, without ever holding them. Only supervised rows are computed, except on
    XLA devices, where each number of them would be compiled anew.

    Args:
        hidden: (B, T, D).
        weight: (V, D) output projection.
        shift_labels: (B, T) targets, `IGNORE_INDEX` where there is none.
        loss_of_chunk: `chunk_loss`, a compiled `compilable_chunk_loss`, or a native one.
        of_targets: (B, T) zeros to which the loss of each target is written, for those who look at it.

    Returns:
        A scalar: float32, or float64 for float64 weights.
    """
    rows, targets = hidden.flatten(0, -2), shift_labels.flatten().to(hidden.device)
    if hidden.device.type == "xla":
        return loss_of_all_rows(rows, weight, targets, of_targets)
    supervised = targets != IGNORE_INDEX
    if not bool(supervised.all()):
        rows, targets = rows[supervised], targets[supervised]
    found: tuple[torch.Tensor, torch.Tensor] = _ProjectedLoss.apply(rows, weight, targets, loss_of_chunk)
    if of_targets is not None:
        of_targets.view(-1)[supervised] = found[1].to(of_targets.dtype)
    return found[0]


def loss_of_all_rows(
    rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, of_targets: torch.Tensor | None
) -> torch.Tensor:
    """`projected_loss` of rows (N, D), targets (N,), in shapes that depend on no value, and without reading any."""
    found: tuple[torch.Tensor, torch.Tensor] = _ProjectedLoss.apply(rows, weight, targets, chunk_loss_of_any)
    if of_targets is not None:
        of_targets.view(-1).copy_(found[1])
    return found[0]


class _ProjectedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss, for a loss gradient of 1, and scales them in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, loss_of_chunk: ChunkLoss
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _compute_dtype(rows)
        own_rows, own_weight = rows.to(dtype), weight.to(dtype)
        count = max(1, CHUNK_ELEMENTS // len(weight))
        logits = own_rows.new_empty((min(count, len(rows)), len(weight)))
        total = torch.zeros((), dtype=_wide(logits[:0]).dtype, device=rows.device)
        losses = total.new_empty(len(rows))
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        rows_gradient = torch.empty_like(own_rows) if needs_rows else None
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        # The caller's autocast would only cast what is already in the right type.
        with torch.autocast(device_type=rows.device.type, enabled=False):
            for first in range(0, len(rows), count):
                chunk = own_rows[first : first + count]
                part = logits[: len(chunk)]
                torch.mm(chunk, own_weight.T, out=part)
                losses[first : first + count] = loss_of_chunk(part, targets[first : first + count])
                total += losses[first : first + count].sum()
                if rows_gradient is not None:
                    torch.mm(part, own_weight, out=rows_gradient[first : first + count])
                if weight_gradient is not None:
                    weight_gradient += torch.mm(part.T, chunk)
        ctx.gradients = (rows_gradient, weight_gradient)  # scaled in place: a copy of the projection is large
        ctx.rows_dtype = rows.dtype
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        if ctx.gradients is None:
            raise RuntimeError("The loss keeps its gradients for one backward pass. Compute it again for another.")
        (rows_gradient, weight_gradient), ctx.gradients = ctx.gradients, None
        if rows_gradient is not None:
            rows_gradient = rows_gradient.to(ctx.rows_dtype).mul_(gradient)  # a factor that is not rounded to bfloat16
        if weight_gradient is not None:
            weight_gradient.mul_(gradient)
        return rows_gradient, weight_gradient, None, None


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Float32, or float64 as it is: what a softmax is computed in."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _compute_dtype(rows: torch.Tensor) -> torch.dtype:
    """The type of matrix products: that of autocast where it is on, else of the rows."""
    kind = rows.device.type
    if rows.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return rows.dtype
