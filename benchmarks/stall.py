"""How long a save holds up the update loop: in the background against synchronous, for a checkpoint over 300 MB."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from hf_tinylm.sections import ModelSection
from hf_tinylm.training.metrics import read_rows

from .runs import model_of, trainer_of, windows_of

SECTION, VOCABULARY = ModelSection(512, 6, 8, 2, 1536), 16_384
ROWS, LENGTH, UPDATES, SAVE_STEPS, ROUNDS = 4, 128, 75, 15, 2


def measure() -> dict[str, Any]:
    """Median stall of the saves but the first, which allocates the host copies."""
    stalls: dict[str, list[float]] = {"background": [], "synchronous": []}
    writes, size = [], 0
    windows = windows_of(VOCABULARY, LENGTH)
    for _ in range(ROUNDS):
        for kind in stalls:
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                trainer, _times = trainer_of(
                    model_of(SECTION, VOCABULARY, LENGTH), windows, run, ROWS, UPDATES,
                    save_strategy="steps", save_steps=SAVE_STEPS, save_total_limit=1,
                    save_in_background=kind == "background",
                )  # fmt: skip
                trainer.train()
                saves = [row for row in read_rows(run / "events.jsonl") if row["event"] == "saved"]
            stalls[kind] += [row["stall_seconds"] for row in saves[1:]]
            writes += [row["write_seconds"] for row in saves]
            size = saves[-1]["bytes"]
    background, synchronous = (statistics.median(stalls[kind]) for kind in ("background", "synchronous"))
    return {
        "checkpoint_bytes": size,
        "background_stall_seconds": background,
        "synchronous_stall_seconds": synchronous,
        "ratio": background / synchronous,
        "write_seconds": statistics.median(writes),
    }
