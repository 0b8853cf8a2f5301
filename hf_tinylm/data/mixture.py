"""How much of each source a pack holds, exact to the id, and in which order its documents stand.

The order is a shuffle by a keyed hash of each document's content and of how often it has been taken, so it depends on
the documents and the seed alone: not on the order of files, of sources or of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from ..errors import DataError
from ..sections import DataSection, SourceSection
from .ledger import DROPPED, TRAIN, VALIDATION, Ledger, buckets, in_bucket
from .permutation import hash_counters, key_of


@dataclass(frozen=True)
class Cut:
    """A pass over a source that ends early: after `ids` of the document whose (key, number) is this one."""

    key: int
    number: int
    ids: int


@dataclass
class Share:
    """What a pack takes of a source: `passes` in full or up to a cut; the first one over both splits, others over
    training documents only. `target` counts ids, separators included."""

    target: int
    available: int
    passes: list[Cut | None] = field(default_factory=list)


@dataclass(frozen=True)
class Entries:
    """Consecutive documents of a pack, each array (n,): part and place of its ids, how many of them with the
    separator, and its split (`ledger.TRAIN` or `VALIDATION`)."""

    parts: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    splits: np.ndarray


class Mixture:
    """The documents of a pack in their order.

    Args:
        ledger: all documents.
        data: the configuration of sources and budgets.
        targets: ids taken of each source, as `source_targets` gives them.
        shuffle: a seeded shuffle over all sources, or the order of reading, source after source.

    Raises:
        DataError: a source cannot give what is asked of it.
    """

    def __init__(self, ledger: Ledger, data: DataSection, targets: Sequence[int], shuffle: bool) -> None:
        self.ledger, self.seed, self.shuffle = ledger, data.shuffle_seed, shuffle
        self.shares = [
            self._share(number, source, target)
            for number, (source, target) in enumerate(zip(data.sources, targets, strict=True))
        ]

    def entries(self) -> Iterator[Entries]:
        """Every document of the pack, in order."""
        if not self.shuffle:
            for source, share in enumerate(self.shares):
                for number in range(len(share.passes)):
                    for block in self._selected(source, number):
                        yield _entries([block[1:]], np.arange(len(block[0])))
            return
        total = sum(
            len(share.passes) * (span[1] - span[0])
            for share, span in ((share, self.ledger.span(source)) for source, share in enumerate(self.shares))
        )
        for low, high in buckets(total):
            found = []
            for source, share in enumerate(self.shares):
                for number in range(len(share.passes)):
                    for keys, *arrays in self._selected(source, number):
                        inside = in_bucket(keys, low, high)
                        found.append((keys[inside], *(array[inside] for array in arrays)))
            if found:
                keys = np.concatenate([arrays[0] for arrays in found])
                yield _entries([arrays[1:] for arrays in found], np.argsort(keys, kind="stable"))

    def _share(self, source: int, section: SourceSection, target: int) -> Share:
        train, validation = (self.ledger.available(source, split) for split in (TRAIN, VALIDATION))
        share = Share(target, train + validation)
        rest = target
        if rest > 0 and not train + validation:
            raise DataError(f"source {section.name} holds no documents of its own, but {target:,} ids are asked of it.")
        while rest > 0:
            size = train if share.passes else train + validation
            if size == 0:
                raise DataError(
                    f"source {section.name} has no training document to repeat: its {validation:,} ids are all "
                    f"validation, and {target:,} are asked. Lower tokens, or validation_fraction."
                )
            share.passes.append(None if size <= rest else self._cut(source, len(share.passes), rest))
            rest -= min(size, rest)
        return share

    def _cut(self, source: int, number: int, wanted: int) -> Cut:
        """Where a pass over a source must end to give `wanted` ids."""
        first, last = self.ledger.span(source)
        taken = 0
        for low, high in buckets(last - first) if self.shuffle else [(0, 2**64)]:
            found = []
            for block in self.ledger.blocks(source):
                keys = self._keys(block.rows["low"], block.numbers, "take", number)
                inside = in_bucket(keys, low, high) & self._usable(block.numbers, number)
                found.append((keys[inside], block.numbers[inside]))
            keys, numbers = (np.concatenate(column) for column in zip(*found, strict=True))
            order = np.lexsort((numbers, keys))
            lengths = np.cumsum(self.ledger.lengths[numbers[order]], dtype=np.int64)
            position = int(np.searchsorted(lengths, wanted - taken))
            if position < len(order):
                before = int(lengths[position - 1]) if position else 0
                last_one = order[position]
                return Cut(int(keys[last_one]), int(numbers[last_one]), wanted - taken - before)
            taken += int(lengths[-1]) if len(lengths) else 0
        raise AssertionError("a pass is cut only when it holds more than is wanted")

    def _selected(self, source: int, number: int) -> Iterator[tuple[np.ndarray, ...]]:
        """(order keys, parts, starts, lengths, splits) of the documents that a pass takes, part by part."""
        cut = self.shares[source].passes[number]
        for block in self.ledger.blocks(source):
            numbers, low = block.numbers, block.rows["low"]
            lengths, chosen = self.ledger.lengths[numbers].astype(np.int64), self._usable(numbers, number)
            if cut is not None:
                keys, here = self._keys(low, numbers, "take", number), numbers == cut.number
                bound = np.uint64(cut.key)
                chosen &= (keys < bound) | ((keys == bound) & (numbers <= cut.number))
                lengths[here] = cut.ids
            order = self._keys(low, numbers, "order", number)
            arrays = (order, np.full(len(low), block.part), block.starts, lengths, self.ledger.split[numbers])
            yield tuple(array[chosen] for array in arrays)

    def _usable(self, numbers: np.ndarray, number: int) -> np.ndarray:
        """Which documents pass `number` may take: all that are not dropped first, then those for training."""
        split = self.ledger.split[numbers]
        usable: np.ndarray = split == TRAIN if number else split != DROPPED
        return usable

    def _keys(self, low: np.ndarray, numbers: np.ndarray, purpose: str, number: int) -> np.ndarray:
        """A sort key for each document, uint64 (n,)."""
        if not self.shuffle:
            return numbers.astype(np.uint64)
        return hash_counters(low, key_of(self.seed, purpose, number))


def source_targets(data: DataSection, ledger: Ledger) -> list[int]:
    """Ids that a pack takes of each source: its `tokens`, its `epochs`, its part of `pack_tokens` by `weight`, or all.

    Raises:
        DataError: `pack_tokens` leaves nothing for the sources with a weight.
    """
    train = [ledger.available(source, TRAIN) for source in range(len(data.sources))]
    validation = [ledger.available(source, VALIDATION) for source in range(len(data.sources))]
    targets = [
        source.tokens if source.tokens is not None else held + round(Fraction(source.epochs or 1) * training)
        for source, training, held in zip(data.sources, train, validation, strict=True)
    ]
    weighted = [number for number, source in enumerate(data.sources) if source.weight is not None]
    if not weighted:
        return targets
    weights = [Fraction(data.sources[number].weight or 0) for number in weighted]
    if data.pack_tokens is None:  # as much as there is without repeating any
        each = min((train[n] + validation[n]) / weight for n, weight in zip(weighted, weights, strict=True))
        total = int(each * sum(weights))
    else:
        total = data.pack_tokens - sum(t for number, t in enumerate(targets) if number not in weighted)
        if total < len(weighted):
            raise DataError(
                f"pack_tokens={data.pack_tokens:,} leaves {total:,} ids for the sources with a weight. Raise it, or "
                f"lower the tokens or epochs of the others."
            )
    for number, share in zip(weighted, _apportion(total, weights), strict=True):
        targets[number] = share
    return targets


def _apportion(total: int, weights: Sequence[Fraction]) -> list[int]:
    """`total` as whole numbers in proportion to `weights`: the largest remainders are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _entries(found: Sequence[Sequence[np.ndarray]], order: np.ndarray) -> Entries:
    return Entries(*(np.concatenate(column)[order] for column in zip(*found, strict=True)))
