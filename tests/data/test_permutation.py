"""The shuffle is a bijection of any size, looks random, and costs the same anywhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from hf_tinylm.data.permutation import hash_counters, key_of, permute

SIZES = sorted(
    {*range(1, 40), 1000, 9973} | {2**power + offset for power in (6, 8, 10, 12, 15, 16) for offset in (-1, 0, 1)}
)


@pytest.mark.parametrize("size", SIZES)
def test_every_item_appears_exactly_once(size: int) -> None:
    for seed in range(3):
        order = permute(np.arange(size), size, key_of(seed))
        assert np.array_equal(np.sort(order), np.arange(size))


def plain_permute(index: int, size: int, key: int) -> int:
    """The same network in Python's unbounded integers, one item at a time."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    def hashed(counter: int, key: int) -> int:
        return mix((mix((counter * golden + key) & mask) + golden) & mask)

    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    while True:
        left, right = divmod(index, columns)
        for number in range(8):
            if number % 2 == 0:
                left = (left + hashed(right, hashed(number, key))) % rows
            else:
                right = (right + hashed(left, hashed(number, key))) % columns
        index = left * columns + right
        if index < size:
            return index


@pytest.mark.parametrize("size", [1, 2, 7, 1025, 5_000_000_000])
def test_vectorised_arithmetic_equals_that_of_plain_integers(size: int) -> None:
    key = key_of("plain", size)
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    assert permute(index, size, key).tolist() == [plain_permute(int(k), size, int(key)) for k in index]


def test_places_do_not_depend_on_how_they_are_asked_for() -> None:
    size, key = 10_007, key_of(5)
    whole = permute(np.arange(size), size, key)
    shuffled = np.random.default_rng(0).permutation(size)
    assert np.array_equal(permute(shuffled, size, key), whole[shuffled])
    assert [int(permute(np.array([k]), size, key)[0]) for k in range(0, size, 501)] == whole[::501].tolist()


def test_each_item_may_have_its_own_key() -> None:
    keys = hash_counters(np.arange(6), key_of("epochs"))
    together = permute(np.arange(6), 100, keys)
    assert together.tolist() == [int(permute(np.array([k]), 100, keys[k])[0]) for k in range(6)]


def test_all_orders_of_a_few_items_are_about_equally_frequent() -> None:
    for size in (2, 3, 4):
        draws = 4800
        keys = np.repeat(hash_counters(np.arange(draws), key_of("draws")), size)
        places = permute(np.tile(np.arange(size), draws), size, keys)
        orders = Counter(map(tuple, places.reshape(draws, size).tolist()))
        possible = len(list(permutations(range(size))))
        expected = draws / possible
        assert len(orders) == possible
        # Chi-square with possible - 1 degrees of freedom: its mean is that, its deviation the root of twice that.
        chi_square = sum((count - expected) ** 2 / expected for count in orders.values())
        assert chi_square < possible - 1 + 5 * (2 * (possible - 1)) ** 0.5


def test_neighbours_are_scattered_uniformly() -> None:
    size = 1_000_003
    order = permute(np.arange(size), size, key_of(11))
    cells = np.bincount(order[:100_000] * 100 // size, minlength=100)
    assert ((cells - 1000) ** 2 / 1000).sum() < 99 + 5 * 198**0.5
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.005
    assert np.count_nonzero(np.diff(order) == 1) < 10
    assert np.count_nonzero(order == np.arange(size)) < 10


def test_keys_give_unrelated_orders() -> None:
    size = 100_000
    first, second = (permute(np.arange(size), size, key_of(seed)) for seed in (0, 1))
    assert np.count_nonzero(first == second) < 12  # one is expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_the_middle_of_five_billion_items_is_reached_at_once() -> None:
    size = 5_000_000_000
    start = time.perf_counter()
    places = permute(np.arange(2_500_000_000, 2_500_000_000 + 4096), size, key_of(3))
    assert time.perf_counter() - start < 0.5
    assert len(np.unique(places)) == 4096
    assert places.min() >= 0
    assert places.max() < size
    assert abs(places.mean() / size - 0.5) < 0.03  # six deviations of a mean of 4,096 uniform numbers


def test_hashes_fill_all_64_bits_evenly() -> None:
    hashes = hash_counters(np.arange(20_000), key_of("bits"))
    ones = [(int(np.count_nonzero(hashes >> np.uint64(bit) & np.uint64(1)))) for bit in range(64)]
    assert max(abs(count - 10_000) for count in ones) < 5 * 71  # deviation of 20,000 fair coins
    assert len(np.unique(hashes)) == 20_000


def test_orders_are_the_same_on_every_machine_and_release() -> None:
    """Written down: a changed order would make old runs impossible to resume."""
    assert permute(np.arange(10), 10, key_of("windows", "permutation", 42)).tolist() == ORDER_OF_TEN
    assert int(key_of("windows", "random", 0)) == KEY_OF_ZERO


ORDER_OF_TEN = [2, 9, 1, 3, 0, 8, 6, 5, 4, 7]
KEY_OF_ZERO = 2_640_927_479_512_284_125
