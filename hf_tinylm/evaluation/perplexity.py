"""Loss and bits per byte of a model on the validation text of a pack, beside models that only count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from ..data.pack import Pack
from ..data.windows import TokenWindows, document_positions
from ..errors import DataError
from ..planning import uniform_loss
from .baselines import kneser_ney_bigram_loss, unigram_loss

RULE = "mean over non-overlapping windows of {length} tokens, each window seen alone; every window once"
_LOGITS_AT_ONCE = 2**26  # values, 256 MiB in float32


def evaluate_pack(model: nn.Module, pack: Pack, eval_tokens: int, progress: bool = False) -> dict[str, Any]:
    """Score `model` on the first `eval_tokens` validation targets (whole windows) of `pack`.

    Args:
        model: its forward takes ids (n, T) and gives `logits` (n, T, V).

    Returns:
        `items` (windows), `tokens`, and `results` {metric: {value, stderr, rule}}: `loss` (nats per token) and
        `bits_per_byte` of the model, and of `uniform`, `unigram` and `kneser_ney_bigram` counts of the training shards;
        `loss/NAME` of each source of the pack.

    Raises:
        DataError: the model has fewer tokens than the pack's vocabulary.
    """
    length = pack.validation.sequence_length
    windows = min(len(pack.validation), max(1, eval_tokens // length))
    ids = pack.validation.gather(np.arange(windows))
    separator = pack.validation.separator
    positions = None if separator is None else document_positions(ids[:, :-1], separator)
    by_target = target_losses(model, ids, pack.shards.vocab_size, progress, positions)
    nats = by_target.sum(axis=1, dtype=np.float64)
    contexts, targets = ids[:, :-1].ravel(), ids[:, 1:].ravel()
    streams, vocabulary = [shard.ids for shard in pack.shards.train], pack.shards.vocab_size
    rule = RULE.format(length=length)
    if positions is not None:
        rule += "; targets attend only inside their document"
    losses = {
        "loss": (float(nats.sum()) / targets.size, _standard_error(nats / length), rule),
        "uniform_loss": (uniform_loss(vocabulary), None, "every token equally likely"),
        "unigram_loss": (unigram_loss(streams, targets, vocabulary), None, "add-one counts of the training shards"),
        "kneser_ney_bigram_loss": (
            kneser_ney_bigram_loss(streams, contexts, targets, vocabulary),
            None,
            "interpolated Kneser-Ney counts of the training shards",
        ),
    }
    size = 0 if pack.token_bytes is None else int(pack.token_bytes[targets].sum())
    results = {name: dict(zip(("value", "stderr", "rule"), found, strict=True)) for name, found in losses.items()}
    if size:
        scale = targets.size / (math.log(2) * size)
        for name, (value, error, found_rule) in losses.items():
            results[name.replace("loss", "bits_per_byte")] = {
                "value": value * scale,
                "stderr": None if error is None else error * scale,
                "rule": f"{found_rule}; nats / ln 2 / bytes of UTF-8 text, separators cost nats and have no bytes",
            }
    results |= _results_of_sources(by_target, pack.validation, rule)
    return {"items": windows, "tokens": targets.size, "results": results}


@torch.no_grad()
def target_losses(
    model: nn.Module,
    ids: np.ndarray,
    vocab_size: int,
    progress: bool = False,
    position_ids: np.ndarray | None = None,
) -> np.ndarray:
    """Loss in nats of each target of the windows `ids` (n, T+1), float32 (n, T); the model's mode is restored.

    Args:
        position_ids: (n, T) when documents are to be kept apart.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    rows = max(1, _LOGITS_AT_ONCE // (ids.shape[1] * vocab_size))
    found = []
    try:
        for first in tqdm(range(0, len(ids), rows), desc="evaluate", disable=not progress):
            batch = torch.from_numpy(ids[first : first + rows]).to(device)
            apart = {}
            if position_ids is not None:  # with a cache they would only turn the rotary positions
                positions = torch.from_numpy(position_ids[first : first + rows]).to(device)
                apart = {"position_ids": positions, "use_cache": False}
            logits = model(batch[:, :-1], **apart).logits
            if logits.shape[-1] < vocab_size:
                raise DataError(
                    f"the model has {logits.shape[-1]:,} tokens and the pack {vocab_size:,}. Give the model that was "
                    "trained with this pack's tokenizer."
                )
            losses = functional.cross_entropy(logits.transpose(1, 2).float(), batch[:, 1:], reduction="none")
            found.append(losses.cpu().numpy())
    finally:
        model.train(was_training)
    return np.concatenate(found)


def _results_of_sources(by_target: np.ndarray, windows: TokenWindows, rule: str) -> dict[str, dict[str, Any]]:
    """Result of each source that has targets among `by_target` (n, T); errors as of a ratio of sums over windows."""
    sources = windows.target_sources(np.arange(len(by_target)))
    found = {}
    for number, name in enumerate(windows.source_names):
        own = sources == number
        nats, counts = np.where(own, by_target, 0.0).sum(axis=1, dtype=np.float64), own.sum(axis=1)
        if counts.any():
            value = float(nats.sum() / counts.sum())
            error = _standard_error((nats - value * counts) / counts.mean())
            of_source = f"{rule}; the {int(counts.sum()):,} targets of {name}"
            found[f"loss/{name}"] = {"value": value, "stderr": error, "rule": of_source}
    return found


def _standard_error(values: np.ndarray) -> float | None:
    """Standard error of the mean of (n,) values; None for a single one."""
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else None
