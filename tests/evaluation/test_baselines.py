"""The count baselines against a slow reference written with dictionaries from the published formulas."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from hf_tinylm.errors import DataError
from hf_tinylm.evaluation.baselines import KneserNeyBigram, absolute_discount, kneser_ney_bigram_loss, unigram_loss

VOCAB = 12


def discount_of(counts: list[int]) -> float:
    of_counts = Counter(counts)
    once, twice = max(1, of_counts[1]), max(1, of_counts[2])
    return once / (once + 2 * twice)


class DictionaryKneserNey:
    """One probability at a time, from dictionaries of counts."""

    def __init__(self, streams: list[list[int]], vocab_size: int) -> None:
        self.pairs = Counter(pair for stream in streams for pair in itertools.pairwise(stream))
        self.begun, self.after, self.before = Counter(), defaultdict(set), defaultdict(set)
        for (first, second), count in self.pairs.items():
            self.begun[first] += count
            self.after[first].add(second)
            self.before[second].add(first)
        self.discount = discount_of(list(self.pairs.values()))
        self.vocab_size = vocab_size

    def lower(self, word: int) -> float:
        preceding = {w: len(firsts) for w, firsts in self.before.items()}
        total, discount = sum(preceding.values()), discount_of(list(preceding.values()))
        freed = discount * len(preceding) / total
        return max(preceding.get(word, 0) - discount, 0) / total + freed / self.vocab_size

    def probability(self, context: int, word: int) -> float:
        if not self.begun[context]:
            return self.lower(word)
        direct = max(self.pairs[context, word] - self.discount, 0) / self.begun[context]
        return direct + self.discount * len(self.after[context]) / self.begun[context] * self.lower(word)


@pytest.fixture
def streams() -> list[np.ndarray]:
    """Two skewed streams over ids 0 to 9; ids 10 and 11 never occur, and id 9 only ends a stream."""
    generator = np.random.default_rng(3)
    first = generator.choice(9, size=160, p=np.array([9, 8, 7, 3, 2, 1, 1, 1, 1]) / 33)
    second = generator.choice(9, size=90, p=np.array([1, 1, 1, 1, 2, 3, 7, 8, 9]) / 33)
    return [first.astype(np.uint16), np.append(second, 9).astype(np.uint16)]


def test_the_bigram_gives_the_probabilities_of_a_dictionary_implementation(streams: list[np.ndarray]) -> None:
    reference = DictionaryKneserNey([stream.tolist() for stream in streams], VOCAB)
    model = KneserNeyBigram.fit(streams, VOCAB)
    contexts, targets = (grid.reshape(-1) for grid in np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij"))
    expected = [reference.probability(int(v), int(w)) for v, w in zip(contexts, targets, strict=True)]
    np.testing.assert_allclose(model.probabilities(contexts, targets), expected, rtol=1e-12)


def test_the_bigram_probabilities_of_every_context_sum_to_one_and_none_is_zero(streams: list[np.ndarray]) -> None:
    model = KneserNeyBigram.fit(streams, VOCAB)
    for context in range(VOCAB):
        probabilities = model.probabilities(np.full(VOCAB, context), np.arange(VOCAB))
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
        assert probabilities.min() > 0


def test_the_bigram_loss_is_the_mean_over_exactly_the_given_pairs(streams: list[np.ndarray]) -> None:
    reference = DictionaryKneserNey([stream.tolist() for stream in streams], VOCAB)
    contexts = np.array([0, 0, 8, 9, 10, 3], dtype=np.uint16)
    targets = np.array([1, 11, 8, 2, 10, 3], dtype=np.int64)
    pairs = zip(contexts.tolist(), targets.tolist(), strict=True)
    expected = -sum(math.log(reference.probability(v, w)) for v, w in pairs) / 6
    assert kneser_ney_bigram_loss(streams, contexts, targets, VOCAB) == pytest.approx(expected, rel=1e-12)


def test_a_pair_never_spans_two_streams() -> None:
    apart = KneserNeyBigram.fit([np.array([1, 2, 1, 2]), np.array([3, 4, 3, 4])], 6)
    together = KneserNeyBigram.fit([np.array([1, 2, 1, 2, 3, 4, 3, 4])], 6)
    assert apart.pair_counts.tolist() == [2, 1, 2, 1]  # (1,2) (2,1) (3,4) (4,3)
    assert len(together.pair_counts) == 5  # and (2,3)


def test_the_same_ids_cut_into_rows_or_given_as_uint32_do_not_change_the_counts(streams: list[np.ndarray]) -> None:
    contexts, targets = np.arange(VOCAB), np.arange(VOCAB)[::-1]
    loss = kneser_ney_bigram_loss(streams, contexts, targets, VOCAB)
    wider = [stream.astype(np.uint32) for stream in streams]
    assert kneser_ney_bigram_loss(wider, contexts.reshape(3, 4), targets.reshape(3, 4), VOCAB) == loss


def test_the_discount_comes_from_counts_of_counts_and_stays_inside_zero_and_one() -> None:
    assert absolute_discount(np.array([1, 1, 1, 2, 5])) == pytest.approx(3 / (3 + 2 * 1))
    assert 0 < absolute_discount(np.array([7, 8])) < 1
    assert 0 < absolute_discount(np.array([1, 1, 1])) < 1


def test_a_text_without_a_single_pair_leaves_even_chances() -> None:
    loss = kneser_ney_bigram_loss([np.array([5])], np.array([1, 2]), np.array([3, 5]), 8)
    assert loss == pytest.approx(math.log(8))


def test_the_unigram_is_add_one_over_all_streams() -> None:
    streams = [np.array([0, 0, 0, 1], dtype=np.uint16), np.array([1, 2], dtype=np.uint16)]
    expected = -(math.log((3 + 1) / (6 + 5)) + math.log((2 + 1) / (6 + 5)) + math.log((0 + 1) / (6 + 5))) / 3
    assert unigram_loss(streams, np.array([0, 1, 4]), 5) == pytest.approx(expected, rel=1e-12)


def test_a_text_of_fixed_pairs_is_far_easier_for_the_bigram_than_for_the_unigram() -> None:
    stream = np.tile(np.arange(10), 1_000)
    unigram = unigram_loss([stream], stream[1:], 10)
    assert unigram == pytest.approx(math.log(10), abs=1e-3)
    assert kneser_ney_bigram_loss([stream], stream[:-1], stream[1:], 10) < 0.01


@pytest.mark.parametrize("bad", [[0, VOCAB], [0, -1]])
def test_an_id_outside_the_vocabulary_is_refused_by_its_number(bad: list[int]) -> None:
    good = np.array([0, 1])
    for call in (
        lambda: unigram_loss([np.array(bad)], good, VOCAB),
        lambda: unigram_loss([good], np.array(bad), VOCAB),
        lambda: kneser_ney_bigram_loss([np.array(bad)], good, good, VOCAB),
        lambda: kneser_ney_bigram_loss([good], np.array(bad), good, VOCAB),
    ):
        with pytest.raises(DataError, match=str(bad[1])):
            call()


def test_contexts_and_targets_of_different_length_or_none_at_all_are_refused() -> None:
    with pytest.raises(DataError, match="2 contexts and 3 targets"):
        kneser_ney_bigram_loss([np.arange(4)], np.arange(2), np.arange(3), 4)
    with pytest.raises(DataError, match="no validation target"):
        unigram_loss([np.arange(4)], np.array([], dtype=np.int64), 4)


def test_ten_million_ids_take_a_few_seconds() -> None:
    """The bound is ten times what one slow core needs; a loop over ids would take minutes."""
    import time

    stream = (np.random.default_rng(0).zipf(1.3, 2_000_000) % 4096).astype(np.uint16)
    start = time.perf_counter()
    kneser_ney_bigram_loss([stream] * 5, stream[:100_000], stream[1:100_001], 4096)
    assert time.perf_counter() - start < 10
