"""Keyed permutations and hashes of counters: a shuffle of billions of items that holds no array.

Everything here is a pure function of 64-bit integers, vectorised over NumPy arrays, so item k of a shuffle costs the
same for k = 0 and for k = 5 billion, and neither order nor grouping of the calls can change a result.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

# Four rounds are the proven minimum for a pseudo-random permutation (Luby and Rackoff 1988); eight leave a margin, and
# still cost little beside reading the tokens.
ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key_of(*parts: object) -> np.uint64:
    """A 64-bit key from anything with a stable text (a seed of any size or sign, a purpose), equal on every machine."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def hash_counters(counters: np.ndarray, key: np.ndarray | np.uint64) -> np.ndarray:
    """Hash each uint64 of `counters` (any shape) under `key` (a scalar or that shape) to a uniform uint64.

    Source: SplitMix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", with the
    finalizer applied twice because keys and counters are both small consecutive numbers here.
    """
    values = _mix(np.atleast_1d(np.asarray(counters, dtype=np.uint64)) * _GOLDEN + key)
    return _mix(values + _GOLDEN).reshape(np.shape(counters))


def permute(index: np.ndarray, size: int, key: np.ndarray | np.uint64) -> np.ndarray:
    """Where each `index` (n,) in [0, size) stands in the shuffle of `size` items that `key` (scalar or (n,)) names.

    A Feistel network over the pairs (left, right) in Z_a x Z_b with a x b >= size just above `size`; a result outside
    [0, size) is permuted again until it falls inside, which keeps the map a bijection.
    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", generalized Feistel and cycle walking.
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    values = np.array(index, dtype=np.uint64)
    keys = np.broadcast_to(np.asarray(key, dtype=np.uint64), values.shape)
    pending = np.arange(values.size)
    while pending.size:
        values[pending] = _feistel(values[pending], rows, columns, keys[pending])
        pending = pending[values[pending] >= size]
    return values.astype(np.int64)


def epoch_order(counters: np.ndarray, size: int, key: np.ndarray | np.uint64) -> np.ndarray:
    """Which of `size` items stands at each of `counters` (n,) int64, which count on through epochs of `size`.

    Each epoch is a permutation of its own.
    """
    epochs, places = np.divmod(counters, size)
    return permute(places, size, hash_counters(epochs.astype(np.uint64), key))


def _feistel(values: np.ndarray, rows: int, columns: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network over `values` (n,), a bijection of [0, rows x columns) for each key."""
    a, b = np.uint64(rows), np.uint64(columns)
    left: np.ndarray = values // b
    right: np.ndarray = values % b
    for number in range(ROUNDS):
        round_keys = hash_counters(np.full(keys.shape, number, dtype=np.uint64), keys)
        if number % 2 == 0:
            left = (left + hash_counters(right, round_keys) % a) % a
        else:
            right = (right + hash_counters(left, round_keys) % b) % b
    return left * b + right


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
