"""When compiling the training pass pays, and how much of a micro-batch a compiled pass takes at once."""

from __future__ import annotations

# Compiling takes one to two minutes on a small machine. A run below so many FLOPs ends before that is won back.
FEWEST_FLOPS = {"cpu": 3e14, "cuda": 3e16}
# A processor multiplies more rows at once no faster; they only take memory.
TOKENS_OF_A_PASS = 2_048


def compiling_pays(flops: float, device: str) -> bool:
    """Whether a run of so many FLOPs on a kind of device (`cpu`, `cuda`) is long enough; no other kind compiles."""
    return flops >= FEWEST_FLOPS.get(device, float("inf"))


def rows_of_pass(rows: int, sequence_length: int, compiled_for_cpu: bool) -> int:
    """Windows that one forward and backward pass takes of a micro-batch of `rows`: all, unless compiled for a CPU.

    A divisor of `rows`, so that every pass has the same shape and one compiled code.
    """
    if not compiled_for_cpu:
        return rows
    most = min(rows, max(1, TOKENS_OF_A_PASS // sequence_length))
    return next(count for count in range(most, 0, -1) if rows % count == 0)
