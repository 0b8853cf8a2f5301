"""Small runs that the benchmarks time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.arguments import LMTrainingArguments
from hf_tinylm.training.trainer import LMTrainer


def model_of(section: ModelSection, vocab_size: int, length: int) -> TinyLMForCausalLM:
    """A fresh model."""
    return new_model(section, vocab_size, length, seed=1)


def windows_of(vocab_size: int, length: int, ids: int = 400_000) -> TokenWindows:
    """Random ids: the time of an update does not depend on what they are."""
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    stream = np.random.default_rng(0).integers(4, vocab_size, ids).astype(dtype)
    return TokenWindows([stream], length, "permutation", 0)


class StepTimes(TrainerCallback):
    """Seconds from the beginning of each update to the beginning of the next, everything in between included."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.first = 0.0  # when the first update began, in seconds since 1970

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.first = self.first or time.time()
        self.starts.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """One per update but the last."""
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]


def trainer_of(
    model: TinyLMForCausalLM, windows: TokenWindows, output_dir: Path, rows: int, updates: int, **fields: Any
) -> tuple[LMTrainer, StepTimes]:
    """A trainer of `updates` updates with one micro-batch of `rows` windows unless `fields` say otherwise."""
    tokens = int(fields.pop("global_batch_tokens", rows * windows.sequence_length))
    values: dict[str, Any] = {
        "use_cpu": not torch.cuda.is_available(),
        "bf16": True,
        "global_batch_tokens": tokens,
        "per_device_train_batch_size": rows,
        "train_tokens": updates * tokens,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    times = StepTimes()
    args = LMTrainingArguments(output_dir=str(output_dir), **{**values, **fields})
    return LMTrainer(model, args, windows, callbacks=[times]), times
