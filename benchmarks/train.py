"""Training speed: ours beside the stock Trainer with LlamaForCausalLM, in alternation, and the machine's own peak."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.sections import ModelSection

from .machine import matrix_peak, median_ratio
from .runs import StepTimes, model_of, trainer_of, windows_of

SECTION, VOCABULARY = ModelSection(320, 6, 5, 5, 864), 8_192  # 10 million parameters
ROWS, LENGTH, ACCUMULATION, UPDATES, ROUNDS = 16, 512, 2, 4, 3


class StockRows(Dataset[dict[str, torch.Tensor]]):
    """Windows as a stock Trainer reads them."""

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        row = self.windows[k]
        return {**row, "labels": row["input_ids"]}


def stock_times(model: PreTrainedModel, windows: TokenWindows, folder: Path, bf16: bool) -> list[float]:
    """Seconds of each update of the stock Trainer."""
    times = StepTimes()
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=ROWS, gradient_accumulation_steps=ACCUMULATION,
        max_steps=UPDATES, bf16=bf16, use_cpu=not torch.cuda.is_available(), logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(model, args, train_dataset=StockRows(windows), callbacks=[times]).train()
    return times.seconds


def measure() -> dict[str, Any]:
    """Tokens per second (median), share of the bf16 matrix peak by 6N + 12LHT, and ratios to the stock Trainer."""
    windows = windows_of(VOCABULARY, LENGTH)
    shape = model_of(SECTION, VOCABULARY, LENGTH).config.shape
    tokens = ROWS * ACCUMULATION * LENGTH
    flops = shape.flops_per_token_with_attention(LENGTH)
    peaks = {"bf16": matrix_peak(torch.bfloat16), "fp32": matrix_peak(torch.float32)}
    rates: dict[str, list[float]] = {"ours bf16": [], "stock bf16": [], "stock fp32": []}
    for _ in range(ROUNDS):
        for name, found in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                model = model_of(SECTION, VOCABULARY, LENGTH)
                if name.startswith("ours"):
                    fields = {"global_batch_tokens": tokens}
                    trainer, times = trainer_of(model, windows, Path(folder) / "run", ROWS, UPDATES, **fields)
                    trainer.train()
                    seconds = times.seconds
                else:
                    stock = stock_model(model).train()
                    seconds = stock_times(stock, windows, Path(folder), name.endswith("bf16"))
            found.append(tokens / statistics.median(seconds[1:]))
    return {
        "parameters": shape.parameters,
        "matrix_peak_gflops": {name: round(peak / 1e9) for name, peak in peaks.items()},
        "tokens_per_second": {name: round(statistics.median(found)) for name, found in rates.items()},
        "share_of_bf16_peak": {
            name: round(flops * statistics.median(found) / peaks["bf16"], 3) for name, found in rates.items()
        },
        "ours_over_stock_bf16": round(median_ratio(rates["ours bf16"], rates["stock bf16"]), 3),
        "ours_over_stock_fp32": round(median_ratio(rates["ours bf16"], rates["stock fp32"]), 3),
    }
