"""What the loop costs: LMTrainer against a bare PyTorch loop with the same model, precision and micro-batch."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.optimizer import adamw

from .machine import median_ratio
from .runs import model_of, trainer_of, windows_of

SHAPES = {
    "2M": (ModelSection(192, 4, 6, 2, 512), 2048),
    "10M": (ModelSection(320, 6, 5, 5, 864), 8192),
}
ROWS, LENGTH, UPDATES = 8, 256, 14
PAIRS = {"2M": 9, "10M": 3}


def bare_loop(model: TinyLMForCausalLM, windows: TokenWindows, updates: int) -> list[float]:
    """Seconds of each update of the plainest loop that does the same work."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.nn.Module.to(model, device).train()
    optimizer = adamw(model, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    seconds = []
    for update in range(updates):
        start = time.perf_counter()
        batch = windows.batch(range(update * ROWS, (update + 1) * ROWS))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())
        seconds.append(time.perf_counter() - start)
    return seconds


def measure() -> dict[str, Any]:
    """Median time of an update of both loops, alternating, and the median of the paired ratios."""
    found = {}
    for name, (section, vocab_size) in SHAPES.items():
        windows = windows_of(vocab_size, LENGTH)
        ours, bare = [], []
        for number in range(PAIRS[name]):
            for kind in ("ours", "bare") if number % 2 else ("bare", "ours"):  # neither always runs second
                model = model_of(section, vocab_size, LENGTH)
                if kind == "bare":
                    bare.append(statistics.median(bare_loop(model, windows, UPDATES)[2:]))
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    trainer, times = trainer_of(model, windows, Path(folder) / "run", ROWS, UPDATES)
                    trainer.train()
                ours.append(statistics.median(times.seconds[2:]))
        found[name] = {
            "trainer_update_seconds": statistics.median(ours),
            "bare_update_seconds": statistics.median(bare),
            "ratio": median_ratio(ours, bare),
            "pairs": PAIRS[name],
        }
    return found
