"""What the figures were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPU and versions."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    packages = ("torch", "transformers", "accelerate")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def report(name: str, found: dict[str, Any]) -> None:
    """Print what a benchmark found, and write it to benchmarks/results/NAME-DATE.json with the machine's name."""
    print(json.dumps(found, indent=2))
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    day = datetime.date.today().isoformat()
    facts = {"benchmark": name, "date": day, "machine": machine(), "results": found}
    (folder / f"{name}-{day}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def matrix_peak(dtype: torch.dtype, size: int = 2048, repeats: int = 5, device: str = "cpu") -> float:
    """FLOP/s of a square matrix product, the best of `repeats`."""
    a, b = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    out = torch.mm(a, b)
    times = []
    for _ in range(repeats):
        out[0, 0].item()  # a GPU has then done what it was given
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        out[0, 0].item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def median_ratio(first: list[float], second: list[float]) -> float:
    """Median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
