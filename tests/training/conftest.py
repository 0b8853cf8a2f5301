from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.arguments import LMTrainingArguments
from hf_tinylm.training.trainer import LMTrainer

VOCABULARY, LENGTH, BATCH_WINDOWS = 101, 32, 8


def stream(ids: int, seed: int = 0) -> np.ndarray:
    """Ids that have something to learn: a noisy walk, so that gradients are not pure noise."""
    generator = np.random.default_rng(seed)
    return ((np.cumsum(generator.integers(0, 3, ids)) % (VOCABULARY - 4)) + 4).astype(np.uint16)


class RaggedWindows:
    """Windows whose targets are masked in part, differently for each window, as a pure function of its number."""

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows
        self.sequence_length, self.order = windows.sequence_length, windows.order

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, ks: Any) -> dict[str, torch.Tensor]:
        batch = self.windows.batch(ks)
        kept = torch.from_numpy(np.asarray(ks, dtype=np.int64) * 7919 % LENGTH)
        mask = torch.arange(LENGTH)[None, :] > kept[:, None]
        return {**batch, "shift_labels": batch["shift_labels"].masked_fill(mask, -100)}


@pytest.fixture
def ragged_windows() -> Callable[[str], RaggedWindows]:
    """Masked windows in the given order, 67 an epoch over two shards: 96 of them cross an epoch and shard borders."""
    streams = [stream(1_500), stream(700, 1)]
    return lambda order: RaggedWindows(TokenWindows(streams, LENGTH, order, 7))  # type: ignore[arg-type]


@pytest.fixture
def token_windows() -> Callable[..., TokenWindows]:
    """Validation windows of a stream of that seed."""
    return lambda seed: TokenWindows([stream(1_500, seed)], LENGTH, "sequential", 0)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., LMTrainer]:
    """A small trainer; keyword arguments are fields of LMTrainingArguments, `model` holds keys of ModelSection."""

    def make(
        name: str = "run",
        model: dict[str, Any] | None = None,
        train: Any = None,
        evaluation: Any = None,
        callbacks: list[Any] | None = None,
        eval_sets: dict[str, Any] | None = None,
        run_facts: dict[str, Any] | None = None,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        **fields: Any,
    ) -> LMTrainer:
        shape = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
        }
        built = new_model(ModelSection(**{**shape, **(model or {})}), vocabulary, length, seed=1)
        values: dict[str, Any] = {
            "use_cpu": True,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "global_batch_tokens": BATCH_WINDOWS * LENGTH,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 4,
            "train_tokens": 6 * BATCH_WINDOWS * LENGTH,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return LMTrainer(
            built,
            LMTrainingArguments(output_dir=str(tmp_path / name), **{**values, **fields}),
            train if train is not None else TokenWindows([stream(5_000), stream(700, 1)], LENGTH, "permutation", 7),
            evaluation if evaluation is not None else TokenWindows([stream(1_500, 2)], LENGTH, "sequential", 0),
            callbacks=callbacks,
            token_bytes=np.arange(vocabulary, dtype=np.int64) % 5,
            eval_sets=eval_sets,
            run_facts=run_facts,
        )

    return make
