"""When compiling the training pass pays."""

from __future__ import annotations

# Compiling takes one to two minutes on a small machine. A run below so many FLOPs ends before that is won back.
FEWEST_FLOPS = {"cpu": 3e14, "cuda": 3e16}


def compiling_pays(flops: float, device: str) -> bool:
    """Whether a run of so many FLOPs on a kind of device (`cpu`, `cuda`) is long enough; no other kind compiles."""
    return flops >= FEWEST_FLOPS.get(device, float("inf"))
