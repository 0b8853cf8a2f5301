"""The training benchmark on GPUs: tokens/s, share of the published peak, memory, and DistributedDataParallel.

`python -m benchmarks.gpu` on a machine with one or more GPUs; the result is written with the GPU's name.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from hf_tinylm.planning.devices import peak_of

from .contenders import SHAPES, run
from .machine import median_ratio, report
from .runs import model_of

NAMES = ("ours", "stock bf16 compile", "stock bf16")
SHAPE, ROUNDS, UPDATES = "100M", 3, 12


def measure(shape: str = SHAPE, rounds: int = ROUNDS, updates: int = UPDATES) -> dict[str, Any]:
    """Medians of each contender on one GPU, and of ours on all of them, which weak scaling is read from."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "error: there is no GPU here. Run it on a machine with one, or run: python -m benchmarks train."
        )
    section, vocabulary, rows, length, accumulation = SHAPES[shape]
    flops = model_of(section, vocabulary, length).config.shape.flops_per_token_with_attention(length)
    tokens, peak, devices = (
        rows * length * accumulation,
        peak_of(torch.cuda.get_device_name()),
        torch.cuda.device_count(),
    )
    rates: dict[str, list[float]] = {name: [] for name in NAMES}
    memory = dict.fromkeys(NAMES, 0)
    on_all = []
    for _ in range(rounds):
        for name in NAMES:
            found = run(name, shape, updates)
            rates[name].append(tokens / statistics.median(found["seconds"]))
            memory[name] = max(memory[name], found["peak_bytes"])
        if devices > 1:
            on_all.append(devices * tokens / statistics.median(run("ours", shape, updates, devices)["seconds"]))
    return {
        "gpu": torch.cuda.get_device_name(),
        "devices": devices,
        "contenders": {
            name: {
                "tokens_per_second": round(statistics.median(rates[name])),
                "mfu": None if peak is None else round(flops * statistics.median(rates[name]) / peak, 3),
                "peak_bytes": memory[name],
                "ours_over_it": round(median_ratio(rates["ours"], rates[name]), 3),
            }
            for name in NAMES
        },
        "tokens_per_second_on_all": round(statistics.median(on_all)) if on_all else None,
        "scaling": round(median_ratio(on_all, rates["ours"]) / devices, 3) if on_all else None,
    }


if __name__ == "__main__":
    report("gpu", measure())
