"""One contender of the training benchmark, in a process of its own: `python -m benchmarks.contenders '{"name": ...}'`.

A process each, because a contender's allocator settings, compiled code and peak memory must not touch another's.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.sections import ModelSection

from .machine import matrix_peak
from .runs import StepTimes, model_of, trainer_of, windows_of

# Model, vocabulary, windows of a micro-batch, their length, micro-batches of an update.
Shape = tuple[ModelSection, int, int, int, int]
SHAPES: dict[str, Shape] = {
    "10M": (ModelSection(320, 6, 5, 5, 864), 8_192, 16, 512, 2),
    "22M": (ModelSection(384, 6, 6, 6, 1_024), 32_000, 8, 512, 2),
    "100M": (ModelSection(768, 12, 12, 4, 2_048), 32_000, 8, 1_024, 1),
    "tiny": (ModelSection(32, 2, 4, 2, 64), 512, 2, 64, 2),  # to see that everything runs; its rates say nothing
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Windows as a stock Trainer reads them."""

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        ids = self.windows[k]["input_ids"]
        return {"input_ids": ids, "labels": ids}


def ours(loss_kernel: str = "auto") -> Callable[..., StepTimes]:
    """This package with its defaults, compiled."""

    def run(shape: Shape, windows: TokenWindows, updates: int, folder: Path) -> StepTimes:
        section, vocabulary, rows, length, accumulation = shape
        batch = rows * length * accumulation * int(os.environ.get("WORLD_SIZE", "1"))
        fields = {"global_batch_tokens": batch, "torch_compile": True, "loss_kernel": loss_kernel}
        model = model_of(section, vocabulary, length)
        trainer, times = trainer_of(model, windows, folder / "run", rows, updates, **fields)
        trainer.train()
        return times

    return run


def stock(bf16: bool, compiled: bool, liger: bool = False) -> Callable[..., StepTimes]:
    """The stock Trainer with LlamaForCausalLM and stock initial weights of the same shape; `liger` patches that."""

    def run(shape: Shape, windows: TokenWindows, updates: int, folder: Path) -> StepTimes:
        section, vocabulary, rows, length, accumulation = shape
        times = StepTimes()
        args = TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation,
            max_steps=updates, bf16=bf16, torch_compile=compiled, use_cpu=not torch.cuda.is_available(),
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
            use_liger_kernel=liger,
        )  # fmt: skip
        model = stock_model(model_of(section, vocabulary, length)).train()
        Trainer(model, args, train_dataset=Rows(windows), callbacks=[times]).train()
        return times

    return run


def plain_loop(shape: Shape, windows: TokenWindows, updates: int, folder: Path) -> StepTimes:
    """A hand-written loop in the manner of nanoGPT: compiled model, bf16 autocast, clipping, fused AdamW."""
    section, vocabulary, rows, length, accumulation = shape
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: nn.Module = stock_model(model_of(section, vocabulary, length)).train()
    model.to(device)
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    times = StepTimes()
    for update in range(updates):
        times.on_step_begin()
        for micro in range(accumulation):
            first = (update * accumulation + micro) * rows
            batch = windows.batch(range(first, first + rows))
            ids, targets = batch["input_ids"].to(device), batch["shift_labels"].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = compiled(input_ids=ids, use_cache=False).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / accumulation
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss)
    return times


