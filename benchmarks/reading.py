"""Reading windows: tokens per second of batches of random windows, beside copying as many bytes, and an instant resume.

A warm memory-mapped shard; windows of 1,025 ids, as training reads them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hf_tinylm.data.windows import TokenWindows

IDS, LENGTH, ROWS, ROUNDS = 64_000_000, 1_024, 512, 15
WINDOWS_OF_A_LONG_RUN = 5_000_000_000


def measure() -> dict[str, Any]:
    """Medians over rounds; the ratio is paired."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard.bin"
        np.random.default_rng(0).integers(0, 32_000, IDS, dtype=np.uint16).tofile(path)
        windows = TokenWindows([np.memmap(path, dtype=np.uint16, mode="r")], LENGTH, "random", 7)
        source = np.zeros((ROWS, LENGTH + 1), dtype=np.uint16)
        read, copied = [], []
        for number in range(ROUNDS):
            ks = np.arange(number * ROWS, (number + 1) * ROWS)
            read.append(_seconds(lambda ks=ks: windows.batch(ks)))
            copied.append(_seconds(lambda: (source[:, :-1].astype(np.int64), source[:, 1:].astype(np.int64))))
    ratios = [ours / limit for ours, limit in zip(read, copied, strict=True)]
    return {
        "tokens_per_second": round(ROWS * LENGTH / statistics.median(read)),
        "time_over_widening_the_same_ids_once": round(statistics.median(ratios), 2),
        "resume_seconds_at_half_of_5e9_windows": statistics.median(_resume() for _ in range(5)),
    }


def _resume() -> float:
    """Seconds to make the windows of a run of five billion and to locate those of the update in its middle."""
    stream = np.lib.stride_tricks.as_strided(np.zeros(2, np.uint16), (WINDOWS_OF_A_LONG_RUN * LENGTH + 1,), (0,))
    middle = WINDOWS_OF_A_LONG_RUN // 2 + np.arange(ROWS)
    return _seconds(lambda: TokenWindows([stream], LENGTH, "permutation", 7).locate(middle))


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
