"""Windows of T+1 tokens as a pure function of (seed, k): no sampler state, an instant resume, nothing seen twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from ..errors import ConfigError, DataError
from .permutation import epoch_order, hash_counters, key_of
from .target_sources import TargetSources

WindowOrder = Literal["permutation", "random", "sequential"]


def document_positions(ids: np.ndarray, separator: int) -> np.ndarray:
    """Place of each id within its document, int64 of the shape of `ids` (n, T).

    Counting begins anew at each separator, which is the first id of a document, and at the beginning of a row: what
    stood before it is not seen.
    """
    places = np.arange(ids.shape[-1])
    return places - np.maximum.accumulate(np.where(ids == separator, places, 0), axis=-1)


class TokenWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows cut from token streams, each supervising exactly T = `sequence_length` targets.

    Window k depends on (seed, k) alone, for every k >= 0; processes take any k they like and never need to agree.

    - `permutation`: every stride-T window (floor((L - 1) / T) of a stream of L ids) once per epoch, in a new seeded
      order each epoch; k counts on through the epochs.
    - `random`: starts drawn uniformly, with replacement, from all legal ones (L - T of a stream of L ids).
    - `sequential`: the k-th stride-T window, for validation; `IndexError` past the last.

    Windows never cross streams. `ids == targets_per_epoch + dropped_ids` always holds.

    Args:
        streams: one flat read-only array of ids per shard file (memory-mapped, uint16 or uint32).
        sequence_length: T, tokens.
        order: see above.
        seed: any integer.
        names: what `describe` calls the streams; their indices when absent.
        separator: the first id of each document; when given, `batch` adds positions that keep documents apart.
        sources: where the streams come from; without it `source_names` is empty.

    Raises:
        DataError: no stream holds a single window.
    """

    every_position_is_a_target = True

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        sequence_length: int,
        order: WindowOrder,
        seed: int,
        names: Sequence[str] | None = None,
        separator: int | None = None,
        sources: TargetSources | None = None,
    ) -> None:
        if sequence_length < 1:
            raise ConfigError(f"sequence_length={sequence_length} is not a window; give 1 or more tokens.")
        if order not in ("permutation", "random", "sequential"):
            raise ConfigError(f"window order {order!r} is unknown; use permutation, random or sequential.")
        self.sequence_length = sequence_length
        self.order: WindowOrder = order
        self.seed = seed
        self.separator = separator
        self._sources = sources
        self.names = list(names) if names is not None else [str(index) for index in range(len(streams))]
        lengths = np.array([len(stream) for stream in streams], dtype=np.int64)
        self.ids = int(lengths.sum())
        stride_windows = np.maximum(lengths - 1, 0) // sequence_length
        self.windows_per_epoch = int(stride_windows.sum())
        if not self.windows_per_epoch:
            raise DataError(
                f"no stream holds a window: the longest of {len(streams)} has {int(lengths.max(initial=0)):,} ids and "
                f"{sequence_length + 1:,} are needed (sequence_length + 1). Add text, or use a smaller sequence_length."
            )
        self._stride_ends = np.cumsum(stride_windows)
        self._start_ends = np.cumsum(np.maximum(lengths - sequence_length, 0))
        width = sequence_length + 1
        # Strided views, no copies: row s of a view is the window that starts at s, so one index gathers many windows.
        self._views = [
            np.lib.stride_tricks.sliding_window_view(stream, width) if len(stream) >= width else None
            for stream in streams
        ]
        self._key = key_of("windows", order, seed)

    def __len__(self) -> int:
        """Windows of one epoch (of the nominal epoch, in random order)."""
        return self.windows_per_epoch

    @property
    def document_attention(self) -> bool:
        """Whether targets attend only inside their document."""
        return self.separator is not None

    @property
    def targets_per_epoch(self) -> int:
        """Supervised targets of one epoch: windows x T."""
        return self.windows_per_epoch * self.sequence_length

    @property
    def dropped_ids(self) -> int:
        """Ids that no stride-T window supervises: the first of each stream, its tail, and streams without a window."""
        return self.ids - self.targets_per_epoch

    def locate(self, ks: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Stream index (n,) and first token's position (n,) of each window of `ks` (n,).

        Raises:
            IndexError: a k is negative or, in sequential order, past the last window.
        """
        counters = np.asarray(ks, dtype=np.int64).reshape(-1)
        self._check_range(counters)
        if self.order == "random":
            draws = hash_counters(counters.astype(np.uint64), self._key)
            ends, scale = self._start_ends, 1
            positions = (draws % np.uint64(ends[-1])).astype(np.int64)
        else:
            ends, scale = self._stride_ends, self.sequence_length
            in_order = self.order == "sequential"
            positions = counters if in_order else epoch_order(counters, self.windows_per_epoch, self._key)
        streams = np.searchsorted(ends, positions, side="right")
        first = np.concatenate(([0], ends))[streams]
        return streams, (positions - first) * scale

    def gather(self, ks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Ids of each window of `ks` (n,): int64 (n, T+1)."""
        streams, starts = self.locate(ks)
        windows = np.empty((len(starts), self.sequence_length + 1), dtype=np.int64)
        for stream in np.unique(streams):
            view = self._views[stream]
            assert view is not None, "a stream without a window was located"
            rows = streams == stream
            windows[rows] = view[starts[rows]]
        return windows

    def batch(self, ks: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """`input_ids` and `shift_labels` of the windows `ks` (n,), both contiguous int64 (n, T).

        `shift_labels[i, t]` is the token after `input_ids[i, t]`. With document attention there are also `position_ids`
        (n, T), which the model takes as it takes the ids.
        """
        ids = self.gather(ks)
        windows = torch.from_numpy(ids)
        batch = {"input_ids": windows[:, :-1].contiguous(), "shift_labels": windows[:, 1:].contiguous()}
        if self.separator is not None:
            batch["position_ids"] = torch.from_numpy(document_positions(ids[:, :-1], self.separator))
        return batch

    @property
    def source_names(self) -> list[str]:
        """The sources that `target_sources` counts by; none when they are not known."""
        return [] if self._sources is None else self._sources.names

    def target_sources(self, ks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of `source_names` each target of the windows `ks` (n,) comes from: int64 (n, T).

        A separator belongs to the document that it begins.
        """
        assert self._sources is not None, "windows without sources were asked for them"
        streams, starts = self.locate(ks)
        found = np.empty((len(starts), self.sequence_length), dtype=np.int64)
        for stream in np.unique(streams):
            rows = streams == stream
            positions = starts[rows, None] + np.arange(1, self.sequence_length + 1)
            found[rows] = self._sources.at(int(stream), positions)
        return found

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        """What `batch` gives of window k, without its first dimension."""
        return {name: rows[0] for name, rows in self.batch([k]).items()}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The windows of the first epoch. Without this, `for` would count k up for ever."""
        return (self[k] for k in range(len(self)))

    def describe(self, k: int) -> dict[str, Any]:
        """Where window k comes from, for people: `window`, `shard` (name), `start` and `end` (ids, end exclusive)."""
        streams, starts = self.locate([k])
        start = int(starts[0])
        return {
            "window": k,
            "shard": self.names[int(streams[0])],
            "start": start,
            "end": start + self.sequence_length + 1,
        }

    def _check_range(self, counters: np.ndarray) -> None:
        if counters.size and counters.min() < 0:
            raise IndexError(f"window {counters.min()} does not exist; windows count from 0.")
        if self.order == "sequential" and counters.size and counters.max() >= self.windows_per_epoch:
            raise IndexError(f"window {counters.max():,} does not exist; there are {self.windows_per_epoch:,}.")
