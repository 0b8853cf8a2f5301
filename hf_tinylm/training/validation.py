"""Validation inside training: fixed windows, each once, sums over targets, no logits kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from ..errors import TrainingError
from ..modeling.loss import IGNORE_INDEX, count_targets
from .batches import filled_up
from .source_loss import SOURCE_IDS, by_source, source_sums
from .xla import hand_over


def validate(
    accelerator: Any,
    model: nn.Module,
    dataset: Any,
    eval_tokens: int,
    batch_size: int,
    token_bytes: torch.Tensor | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Loss over the first `eval_tokens` targets (whole windows, at least one) of `dataset`, shared by all processes.

    Args:
        model: the unwrapped model; its mode is restored.
        dataset: windows with `sequence_length`, `len()` and `batch(ks)`; when it has `source_names`,
            `target_sources(ks)` says which of them each target comes from.
        token_bytes: (V,) bytes of each token; special tokens have none.
        stop_requested: asked before each batch; when any process says so the evaluation ends.

    Returns:
        `loss` (nats per target), `tokens` (targets used), with `token_bytes` also `bits_per_byte`, and for a dataset
        that knows them `loss_by_source` {name: nats per target}; None when it was ended early, on every process.

    Raises:
        TrainingError: there are no targets, or the loss is not finite.
    """
    windows = validation_windows(dataset, eval_tokens)
    own = np.array_split(np.arange(windows), accelerator.num_processes)[accelerator.process_index]
    names = getattr(dataset, "source_names", [])
    # nats, targets, bytes, processes that stopped; then nats and targets of each source: float64 on the host
    sums = np.zeros(4 + 2 * len(names))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, len(own), batch_size):
                if stop_requested():
                    sums[3] = 1
                    break
                ks = own[first : first + batch_size]
                batch = dataset.batch(ks)
                if names:
                    batch[SOURCE_IDS] = torch.from_numpy(dataset.target_sources(ks))
                if accelerator.device.type == "xla":
                    batch = filled_up(batch, batch_size)
                sums += _batch_sums(accelerator, model, batch, token_bytes, len(names))
    finally:
        model.train(was_training)
    if accelerator.num_processes > 1:
        summed = accelerator.reduce(torch.from_numpy(sums).to(accelerator.device), reduction="sum")
        sums = summed.cpu().numpy()
    nats, targets, size, stopped = sums[:4].tolist()
    if stopped:
        return None
    if not targets or not math.isfinite(nats):
        raise TrainingError(
            f"Validation gave {nats} nats over {targets:,.0f} targets; a finite loss over some targets is needed."
        )
    found: dict[str, Any] = {"loss": nats / targets, "tokens": targets}
    if token_bytes is not None and size:
        found["bits_per_byte"] = nats / math.log(2) / size
    if names:
        found["loss_by_source"] = by_source(names, sums[4:].reshape(2, -1))
    return found


def validation_metrics(
    sets: dict[str, Any], prefix: str, score: Callable[[Any], dict[str, Any] | None]
) -> dict[str, float]:
    """What `score` (a `validate`) finds on each set, as Hugging Face names it: `eval_loss`, and `eval_NAME_loss`.

    Args:
        sets: datasets by name; the run's own has the name `""`.

    Returns:
        The metrics, with `eval_loss/SOURCE` for each source of the run's own; none when a set was ended early.
    """
    metrics: dict[str, float] = {}
    for name, dataset in sets.items():
        found = score(dataset)
        if found is None:
            return {}
        parts = found.pop("loss_by_source", {})
        of = f"{prefix}_{name}" if name else prefix
        metrics |= {f"{of}_{key}": value for key, value in found.items()}
        metrics |= {} if name else {f"{of}_loss/{source}": value for source, value in parts.items()}
    return metrics


def validation_windows(dataset: Any, eval_tokens: int) -> int:
    """How many windows hold `eval_tokens` targets: whole ones, at least one, at most all."""
    return min(len(dataset), max(1, eval_tokens // int(dataset.sequence_length)))


def evaluation_row(metrics: dict[str, float], sets: Collection[str] = ()) -> dict[str, Any]:
    """What metrics.jsonl says of an evaluation, from what `LMTrainer.evaluate` gives; `sets` are other ones' names."""
    row: dict[str, Any] = {"eval_loss": metrics["eval_loss"]}
    if "eval_bits_per_byte" in metrics:
        row["bits_per_byte"] = metrics["eval_bits_per_byte"]
    if sets:
        keys = {"loss": "eval_loss", "bits_per_byte": "bits_per_byte", "tokens": "eval_tokens"}
        row["eval_sets"] = {
            name: {told: metrics[of] for key, told in keys.items() if (of := f"eval_{name}_{key}") in metrics}
            for name in sets
        }
    prefix = "eval_loss/"
    if parts := {k.removeprefix(prefix): value for k, value in metrics.items() if k.startswith(prefix)}:
        row["eval_loss_by_source"] = parts
    return {**row, "eval_tokens": int(metrics["eval_tokens"])}


def is_best(metrics: dict[str, float], args: TrainingArguments, state: TrainerState) -> bool:
    """Whether this validation is the best so far, kept in `state`, where Hugging Face's callbacks look for it."""
    name = args.metric_for_best_model or "loss"
    value = metrics[name if name.startswith("eval_") else f"eval_{name}"]
    greater = bool(args.greater_is_better) if args.metric_for_best_model else False
    best = state.best_metric
    if best is not None and not (value > best if greater else value < best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def _batch_sums(
    accelerator: Any, model: nn.Module, batch: dict[str, torch.Tensor], token_bytes: torch.Tensor | None, sources: int
) -> np.ndarray:
    """What a batch adds to the sums of `validate`."""
    source_ids = batch.pop(SOURCE_IDS, None)
    labels = batch["shift_labels"]
    on_device = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    wanted = {} if source_ids is None else {"return_target_losses": True}
    output = model(**on_device, num_items_in_batch=1, return_logits=False, **wanted)
    hand_over(accelerator.device)
    size = 0 if token_bytes is None else int(token_bytes[labels[labels != IGNORE_INDEX]].sum())
    total = np.array([float(output.loss), int(count_targets(labels)), size, 0], dtype=np.float64)
    if source_ids is None:
        return total
    return np.concatenate((total, source_sums(output.target_losses, labels, source_ids, sources).ravel()))
