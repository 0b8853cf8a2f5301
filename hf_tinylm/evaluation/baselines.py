"""Count models as a yardstick for the neural one: the same training ids, the same validation targets, nats per target.

A model whose validation loss is not below the bigram's has learnt less than pairs of neighbouring tokens tell.

Ids are non-negative integers below `vocab_size`. A stream is the flat id array of one shard file; a pair never spans
two streams, as a training window never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

Ids = NDArray[np.integer]
Reals = NDArray[np.float64]


def unigram_loss(train_streams: Iterable[Ids], validation_targets: Ids, vocab_size: int) -> float:
    """Mean nats per target of a unigram model with add-one smoothing: (count + 1) / (N + V).

    Args:
        train_streams: id arrays of any shape; every id is counted.
        validation_targets: `(n,)`, the ids that the model's own validation predicts.

    Raises:
        DataError: no target, or an id that is negative or not below `vocab_size`.
    """
    targets = _checked(validation_targets, vocab_size, "validation target")
    counts = _counts_of_ids(train_streams, vocab_size)
    return float(-np.log((counts[targets] + 1) / (counts.sum() + vocab_size)).mean())


def kneser_ney_bigram_loss(train_streams: Iterable[Ids], contexts: Ids, targets: Ids, vocab_size: int) -> float:
    """Mean nats per target of an interpolated Kneser-Ney bigram, on exactly the pairs that the model is scored on.

    Args:
        train_streams: id arrays, each a running text.
        contexts: `(n,)`, the input id before each target.
        targets: `(n,)`.

    Raises:
        DataError: no pair, arrays of different length, or an id that is negative or not below `vocab_size`.
    """
    if np.shape(contexts) != np.shape(targets):
        raise DataError(f"{np.size(contexts):,} contexts and {np.size(targets):,} targets; one of each is needed.")
    scored = _checked(targets, vocab_size, "validation target")
    model = KneserNeyBigram.fit(train_streams, vocab_size)
    return float(-np.log(model.probabilities(_checked(contexts, vocab_size, "context"), scored)).mean())


@dataclass(frozen=True)
class KneserNeyBigram:
    """Interpolated Kneser-Ney of order two.

    p(w | v) = max(c(v w) - D, 0) / c(v) + D N(v .) / c(v) p(w), where c counts pairs, N(v .) different tokens seen
    after v and N(. w) different tokens seen before w; D = n1 / (n1 + 2 n2), n1 and n2 being the number of pairs seen
    once and twice. p(w) is the same with N(. w) for counts, its freed mass spread evenly over the vocabulary. So every
    pair has a probability above zero and each context's sum to one; after an unseen context the answer is p(w).

    Source: Chen and Goodman 1998, "An Empirical Study of Smoothing Techniques for Language Modeling", 2.6 and 2.7.
    """

    vocab_size: int
    pair_keys: NDArray[np.uint64]  # (pairs,) sorted; context * vocab_size + target
    pair_counts: NDArray[np.int64]  # (pairs,)
    context_counts: NDArray[np.int64]  # (vocab_size,) pairs that begin with the id
    followers: NDArray[np.int64]  # (vocab_size,) different pairs that begin with the id
    discount: float
    unigram: Reals  # (vocab_size,) sums to one

    @classmethod
    def fit(cls, train_streams: Iterable[Ids], vocab_size: int) -> KneserNeyBigram:
        """Count the pairs of `train_streams`."""
        keys, counts = _counted_pairs(train_streams, vocab_size)
        firsts, seconds = np.divmod(keys, np.uint64(vocab_size))
        context_counts = np.zeros(vocab_size, dtype=np.int64)
        np.add.at(context_counts, firsts.astype(np.int64), counts)
        return cls(
            vocab_size=vocab_size,
            pair_keys=keys,
            pair_counts=counts,
            context_counts=context_counts,
            followers=np.bincount(firsts.astype(np.int64), minlength=vocab_size),
            discount=absolute_discount(counts),
            unigram=_continuation_unigram(np.bincount(seconds.astype(np.int64), minlength=vocab_size)),
        )

    def probabilities(self, contexts: Ids, targets: Ids) -> Reals:
        """p(target | context) for each pair of two `(n,)` arrays."""
        first, second = contexts.astype(np.int64), targets.astype(np.int64)
        total = np.maximum(self.context_counts[first], 1)
        direct = np.maximum(self._counts_of(first, second) - self.discount, 0.0) / total
        seen = self.context_counts[first] > 0
        left_over = np.where(seen, self.discount * self.followers[first] / total, 1.0)
        return direct + left_over * self.unigram[second]

    def _counts_of(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(self.pair_keys) == 0:
            return np.zeros(len(first), dtype=np.int64)
        keys = first.astype(np.uint64) * np.uint64(self.vocab_size) + second.astype(np.uint64)
        places = np.minimum(np.searchsorted(self.pair_keys, keys), len(self.pair_keys) - 1)
        return np.where(self.pair_keys[places] == keys, self.pair_counts[places], 0)


def absolute_discount(counts: Ids) -> float:
    """D = n1 / (n1 + 2 n2) from counts of counts, n1 and n2 taken as at least one: always above 0 and below 1.

    Source: Ney, Essen and Kneser 1994, as given in Chen and Goodman 1998, section 2.6.
    """
    once, twice = max(1, int((counts == 1).sum())), max(1, int((counts == 2).sum()))
    return once / (once + 2 * twice)


def _continuation_unigram(preceding: NDArray[np.int64]) -> Reals:
    """p(w) from the number of different tokens before each id, discounted and interpolated with 1 / V."""
    vocab_size, total = len(preceding), int(preceding.sum())
    if total == 0:
        return np.full(vocab_size, 1.0 / vocab_size)
    discount = absolute_discount(preceding)
    left_over = discount * np.count_nonzero(preceding) / total
    return np.maximum(preceding - discount, 0.0) / total + left_over / vocab_size


def _counts_of_ids(streams: Iterable[Ids], vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for stream in streams:
        if np.size(stream):
            counts += np.bincount(_checked(stream, vocab_size, "training id").astype(np.int64), minlength=vocab_size)
    return counts


def _counted_pairs(streams: Iterable[Ids], vocab_size: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Different pairs, sorted, and how often each occurs. Memory: some 40 bytes per id of the longest stream."""
    keys, counts = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    for stream in streams:
        if np.size(stream) < 2:
            continue
        ids = _checked(stream, vocab_size, "training id").astype(np.uint64)
        new_keys, new_counts = np.unique(ids[:-1] * np.uint64(vocab_size) + ids[1:], return_counts=True)
        merged, places = np.unique(np.concatenate([keys, new_keys]), return_inverse=True)
        sums = np.zeros(len(merged), dtype=np.int64)
        np.add.at(sums, places, np.concatenate([counts, new_counts]))
        keys, counts = merged, sums
    return keys, counts


def _checked(ids: Ids, vocab_size: int, what: str) -> Ids:
    """`ids` flat, all of them in the vocabulary."""
    flat = np.asarray(ids).reshape(-1)
    if len(flat) == 0:
        raise DataError(f"There is no {what} to count. Give text that is longer than one window.")
    low, high = int(flat.min()), int(flat.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(
            f"The {what} {wrong} is not below the vocabulary of {vocab_size:,}. Use the tokenizer's own shards."
        )
    return flat
