"""Training speed: ours beside the stock Trainer and a plain loop, in alternation, under the machine's own limits.

`python -m benchmarks.train --shapes 10M 22M --rounds 3`; `python -m benchmarks train` runs the 10M shape.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

from .contenders import CONTENDERS, SHAPES, run
from .machine import median_ratio, report
from .runs import model_of

UPDATES = 5


def measure(shapes: tuple[str, ...] = ("10M",), rounds: int = 3, updates: int = UPDATES) -> dict[str, Any]:
    """For each shape: the machine's limits, and of each contender medians, and paired ratios to ours.

    Compiled code is kept from the first round on, so the first start of each is cold and the later ones are not.
    """
    with tempfile.TemporaryDirectory() as cache:
        return {shape: _of_shape(shape, rounds, updates, cache) for shape in shapes}


def _of_shape(shape: str, rounds: int, updates: int, cache: str) -> dict[str, Any]:
    section, vocabulary, rows, length, accumulation = SHAPES[shape]
    model = model_of(section, vocabulary, length).config.shape
    tokens, flops = rows * length * accumulation, model.flops_per_token_with_attention(length)
    kept = {"TORCHINDUCTOR_CACHE_DIR": cache}
    machine: list[dict[str, Any]] = []
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        names = list(found) if number % 2 == 0 else list(found)[::-1]  # none always runs after the same one
        machine.append(run("machine", shape, updates, **kept))
        for name in names:
            found[name].append(run(name, shape, updates, **kept))
            print(f"{shape} {name}: {tokens / statistics.median(found[name][-1]['seconds']):,.0f} tokens/s", flush=True)
    rates = {name: [tokens / statistics.median(one["seconds"]) for one in runs] for name, runs in found.items()}
    peak = statistics.median(one["bf16_peak"] for one in machine)
    floors = [tokens / one["floor_seconds"] for one in machine]
    return {
        "parameters": model.parameters,
        "tokens_per_update": tokens,
        "bf16_peak_gflops": round(peak / 1e9),
        "fp32_peak_gflops": round(statistics.median(one["fp32_peak"] for one in machine) / 1e9),
        "floor_tokens_per_second": round(statistics.median(floors)),
        "ours_over_floor": round(median_ratio(rates["ours"], floors), 3),
        "contenders": {
            name: {
                "tokens_per_second": round(statistics.median(rates[name])),
                "share_of_bf16_peak": round(flops * statistics.median(rates[name]) / peak, 3),
                "peak_bytes": max(one["peak_bytes"] for one in runs),
                "first_update_seconds": [round(one["first_update_seconds"], 1) for one in runs],
                "ours_over_it": round(median_ratio(rates["ours"], rates[name]), 3),
            }
            for name, runs in found.items()
        },
    }


def table(found: dict[str, Any]) -> list[str]:
    """The results as lines for people."""
    lines = []
    for shape, result in found.items():
        lines.append(
            f"{shape}: {result['parameters']:,} parameters; bf16 peak {result['bf16_peak_gflops']:,} GFLOP/s, "
            f"floor {result['floor_tokens_per_second']:,} tokens/s, ours at {result['ours_over_floor']:.0%} of it"
        )
        lines.append(f"  {'':<24}{'tokens/s':>10}{'of peak':>9}{'memory':>10}{'first update, again':>22}{'ours is':>9}")
        starts = {name: one["first_update_seconds"] for name, one in result["contenders"].items()}
        lines += [
            f"  {name:<24}{one['tokens_per_second']:>10,}{one['share_of_bf16_peak']:>9.0%}"
            f"{one['peak_bytes'] / 1e9:>7.2f} GB{starts[name][0]:>13.1f} s{starts[name][-1]:>6.1f} s"
            f"{one['ours_over_it']:>8.2f}x"
            for name, one in result["contenders"].items()
        ]
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["10M"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=UPDATES)
    asked_for = parser.parse_args()
    results = measure(tuple(asked_for.shapes), asked_for.rounds, asked_for.updates)
    report("train", results)
    print("\n".join(table(results)))
