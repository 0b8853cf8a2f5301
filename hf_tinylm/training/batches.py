"""Micro-batches: which windows of an update a process takes, and which of their targets do not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..modeling.loss import IGNORE_INDEX
from ..planning import UpdatePlan
from .source_loss import SOURCE_IDS


def micro_batches(
    dataset: Any, plan: UpdatePlan, process: int, number: int, skipped: int, with_sources: bool
) -> list[dict[str, torch.Tensor]]:
    """One process's micro-batches of the zero-based update; targets beyond the token budget are masked.

    Args:
        skipped: windows that earlier updates passed over.
        with_sources: add the source of each target.
    """
    rows, batches = plan.per_device_train_batch_size, []
    left, first_window = plan.tokens_of_update(number), plan.windows_before(number) + skipped
    for micro in range(plan.accumulation_of(number)):
        first = process * plan.windows_of_process(number) + micro * rows
        within = np.arange(first, first + rows)  # places in the update, the same however many processes share it
        windows = first_window + within
        batch: dict[str, torch.Tensor] = dataset.batch(windows)
        if left < plan.batch_of(number):
            places = within[:, None] * plan.sequence_length + np.arange(plan.sequence_length)[None, :]
            batch["shift_labels"] = batch["shift_labels"].masked_fill(torch.from_numpy(places >= left), IGNORE_INDEX)
        if with_sources:
            batch[SOURCE_IDS] = torch.from_numpy(dataset.target_sources(windows))
        batches.append(batch)
    return batches


def filled_up(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The batch with copies of its last row, without targets, up to `rows`: another number would be compiled anew."""
    copies = {name: tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:]) for name, tensor in batch.items()}
    copies["shift_labels"] = torch.full_like(copies["shift_labels"], IGNORE_INDEX)
    return {name: torch.cat((tensor, copies[name])) for name, tensor in batch.items()}
