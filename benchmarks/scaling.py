"""Two processes beside one: how much of twice the tokens per second is left. `python -m benchmarks scaling`.

Each process has one thread and the same micro-batch, so two processes do twice the work in an update, and exchange one
set of gradients for it. One process with as many threads is timed too.
"""

from __future__ import annotations

import statistics
from typing import Any

from .contenders import SHAPES, run
from .machine import median_ratio

SHAPE, ROUNDS, UPDATES, PROCESSES = "10M", 3, 5, 2


def measure() -> dict[str, Any]:
    """Tokens per second in alternation; `scaling` is 1 when two processes do twice the work of one in its time."""
    _, _, rows, length, accumulation = SHAPES[SHAPE]
    kinds = {"one": (1, "1"), "all": (PROCESSES, "1"), "one_with_all_threads": (1, str(PROCESSES))}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(ROUNDS):
        for name in list(kinds)[:: 1 if number % 2 == 0 else -1]:  # none always runs after the same one
            processes, threads = kinds[name]
            seconds = run("ours", SHAPE, UPDATES, processes, OMP_NUM_THREADS=threads)["seconds"]
            rates[name].append(processes * rows * length * accumulation / statistics.median(seconds))
    return {
        "shape": SHAPE,
        "processes": PROCESSES,
        "tokens_per_second": {name: round(statistics.median(found)) for name, found in rates.items()},
        "scaling": round(median_ratio(rates["all"], rates["one"]) / PROCESSES, 3),
        "all_over_one_with_all_threads": round(median_ratio(rates["all"], rates["one_with_all_threads"]), 3),
    }
