"""What an optimizer costs besides the gradients: FLOPs of an update, and the moments that it keeps.

FLOPs are those of matrix products, as in 6N: AdamW has none, its few operations for each weight are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sections import Optim
from .shape import ModelShape


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """FLOPs of Muon's update of one matrix: per step X X' (2 s^2 l), its square (2 s^3), and that times X (2 s^2 l).

    s and l are the shorter and the longer side. Source: `torch.optim.Muon`; Jordan et al. 2024.
    """
    short, long = sorted((rows, columns))
    return steps * (4 * short**2 * long + 2 * short**3)


def optimizer_flops(shape: ModelShape, optim: Optim = "adamw", ns_steps: int = 5) -> int:
    """FLOPs of one update besides those of its tokens; every process computes all of them."""
    if optim == "adamw":
        return 0
    matrices = shape.hidden_matrices
    return sum(count * newton_schulz_flops(rows, columns, ns_steps) for (rows, columns), count in matrices.items())


@dataclass(frozen=True)
class RunFlops:
    """FLOPs of training: of a position, attention included, whether it has a target or not; and of an optimizer."""

    per_token: int
    per_update: int = 0

    @classmethod
    def of(cls, shape: ModelShape, sequence_length: int, optim: Optim = "adamw", ns_steps: int = 5) -> RunFlops:
        """Those of a model of that shape on windows of `sequence_length` tokens."""
        return cls(shape.flops_per_token_with_attention(sequence_length), optimizer_flops(shape, optim, ns_steps))

    def __call__(self, updates: int, positions: int) -> int:
        """FLOPs of that many updates over that many positions."""
        return updates * self.per_update + positions * self.per_token


def moment_bytes(shape: ModelShape, optim: Optim = "adamw") -> int:
    """Bytes of the optimizer's float32 state: two moments of each weight; Muon keeps one of a hidden matrix."""
    single = 0 if optim == "adamw" else sum(r * c * count for (r, c), count in shape.hidden_matrices.items())
    return 8 * shape.parameters - 4 * single


def checkpoint_bytes(shape: ModelShape, optim: Optim = "adamw") -> int:
    """Bytes of a checkpoint: float32 weights and the optimizer's moments; 12 for each weight with AdamW."""
    return 4 * shape.parameters + moment_bytes(shape, optim)
