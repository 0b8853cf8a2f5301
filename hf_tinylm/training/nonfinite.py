"""Facts about an update whose loss or gradient was not finite: which windows, and what text is in them."""

from __future__ import annotations

import math
from typing import Any

import torch

from .processes import gathered
from .update import UpdateResult

EXCERPT_TOKENS = 64


def describe_failure(
    accelerator: Any,
    windows: list[int],
    batches: list[dict[str, torch.Tensor]],
    result: UpdateResult,
    tokenizer: Any,
) -> dict[str, Any]:
    """What events.jsonl says of the failure, the same on every process.

    Args:
        windows: numbers of this process's windows in micro-batches whose loss was not finite.
        batches: this process's micro-batches.

    Returns:
        `windows` (of all processes), `loss` and `grad_norm` (None when not finite), and `excerpt`: the beginning of
        the first such window, decoded when there is a tokenizer.
    """
    excerpt = None
    if windows:
        ids = batches[result.bad_batches[0]]["input_ids"][0, :EXCERPT_TOKENS].tolist()
        excerpt = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
    told = gathered(accelerator, (windows, excerpt))
    return {
        "windows": sorted(window for own, _ in told for window in own),
        "loss": result.loss if math.isfinite(result.loss) else None,
        "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
        "excerpt": next((text for _, text in told if text is not None), None),
    }
