"""An update whose loss or gradient was not finite: which windows it had, what text is in them, and whether to go on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..errors import TrainingError
from .processes import gathered
from .update import UpdateResult

if TYPE_CHECKING:
    from .trainer import LMTrainer

EXCERPT_TOKENS = 64


def pass_over(trainer: LMTrainer, number: int, result: UpdateResult, batches: list[dict[str, torch.Tensor]]) -> int:
    """Record that the zero-based update was not applied; how many windows to pass over with it.

    Raises:
        TrainingError: the run must not go on, because `nonfinite` does not say skip or its limit is reached.
    """
    plan, args, record = trainer.plan, trainer.args, trainer.record
    first, taken = plan.windows_before(number) + trainer.skipped_windows, plan.windows_of(number)
    rows = plan.per_device_train_batch_size
    own = first + trainer.accelerator.process_index * plan.windows_of_process(number)
    windows = [own + batch * rows + row for batch in result.bad_batches for row in range(rows)]
    facts = describe_failure(trainer.accelerator, windows, batches, result, trainer.processing_class)
    skip = args.nonfinite == "skip" and trainer.skipped_batches < args.nonfinite_limit
    describe = getattr(trainer.train_dataset, "describe", None)
    places = [describe(window) for window in facts["windows"][:8]] if describe else None
    record.events.add("nonfinite", number, action="skipped" if skip else "stopped", **facts, places=places)
    if skip:
        return taken
    where = ", ".join(f"{window:,}" for window in facts["windows"][:8]) or f"{first:,} to {first + taken - 1:,}"
    raise TrainingError(
        f"Update {number + 1:,} has loss {result.loss} and gradient norm {result.grad_norm}; nothing of it was "
        f"applied. Its windows with such a loss: {where}. The last good checkpoint is "
        f"{record.last_checkpoint() or 'none yet'}. "
        "events.jsonl has their places and the text; lower learning_rate, or set nonfinite: skip."
    )


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
