"""A run as columns of numbers, with what they are judged by: the form that the diagnoses read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..contract import beginning
from .follow import column, number
from .run import Run

_COLUMNS = (
    *("step", "supervised_tokens", "loss", "learning_rate", "grad_norm", "seconds", "data_seconds", "wall_seconds"),
    *("tokens_per_second", "mfu", "gradient_signal", "gradient_noise", "noise_scale"),
)


@dataclass(frozen=True)
class History:
    """What the rows and events of one run say. A number that is not known is None, in a column nan.

    Attributes:
        columns: (updates,) float64 by the keys of metrics.jsonl, of updates with a loss, in order.
        evaluations: rows with an `eval_loss`.
        vocab_size: tokens that the model tells apart.
        updates: planned ones.
        batch_tokens: targets of an update, of the newest where the batch grows.
        batch_grows: not all updates so far are of one size.
        epoch_tokens: targets of one pass over the data.
        branched: the run began with weights of another one.
        conversations: it is a chat stage, whose test conversations are of another kind than those trained on.
        finished: DONE.json is there.
    """

    columns: dict[str, np.ndarray]
    evaluations: Sequence[dict[str, Any]] = ()
    events: Sequence[dict[str, Any]] = ()
    vocab_size: float | None = None
    updates: float | None = None
    warmup: int = 0
    max_grad_norm: float | None = None
    batch_tokens: float | None = None
    batch_grows: bool = False
    epoch_tokens: float | None = None
    branched: bool = False
    conversations: bool = False
    finished: bool = False
    _empty: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)

    def __len__(self) -> int:
        return len(self["loss"])

    def __getitem__(self, key: str) -> np.ndarray:
        """A column, (updates,)."""
        found = self.columns.get(key)
        return np.full(len(self.columns.get("loss", self._empty)), np.nan) if found is None else found

    def last(self, key: str) -> float | None:
        """The newest number of a column."""
        known = self[key][~np.isnan(self[key])]
        return float(known[-1]) if len(known) else None

    @property
    def done_share(self) -> float:
        """Part of the planned updates that is done, 0 to 1; 1 when the plan is not known and the run is finished."""
        step = self.last("step")
        if self.updates and step is not None:
            return min(1.0, step / self.updates)
        return float(self.finished)


def history_of(run: Run) -> History:
    """The history of a run as its folder has it now."""
    columns = {key: column(run.updates, key) for key in _COLUMNS}
    known = ~np.isnan(columns["loss"])
    training, data = run.fact("identity", "training"), run.fact("identity", "data")
    windows, length = number(data, "windows_per_epoch"), number(data, "sequence_length")
    model = run.fact("identity", "model")
    batch = float(run.plan.batch_of(max(0, run.step - 1))) if run.plan else number(training, "global_batch_tokens")
    return History(
        {key: values[known] for key, values in columns.items()},
        run.evaluations,
        run.events,
        vocab_size=number(model, "unpadded_vocab_size") or number(model, "vocab_size"),
        updates=run.planned_updates,
        warmup=int(number(training, "warmup_steps") or 0),
        max_grad_norm=number(training, "max_grad_norm"),
        batch_tokens=batch,
        batch_grows=batch != number(training, "global_batch_tokens"),
        epoch_tokens=None if windows is None or length is None else windows * length,
        branched=beginning(run.fact("identity")) is not None,
        conversations=bool(run.fact("identity", "data", "conversations_sha256")),
        finished=run.finished,
    )


def trailing_median(values: np.ndarray, width: int) -> np.ndarray:
    """(n,) median of the `width` values before each one; nan for the first `width`."""
    found = np.full(len(values), np.nan)
    if len(values) > width:
        windows = np.lib.stride_tricks.sliding_window_view(values, width)
        found[width:] = np.median(windows[:-1], axis=1)
    return found


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """(n - width + 1,) mean of each `width` neighbours; the mean of all when there are fewer."""
    if not len(values):
        return values
    width = max(1, min(width, len(values)))
    sums = np.cumsum(np.concatenate(([0.0], values)))
    found: np.ndarray = (sums[width:] - sums[:-width]) / width
    return found


def noise_of(values: np.ndarray) -> float:
    """Standard deviation of a value around its slow course, from the differences of neighbours, outliers aside."""
    if len(values) < 3:
        return 0.0
    return float(1.4826 * np.median(np.abs(np.diff(values))) / np.sqrt(2))
