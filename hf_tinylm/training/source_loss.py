"""The loss of each source: sums over its targets, which add up to the loss of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from ..modeling.loss import IGNORE_INDEX

# Key of a batch (n, T): number of the source of each target. It is taken out before the model sees the batch.
SOURCE_IDS = "source_ids"


def training_sources(asked: bool, dataset: Any) -> list[str]:
    """The sources whose loss is recorded while training; none unless it is asked for.

    Raises:
        ConfigError: it is asked for, and the windows do not know their sources.
    """
    names = list(getattr(dataset, "source_names", [])) if asked else []
    if asked and not names:
        raise ConfigError("source_loss is true, but these windows do not know their sources. Leave it out.")
    return names


def source_sums(losses: torch.Tensor, shift_labels: torch.Tensor, source_ids: torch.Tensor, sources: int) -> np.ndarray:
    """Nats, and targets, of each source: float64 (2, sources). The other three are of one shape, (B, T)."""
    used = (shift_labels != IGNORE_INDEX).flatten().numpy()
    numbers = source_ids.flatten().numpy()[used]
    nats = losses.flatten().double().cpu().numpy()[used]
    return np.stack([np.bincount(numbers, weights, minlength=sources) for weights in (nats, None)]).astype(np.float64)


def by_source(names: Sequence[str], sums: np.ndarray) -> dict[str, float]:
    """Nats per target of each source that has targets, from `source_sums` (2, sources) of all processes."""
    return {name: float(nats / targets) for name, nats, targets in zip(names, *sums.tolist(), strict=True) if targets}
