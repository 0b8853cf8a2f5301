"""The training benchmark on GPUs: tokens/s, share of the published peak, memory, and DistributedDataParallel.

`python -m benchmarks.gpu` on a machine with one or more GPUs; the result is written with the GPU's name. Every
contender trains on the first GPU alone; ours then on all of them. With liger-kernel installed there are two more.
`--rows` is the micro-batch of each GPU: a large GPU is not busy with the 8 windows that suit a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from hf_tinylm.modeling.factory import meta_model
from hf_tinylm.planning.devices import peak_of
from hf_tinylm.training.loss_kernel import installed_version

from .contenders import LIGER_CONTENDERS, SHAPES, run
from .machine import matrix_peak, median_ratio, report

OURS = "ours"
NAMES = (OURS, "stock bf16 compile", "stock bf16")
SHAPE, ROUNDS, UPDATES, ROWS = "100M", 3, 12, 32
LARGE_PRODUCT = 8_192  # rows of the matrices whose product is timed


def measure(shape: str = SHAPE, rounds: int = ROUNDS, updates: int = UPDATES, rows: int = ROWS) -> dict[str, Any]:
    """Medians of each contender on one GPU, and of ours on all of them, which weak scaling is read from.

    A contender that fails is left out of what follows, and named with its error.
    """
    gpus = gpu_names()
    if not gpus:
        raise SystemExit(
            "error: there is no GPU here. Run it on a machine with one, or run: python -m benchmarks train."
        )
    section, vocabulary, _, length, accumulation = SHAPES[shape]
    flops = meta_model(section, vocabulary, length).config.shape.flops_per_token_with_attention(length)
    tokens, liger = rows * length * accumulation, installed_version()
    names = [*NAMES, *(LIGER_CONTENDERS if liger else ())]
    alone = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}  # else DataParallel
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    on_all: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name in names:
            _attempt(name, found[name], failed, shape=shape, updates=updates, rows=rows, **alone)
        if len(gpus) > 1:
            every = f"{OURS} on {len(gpus)}"
            _attempt(every, on_all, failed, shape=shape, updates=updates, rows=rows, processes=len(gpus))
    measured = _matrix_peak()
    rates = {name: _rates(found[name], tokens) for name in names if len(found[name]) == rounds}
    all_rates = _rates(on_all, len(gpus) * tokens) if len(on_all) == rounds else []
    published = None if len(set(gpus)) > 1 else peak_of(gpus[0])
    return {
        "gpu": gpus[0],
        "devices": len(gpus),
        "shape": shape,
        "micro_batch": [rows, length],
        "published_peak_flops": published,
        "matrix_flops": round(measured),
        "liger_kernel": liger,
        "contenders": {
            name: {
                "tokens_per_second": round(statistics.median(each)),
                "mfu": None if published is None else round(flops * statistics.median(each) / published, 3),
                "share_of_matrix_flops": round(flops * statistics.median(each) / measured, 3),
                "peak_bytes": max(one["peak_bytes"] for one in found[name]),
                "ours_over_it": round(median_ratio(rates[OURS], each), 3) if OURS in rates else None,
            }
            for name, each in rates.items()
        },
        "failed": failed,
        "tokens_per_second_on_all": round(statistics.median(all_rates)) if all_rates else None,
        "scaling": round(median_ratio(all_rates, rates[OURS]) / len(gpus), 3) if all_rates and OURS in rates else None,
    }


def gpu_names() -> list[str]:
    """The names of the GPUs that torch sees."""
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def table(found: dict[str, Any]) -> list[str]:
    """For people."""
    rows, length = found["micro_batch"]
    peak, gpu = found["published_peak_flops"], found["gpu"]
    lines = [f"{found['shape']}: {found['devices']} x {gpu}, micro-batches of {rows} x {length} tokens"]
    if peak is None:
        lines.append(f"no MFU: the published bfloat16 peak of {gpu!r} is not in hf_tinylm/planning/devices.py")
    else:
        lines.append(f"MFU is the share of {peak / 1e12:,.1f} TFLOP/s, its published bfloat16 peak")
    product = f"a product of {LARGE_PRODUCT:,} x {LARGE_PRODUCT:,}"
    lines.append(f"{product} matrices ran at {found['matrix_flops'] / 1e12:,.1f} TFLOP/s")
    lines.append(f"  {'':<24}{'tokens/s':>12}{'MFU':>7}{'of product':>12}{'memory':>11}{'ours is':>9}")
    for name, one in found["contenders"].items():
        mfu = "-" if one["mfu"] is None else f"{one['mfu']:.1%}"
        ratio = "-" if one["ours_over_it"] is None else f"{one['ours_over_it']:.2f}x"
        lines.append(
            f"  {name:<24}{one['tokens_per_second']:>12,}{mfu:>7}{one['share_of_matrix_flops']:>12.1%}"
            f"{one['peak_bytes'] / 1e9:>8.2f} GB{ratio:>9}"
        )
    if found["tokens_per_second_on_all"] is not None:
        scaling = "-" if found["scaling"] is None else f"{found['scaling']:.1%}"
        lines.append(f"  on all {found['devices']}: {found['tokens_per_second_on_all']:,} tokens/s, scaling {scaling}")
    lines += [f"  failed: {name}: {error}" for name, error in found["failed"].items()]
    return lines


def _attempt(name: str, runs: list[dict[str, Any]], failed: dict[str, str], **arguments: Any) -> None:
    """Run a contender once and say how it went; one that failed before is passed over."""
    if name in failed:
        return
    try:
        runs.append(run(OURS if name.startswith(f"{OURS} on ") else name, **arguments))
    except SystemExit as error:  # of the contender's process
        failed[name] = str(error)
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: {statistics.median(runs[-1]['seconds']):.4f} s an update", flush=True)


def _rates(runs: Sequence[dict[str, Any]], tokens: int) -> list[float]:
    return [tokens / statistics.median(one["seconds"]) for one in runs]


def _matrix_peak() -> float:
    return matrix_peak(torch.bfloat16, LARGE_PRODUCT, 10, "cuda")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default=SHAPE)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--updates", type=int, default=UPDATES)
    asked_for = parser.parse_args()
    results = measure(asked_for.shape, asked_for.rounds, asked_for.updates, asked_for.rows)
    report("gpu", results)
    print("\n".join(table(results)))
