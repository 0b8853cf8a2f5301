"""Every encoded document of a pack: copies found, splits decided, lengths known; in memory a few bytes for each.

Sorting goes by buckets of hash values: each pass reads the rows of all parts again (page cache) and sorts one bucket,
so memory is bounded however many documents there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .split import validation_bound
from .staging import Part

# Most documents sorted at once; about 60 bytes each.
BUCKET_ROWS = 2**20
DROPPED, TRAIN, VALIDATION = range(3)


@dataclass(frozen=True)
class Block:
    """The rows of one part: `first` is the number of its first document in the whole ledger."""

    part: int
    source: int
    first: int
    rows: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """Number of each document, int64 (n,)."""
        return np.arange(self.first, self.first + len(self.rows))

    @property
    def starts(self) -> np.ndarray:
        """Where each document begins in the ids of its part, int64 (n,)."""
        return np.concatenate([[0], np.cumsum(self.rows["ids"].astype(np.int64))[:-1]])


class Ledger:
    """The documents of all sources, in the order of reading.

    `split` (n,) says of each whether it is dropped (a copy, or not used), for training or for validation; `lengths`
    (n,) are its ids, separator included.

    Args:
        parts: the parts of each source.
        validation_fraction: of the different documents.
        any_order: the copy that stays must not depend on the order of reading: of the first source that has one, the
            one with the least checksum; otherwise the first one read.
    """

    def __init__(self, parts: Sequence[Sequence[Part]], validation_fraction: float, any_order: bool) -> None:
        self.parts = [part for of_source in parts for part in of_source]
        self.source_of_part = [source for source, of_source in enumerate(parts) for _ in of_source]
        self._firsts = np.concatenate([[0], np.cumsum([part.rows for part in self.parts])]).astype(np.int64)
        self.documents = int(self._firsts[-1])
        self.split = np.zeros(self.documents, np.uint8)
        self.lengths = np.zeros(self.documents, np.uint32)
        self.duplicates = np.zeros(len(parts), np.int64)
        self.bytes = np.zeros(len(parts), np.int64)
        self._decide(validation_bound(validation_fraction), any_order)

    def blocks(self, source: int | None = None) -> Iterator[Block]:
        """The rows of each part in order, of all sources or of one."""
        for number, part in enumerate(self.parts):
            if source is None or self.source_of_part[number] == source:
                yield Block(number, self.source_of_part[number], int(self._firsts[number]), part.read_rows())

    def span(self, source: int) -> tuple[int, int]:
        """Numbers of the first document of a source and of the one after its last."""
        numbers = [number for number, owner in enumerate(self.source_of_part) if owner == source]
        return (int(self._firsts[numbers[0]]), int(self._firsts[numbers[-1] + 1])) if numbers else (0, 0)

    def available(self, source: int, split: int) -> int:
        """Ids of the different documents of a source in a split, separators included."""
        first, last = self.span(source)
        return int(self.lengths[first:last][self.split[first:last] == split].sum(dtype=np.int64))

    def kept(self, any_order: bool) -> Iterator[tuple[np.ndarray, ...]]:
        """(numbers, parts, starts, ids without separator) of the documents that are not dropped, block by block.

        In the order of reading, or with `any_order` in one that does not depend on it: by source, then by digest.
        """
        if not any_order:
            for block in self.blocks():
                yield tuple(column[self.split[block.numbers] != DROPPED] for column in _columns(block))
            return
        for source in range(len(self.duplicates)):
            first, last = self.span(source)
            for low, high in buckets(last - first):
                found = []
                for block in self.blocks(source):
                    here = in_bucket(block.rows["high"], low, high) & (self.split[block.numbers] != DROPPED)
                    digests = (block.rows["high"], block.rows["low"])
                    found.append([column[here] for column in (*digests, *_columns(block))])
                high_half, low_half, *columns = (np.concatenate(column) for column in zip(*found, strict=True))
                order = np.lexsort((low_half, high_half))
                yield tuple(column[order] for column in columns)

    def drop(self, numbers: np.ndarray) -> np.ndarray:
        """Drop documents, numbers (n,), that are not dropped yet; how many of each source, int64 (sources,)."""
        dropped = np.zeros(self.documents, bool)
        dropped[numbers] = True
        counts = np.zeros(len(self.duplicates), np.int64)
        for block in self.blocks():
            here = dropped[block.numbers]
            counts[block.source] += int(here.sum())
            self.bytes[block.source] -= int(block.rows["bytes"][here].sum())
        self.split[dropped] = DROPPED
        return counts

    def _decide(self, bound: int, any_order: bool) -> None:
        for low, high in buckets(self.documents):
            columns = [self._bucket(block, low, high) for block in self.blocks()]
            numbers, sources, rows = (np.concatenate(column) for column in zip(*columns, strict=True))
            keys: tuple[np.ndarray, ...] = (numbers, rows["low"], rows["high"])
            if any_order:
                keys = (numbers, rows["ids"], rows["checksum"], sources, rows["low"], rows["high"])
            order = np.lexsort(keys)
            numbers, sources, rows = numbers[order], sources[order], rows[order]
            different = np.ones(len(rows), bool)
            different[1:] = (rows["high"][1:] != rows["high"][:-1]) | (rows["low"][1:] != rows["low"][:-1])
            self.duplicates += np.bincount(sources[~different], minlength=len(self.duplicates))
            kept = rows[different]
            validation = kept["high"] < bound if bound < 2**64 else np.ones(len(kept), bool)
            self.split[numbers[different]] = np.where(validation, VALIDATION, TRAIN)
            self.lengths[numbers[different]] = kept["ids"] + 1
            np.add.at(self.bytes, sources[different], kept["bytes"].astype(np.int64))

    def _bucket(self, block: Block, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers, sources and rows of the used documents of a block whose digest is in a bucket."""
        rows = block.rows
        inside = in_bucket(rows["high"], low, high) & (rows["used"] == 1)
        return block.numbers[inside], np.full(int(inside.sum()), block.source), rows[inside]


def _columns(block: Block) -> tuple[np.ndarray, ...]:
    return block.numbers, np.full(len(block.rows), block.part), block.starts, block.rows["ids"]


def buckets(count: int) -> Iterator[tuple[int, int]]:
    """Ranges [low, high) that cut all numbers of 64 bits into buckets of about `BUCKET_ROWS` of `count` hashes."""
    number = max(1, -(-count // BUCKET_ROWS))
    bounds = [index * 2**64 // number for index in range(number + 1)]
    yield from itertools.pairwise(bounds)


def in_bucket(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """Which uint64 `values` (n,) are in [low, high); `high` may be 2^64."""
    inside: np.ndarray = values >= np.uint64(low)
    return inside & (values <= np.uint64(high - 1))