def floor(shape: Shape, repeats: int = 3) -> float:
    """Seconds of what no implementation on this library avoids in one update: products, attention, one softmax pass.

    Each is timed alone with buffers of its own, in bf16: forward, both products of the backward pass, torch's attention
    forward and backward, and the softmax of the logits.
    """
    section, vocabulary, rows, length, accumulation = shape
    heads, kv = section.num_attention_heads, section.num_key_value_heads
    width, inner, tokens = section.hidden_size, section.intermediate_size, rows * length
    size = section.head_dim or width // heads
    products = [(width, heads * size), (width, kv * size), (width, kv * size), (heads * size, width)]
    products += [(width, inner), (width, inner), (inner, width)]
    total = sum(section.num_hidden_layers * _product(tokens, *each, repeats) for each in products)
    total += _product(tokens, width, vocabulary, repeats)
    shapes = ((rows, heads, length, size), (rows, kv, length, size), (rows, kv, length, size))
    query, key, value = (torch.randn(each, dtype=torch.bfloat16, requires_grad=True) for each in shapes)
    upstream = torch.randn(shapes[0], dtype=torch.bfloat16)

    def attend() -> None:
        attention = nn.functional.scaled_dot_product_attention
        attention(query, key, value, is_causal=True, enable_gqa=heads != kv).backward(upstream)

    total += section.num_hidden_layers * _seconds(attend, repeats)
    logits = torch.randn(min(tokens, 2**25 // vocabulary), vocabulary, dtype=torch.bfloat16)
    total += _seconds(lambda: torch.softmax(logits, dim=-1), repeats) * tokens / len(logits)
    return accumulation * total


def _product(tokens: int, inputs: int, outputs: int, repeats: int) -> float:
    """Seconds of x @ W.T, dy @ W and dy.T @ x."""
    x, weight = torch.randn(tokens, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    upstream = torch.randn(tokens, outputs).bfloat16()
    steps = (lambda: x @ weight.T, lambda: upstream @ weight, lambda: upstream.T @ x)
    return sum(_seconds(step, repeats) for step in steps)


def _seconds(step: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a step, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


CONTENDERS: dict[str, Callable[..., StepTimes]] = {
    "ours": ours(),
    "stock bf16 compile": stock(bf16=True, compiled=True),
    "plain loop bf16 compile": plain_loop,
    "stock bf16": stock(bf16=True, compiled=False),
    "stock fp32": stock(bf16=False, compiled=False),
}
# Where liger-kernel is installed, on a GPU: ours without it, and the stock Trainer with all of it.
LIGER_CONTENDERS: dict[str, Callable[..., StepTimes]] = {
    "ours, torch's loss": ours(loss_kernel="torch"),
    "stock bf16 liger": stock(bf16=True, compiled=False, liger=True),
}


def measure(name: str, shape: Shape, updates: int) -> dict[str, Any]:
    """Seconds of the updates after the first two, of the way to the first, and peak memory, of this process."""
    vocabulary, length = shape[1], shape[3]
    if name == "machine":
        found = {"bf16_peak": matrix_peak(torch.bfloat16), "fp32_peak": matrix_peak(torch.float32)}
        return {**found, "floor_seconds": floor(shape)}
    with tempfile.TemporaryDirectory() as folder:
        windows = windows_of(vocabulary, length)
        times = {**CONTENDERS, **LIGER_CONTENDERS}[name](shape, windows, updates, Path(folder))
    cuda = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": times.seconds[1:],
        "first_update_seconds": times.first - psutil.Process().create_time() + times.seconds[0],
        "peak_bytes": peak,
    }


def run(
    name: str, shape: str, updates: int, processes: int = 1, rows: int | None = None, **environment: str
) -> dict[str, Any]:
    """`measure` in processes of their own, launched as data-parallel ones if there are several; what the first found.

    Args:
        rows: windows of a micro-batch, in place of those of the shape.
        environment: variables of the processes, beside those of this one.
    """
    asked = json.dumps({"name": name, "shape": shape, "updates": updates, "rows": rows})
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes))
    command = [sys.executable, *(launcher if processes > 1 else ()), "-m", "benchmarks.contenders", asked]
    root, variables = Path(__file__).parents[1], {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=root)
    if done.returncode:
        raise SystemExit(f"error: {name} at {shape} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    section, vocabulary, rows, *others = SHAPES[asked["shape"]]
    measured = measure(asked["name"], (section, vocabulary, asked["rows"] or rows, *others), asked["updates"])
    if os.environ.get("RANK", "0") == "0":  # lines of several processes could run into each other
        print(json.dumps(measured))
