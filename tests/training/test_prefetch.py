"""Batches that a thread reads ahead are the batches that would have been read."""

from __future__ import annotations

import threading

import pytest

from hf_tinylm.training.prefetch import Prefetched


def test_what_was_read_ahead_is_returned_and_was_read_once_by_another_thread() -> None:
    calls: list[tuple[int, int, str]] = []

    def read(number: int, skipped: int) -> int:
        calls.append((number, skipped, threading.current_thread().name))
        return 10 * number + skipped

    batches = Prefetched(read)
    assert batches(0, 0) == 0
    batches.ahead(1, 0)
    assert batches(1, 0) == 10
    assert [call[:2] for call in calls] == [(0, 0), (1, 0)]
    assert calls[0][2] == threading.current_thread().name
    assert calls[1][2].startswith("prefetch")
    batches.close()


def test_another_question_than_the_one_read_ahead_gets_its_own_answer() -> None:
    batches = Prefetched(lambda number, skipped: (number, skipped))
    batches.ahead(1, 0)
    assert batches(1, 1) == (1, 1)  # a batch was passed over meanwhile
    assert batches(1, 0) == (1, 0)
    batches.close()


def test_what_reading_ahead_raises_is_raised_where_the_batch_is_asked_for() -> None:
    def read(number: int) -> int:
        raise OSError(f"window {number} is gone")

    batches = Prefetched(read)
    batches.ahead(3)
    with pytest.raises(OSError, match="window 3 is gone"):
        batches(3)
    batches.close()


def test_closing_waits_for_the_thread_and_drops_what_it_read() -> None:
    before = threading.active_count()
    batches = Prefetched(lambda number: number)
    batches.ahead(1)
    batches.close()
    assert threading.active_count() == before
