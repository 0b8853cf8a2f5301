"""Cross-entropy of rows of bfloat16 logits in AVX-512: `loss.c`."""

from __future__ import annotations

import ctypes

import torch

from ..projected_loss import chunk_loss
from .build import library


def native_chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """`projected_loss.chunk_loss`, which computes logits that are not bfloat16.

    Raises:
        IndexError: a target is no class.
    """
    if logits.dtype != torch.bfloat16 or logits.stride(-1) != 1:
        return chunk_loss(logits, targets)
    rows, classes = logits.shape
    targets, losses = targets.contiguous(), torch.empty(rows)
    strange = library().loss_of_rows(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(logits.stride(0)),
        ctypes.c_void_p(targets.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(classes),
        ctypes.c_int(torch.get_num_threads()),
        ctypes.c_void_p(losses.data_ptr()),
    )
    if strange:
        raise IndexError(f"{strange:,} of {rows:,} targets are none of the {classes:,} classes.")
    return losses


def largest_error() -> float:
    """Of losses and gradients of a small case, beside float64: the norm of the difference over that of the value."""
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(5, 523, generator=draw)).bfloat16()
    targets, wide = torch.tensor([0, 100, 522, 511, 512]), logits.double()
    pairs = [(native_chunk_loss(logits, targets), chunk_loss(wide, targets)), (logits, wide)]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
