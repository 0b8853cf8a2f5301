"""Validation inside training: fixed windows, each once, sums over targets, no logits kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import TrainingError
from ..modeling.loss import IGNORE_INDEX, count_targets


def validate(
    accelerator: Any,
    model: nn.Module,
    dataset: Any,
    eval_tokens: int,
    batch_size: int,
    token_bytes: torch.Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Loss over the first `eval_tokens` targets (whole windows, at least one) of `dataset`, shared by all processes.

    Args:
        model: the unwrapped model; its mode is restored.
        dataset: windows with `sequence_length`, `len()` and `batch(ks)`.
        token_bytes: (V,) bytes of each token; special tokens have none.
        stop_requested: asked before each batch; when any process says so the evaluation ends.

    Returns:
        `loss` (nats per target), `tokens` (targets used) and, with `token_bytes`, `bits_per_byte`; None when it was
        ended early, on every process.

    Raises:
        TrainingError: there are no targets, or the loss is not finite.
    """
    windows = min(len(dataset), max(1, eval_tokens // int(dataset.sequence_length)))
    own = np.array_split(np.arange(windows), accelerator.num_processes)[accelerator.process_index]
    sums = np.zeros(4)  # nats, targets, bytes, processes that stopped: float64 on the host
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(own), batch_size):
                if stop_requested():
                    sums[3] = 1
                    break
                sums[:3] += _batch_sums(accelerator, model, dataset.batch(own[first : first + batch_size]), token_bytes)
    finally:
        model.train(was_training)
    if accelerator.num_processes > 1:
        summed = accelerator.reduce(torch.from_numpy(sums).to(accelerator.device), reduction="sum")
        sums = summed.cpu().numpy()
    nats, targets, size, stopped = sums.tolist()
    if stopped:
        return None
    if not targets or not math.isfinite(nats):
        raise TrainingError(
            f"Validation gave {nats} nats over {targets:,.0f} targets; a finite loss over some targets is needed."
        )
    found = {"loss": nats / targets, "tokens": targets}
    if token_bytes is not None and size:
        found["bits_per_byte"] = nats / math.log(2) / size
    return found


def _batch_sums(
    accelerator: Any, model: nn.Module, batch: dict[str, torch.Tensor], token_bytes: torch.Tensor | None
) -> np.ndarray:
    labels = batch["shift_labels"]
    on_device = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    nats = float(model(**on_device, num_items_in_batch=1, return_logits=False).loss)
    size = 0 if token_bytes is None else int(token_bytes[labels[labels != IGNORE_INDEX]].sum())
    return np.array([nats, int(count_targets(labels)), size], dtype=np.float64)
