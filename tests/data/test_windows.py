"""Windows are a pure function of (seed, k), cover each target once per epoch, and never cross a shard."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
import torch

from hf_tinylm.data.windows import TokenWindows, WindowOrder
from hf_tinylm.errors import ConfigError, DataError

T = 4
ORDERS: tuple[WindowOrder, ...] = ("permutation", "random", "sequential")


def make_streams(*lengths: int) -> list[np.ndarray]:
    """Ids that tell stream and position: 1000 x stream + position."""
    return [np.arange(length, dtype=np.uint16) + 1000 * number for number, length in enumerate(lengths)]


def slow_stride_windows(streams: list[np.ndarray], length: int) -> list[list[int]]:
    """Every stride-T window by plain loops."""
    windows = []
    for stream in streams:
        start = 0
        while start + length + 1 <= len(stream):
            windows.append([int(stream[start + offset]) for offset in range(length + 1)])
            start += length
    return windows


STREAMS = make_streams(23, 4, 5, 0, 9, 1, 100)


def test_sequential_windows_equal_a_slow_reference() -> None:
    windows = TokenWindows(STREAMS, T, "sequential", seed=0)
    assert windows.gather(range(len(windows))).tolist() == slow_stride_windows(STREAMS, T)


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_epoch_of_the_permutation_holds_every_stride_window_once(epoch: int) -> None:
    windows = TokenWindows(STREAMS, T, "permutation", seed=3)
    ks = np.arange(len(windows)) + epoch * len(windows)
    assert sorted(windows.gather(ks).tolist()) == sorted(slow_stride_windows(STREAMS, T))


def test_each_target_is_supervised_once_per_epoch_and_dropped_ids_are_the_others() -> None:
    windows = TokenWindows(STREAMS, T, "permutation", seed=3)
    labels = torch.cat([row["shift_labels"] for row in windows]).tolist()
    ids = [int(id_) for stream in STREAMS for id_ in stream]
    assert max(Counter(labels).values()) == 1
    assert windows.targets_per_epoch == len(labels) == len(windows) * T
    assert windows.dropped_ids == len(set(ids) - set(labels)) == len(ids) - len(labels)


@pytest.mark.parametrize("order", ORDERS)
def test_targets_are_the_inputs_shifted_by_one(order: WindowOrder) -> None:
    windows = TokenWindows(STREAMS, T, order, seed=1)
    batch = windows.batch([5, 0, 11])
    assert batch["input_ids"].shape == batch["shift_labels"].shape == (3, T)
    for name in ("input_ids", "shift_labels"):
        assert batch[name].dtype == torch.int64
        assert batch[name].is_contiguous()
    # Within a stream of these fixtures each id is its predecessor plus one.
    assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)
    row = windows[11]
    assert torch.equal(row["input_ids"], batch["input_ids"][2])
    assert torch.equal(row["shift_labels"], batch["shift_labels"][2])


@pytest.mark.parametrize("order", ["permutation", "random"])
def test_a_window_does_not_depend_on_how_windows_are_grouped(order: WindowOrder) -> None:
    windows = TokenWindows(STREAMS, T, order, seed=9)
    ks = np.arange(200)
    together = windows.gather(ks)
    one_by_one = np.concatenate([windows.gather([k]) for k in ks.tolist()])
    backwards = TokenWindows(STREAMS, T, order, seed=9).gather(ks[::-1])[::-1]
    by_rank = np.empty_like(together)
    for rank in range(4):
        by_rank[rank::4] = TokenWindows(STREAMS, T, order, seed=9).gather(ks[rank::4])
    for other in (one_by_one, backwards, by_rank):
        assert np.array_equal(together, other)


@pytest.mark.parametrize("order", ["permutation", "random"])
def test_seeds_and_epochs_give_different_orders(order: WindowOrder) -> None:
    streams = make_streams(900)
    windows = TokenWindows(streams, T, order, seed=0)
    n = len(windows)
    first, second = windows.gather(range(n)), windows.gather(range(n, 2 * n))
    other_seed = TokenWindows(streams, T, order, seed=1).gather(range(n))
    for other in (second, other_seed):
        same = np.count_nonzero((first == other).all(axis=1))
        assert same < 10  # about one is expected


def test_random_starts_are_all_legal_ones_and_equally_frequent() -> None:
    streams = make_streams(23, 4, 5, 9)
    windows = TokenWindows(streams, T, "random", seed=2)
    stream_index, starts = windows.locate(range(25_000))
    found = Counter(zip(stream_index.tolist(), starts.tolist(), strict=True))
    legal = [(number, start) for number, stream in enumerate(streams) for start in range(len(stream) - T)]
    assert sorted(found) == legal
    expected = 25_000 / len(legal)
    chi_square = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_square < len(legal) - 1 + 5 * (2 * (len(legal) - 1)) ** 0.5


def test_windows_at_the_end_of_a_shard_stop_at_its_last_id() -> None:
    for length, count, dropped in ((5, 1, 1), (8, 1, 4), (9, 2, 1), (10, 2, 2)):
        windows = TokenWindows(make_streams(length), T, "sequential", seed=0)
        assert (len(windows), windows.dropped_ids) == (count, dropped)
        assert windows.gather([count - 1])[0, -1] == count * T
        with pytest.raises(IndexError, match=f"there are {count}"):
            windows.gather([count])


def test_a_corpus_smaller_than_one_window_is_refused_with_both_lengths() -> None:
    with pytest.raises(DataError, match=r"longest of 3 has 4 ids and 5 are needed"):
        TokenWindows(make_streams(4, 2, 0), T, "permutation", seed=0)
    with pytest.raises(DataError, match=r"longest of 0 has 0 ids"):
        TokenWindows([], T, "permutation", seed=0)
    assert len(TokenWindows(make_streams(5), T, "random", seed=0)) == 1


def test_one_window_is_every_window() -> None:
    for order in ("permutation", "random"):
        windows = TokenWindows(make_streams(5), T, order, seed=0)
        assert windows.gather([0, 1, 999]).tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("order", ORDERS)
def test_negative_windows_do_not_exist(order: WindowOrder) -> None:
    with pytest.raises(IndexError, match="-1"):
        TokenWindows(STREAMS, T, order, seed=0)[-1]


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="shuffled"):
        TokenWindows(STREAMS, T, "shuffled", seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sequence_length=0"):
        TokenWindows(STREAMS, 0, "random", seed=0)


def test_wide_ids_are_read_whole() -> None:
    stream = np.array([65_535, 65_536, 70_000, 4_000_000_000, 7], dtype=np.uint32)
    windows = TokenWindows([stream], T, "permutation", seed=0)
    assert windows.gather([0]).tolist() == [stream.tolist()]


def test_a_window_is_described_for_people() -> None:
    windows = TokenWindows(make_streams(9, 13), T, "sequential", seed=0, names=["a.arrow", "b.arrow"])
    assert windows.describe(3) == {"window": 3, "shard": "b.arrow", "start": 4, "end": 9}


@pytest.mark.parametrize("order", ["permutation", "random"])
def test_resuming_deep_in_a_run_over_billions_of_windows_is_instant(order: WindowOrder) -> None:
    # A stream of 20 billion ids that occupies two bytes.
    huge = np.broadcast_to(np.array([7], dtype=np.uint16), (20_000_000_001,))
    start = time.perf_counter()
    windows = TokenWindows([huge, huge], T, order, seed=0)
    windows.gather(np.arange(2_500_000_000, 2_500_000_000 + 512))
    assert time.perf_counter() - start < 0.5
    assert windows.windows_per_epoch == 10_000_000_000
    _, starts = windows.locate(np.arange(12_500_000_000, 12_500_000_000 + 512))
    assert len(np.unique(starts)) == 512


def test_iteration_ends_after_one_epoch() -> None:
    windows = TokenWindows(make_streams(23), T, "permutation", seed=0)
    assert len(list(windows)) == len(windows) == 5


def test_positions_count_from_each_separator_and_from_the_beginning_of_the_window() -> None:
    generator = np.random.default_rng(5)
    stream = generator.integers(1, 50, 4_000).astype(np.uint16)
    stream[generator.integers(0, 4_000, 300)] = 9
    batch = TokenWindows([stream], 64, "random", seed=0, separator=9).batch(range(50))
    for ids, positions in zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True):
        expected: list[int] = []
        for place, token in enumerate(ids):
            expected.append(0 if token == 9 or place == 0 else expected[-1] + 1)
        assert positions == expected
    assert batch["position_ids"].dtype == torch.int64
    assert set(TokenWindows([stream], 64, "random", seed=0).batch([0])) == {"input_ids", "shift_labels"}
