"""Whole conversations in windows of T positions: best-fit packing, or one conversation a window."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from .permutation import epoch_order, key_of

if TYPE_CHECKING:
    from .conversations import Conversations


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Items of `lengths` (n,), each at most `room`, in bins of `room`: the longest first, each into the fullest bin
    that it fits.

    Source: Johnson 1973, "Near-optimal bin packing algorithms" (best-fit decreasing).

    Returns:
        For each bin its items; bins and items in the order in which they were opened and put in.
    """
    bins: list[list[int]] = []
    open_bins: defaultdict[int, list[int]] = defaultdict(list)  # by what is left in them
    rooms: list[int] = []  # sorted keys of open_bins that have a bin; at most one for each size below `room`
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            left, number = room, len(bins)
            bins.append([])
        else:
            left = rooms[place]
            number = open_bins[left].pop()
            if not open_bins[left]:
                rooms.pop(place)
        bins[number].append(item)
        left -= length
        if left:
            if not open_bins[left]:
                bisect.insort(rooms, left)
            open_bins[left].append(number)
    return bins


class ConversationWindows(Dataset[dict[str, torch.Tensor]]):
    """Windows of conversations as a pure function of (seed, k), like `TokenWindows`.

    Positions restart at 0 with each conversation, and again for the padding behind the last one; a model of this
    package (and of transformers) lets no position see across a restart.

    - `permutation`: every window once per epoch, in a new seeded order each epoch; k counts on through the epochs.
    - `sequential`: every window once, in one mixed order whatever the seed, for validation (its first windows are a
      fair part of all); `IndexError` past the last.

    Args:
        sequence_length: T, positions of a window; no conversation has more.
        packing: False gives each conversation a window of its own.
        pad_id: the id of padding, which is never a target.
    """

    def __init__(
        self,
        conversations: Conversations,
        sequence_length: int,
        packing: bool,
        order: Literal["permutation", "sequential"],
        seed: int,
        pad_id: int,
    ) -> None:
        self.conversations, self.sequence_length, self.order, self.pad_id = (
            conversations,
            sequence_length,
            order,
            pad_id,
        )
        lengths = conversations.positions
        self.bins = best_fit(lengths, sequence_length) if packing else [[item] for item in range(len(lengths))]
        self.targets = np.array([int(conversations.targets[bin_].sum()) for bin_ in self.bins], dtype=np.int64)
        self._key = key_of("conversations", order, seed if order == "permutation" else 0)

    def __len__(self) -> int:
        """Windows of one epoch."""
        return len(self.bins)

    def locate(self, ks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which window each k of `ks` (n,) is, (n,) int64.

        Raises:
            IndexError: a k is negative or, in sequential order, past the last window.
        """
        counters = np.asarray(ks, dtype=np.int64).reshape(-1)
        if counters.size and (counters.min() < 0 or (self.order == "sequential" and counters.max() >= len(self))):
            raise IndexError(f"there is no window {counters.min()} to {counters.max()}; there are {len(self):,}.")
        return epoch_order(counters, len(self), self._key)

    def batch(self, ks: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """`input_ids`, `shift_labels` and `position_ids` of the windows `ks` (n,), each int64 (n, T).

        `shift_labels[i, t]` is the target after `input_ids[i, t]`, -100 where it is not supervised.
        """
        windows = self.locate(ks)
        shape = (len(windows), self.sequence_length)
        inputs, labels = np.full(shape, self.pad_id, dtype=np.int64), np.full(shape, -100, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        for row, window in enumerate(windows.tolist()):
            at = 0
            for item in self.bins[window]:
                ids, targets = self.conversations.inputs_and_targets(item)
                end = at + len(ids)
                inputs[row, at:end], labels[row, at:end], positions[row, at:end] = ids, targets, np.arange(len(ids))
                at = end
            positions[row, at:] = np.arange(self.sequence_length - at)
        arrays = {"input_ids": inputs, "shift_labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        """Window k: each tensor (T,)."""
        return {name: rows[0] for name, rows in self.batch([k]).items()}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The windows of the first epoch. Without this, `for` would count k up for ever."""
        return (self[k] for k in range(len(self)))

    def describe(self, k: int) -> dict[str, Any]:
        """What window k holds, for people: `window` and the places of its `conversations`."""
        items = self.bins[int(self.locate([k])[0])]
        return {"window": k, "conversations": [self.conversations.place(item) for item in items]}

    def positions_of(self, targets: int) -> int:
        """Positions from the first of window 0 to the one that holds the `targets`-th supervised target."""
        epochs, left = divmod(targets, int(self.targets.sum()))
        if not left:
            return epochs * len(self) * self.sequence_length
        first = epochs * len(self)
        reached = np.cumsum(self.targets[self.locate(np.arange(first, first + len(self)))])
        window = int(np.searchsorted(reached, left))
        before = int(reached[window - 1]) if window else 0
        labels = self.batch([first + window])["shift_labels"][0]
        within = int(torch.nonzero(labels != -100)[left - before - 1, 0])
        return (first + window) * self.sequence_length + within + 1

    def targets_of(self, positions: int) -> int:
        """Supervised targets of the first `positions` positions; `positions_of` backwards."""
        windows, within = divmod(positions, self.sequence_length)
        epochs, left = divmod(windows, len(self))
        found = epochs * int(self.targets.sum())
        found += int(self.targets[self.locate(np.arange(epochs * len(self), epochs * len(self) + left))].sum())
        if within:
            found += int((self.batch([windows])["shift_labels"][0, :within] != -100).sum())
        return found

    def report(self) -> dict[str, Any]:
        """Counts: `conversations windows utilisation supervised_tokens sources`."""
        return {
            "conversations": len(self.conversations),
            "windows": len(self),
            "utilisation": float(self.conversations.positions.sum()) / (len(self) * self.sequence_length),
            "supervised_tokens": int(self.targets.sum()),
            "sources": self.conversations.facts,
        }
