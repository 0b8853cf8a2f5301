"""Updates are sorted from evaluations and their numbers read, whichever of the two readers a block suits."""

from __future__ import annotations

import json
import math
from unittest import mock

import numpy as np
import pytest

from hf_tinylm.monitor import rows as module
from hf_tinylm.monitor.follow import column
from hf_tinylm.monitor.rows import Updates, read_block

GOOD = [
    {"step": 1, "supervised_tokens": 100, "loss": 8.5, "clipped": True, "mfu": None, "seconds": 2},
    {"step": 2, "supervised_tokens": 200, "loss": 8.25, "clipped": False, "loss_by_source": {"a": 1.0}, "name": "é"},
    {"step": 2, "eval_loss": 8.125, "eval_loss_by_source": {"a": 7.5}},
    {"step": 3, "supervised_tokens": 300, "loss": 8.0, "seconds": 2.5},
    {"note": "neither"},
]


def lines(rows: list[object]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("reader", ["arrow", "json"])
def test_both_readers_say_the_same(reader: str) -> None:
    text = lines(GOOD)
    if reader == "json":
        with mock.patch.object(module, "_arrow_table", return_value=None):
            block = read_block(text)
    else:
        with mock.patch.object(module, "_by_json", side_effect=AssertionError("Arrow refused good rows")):
            block = read_block(text)
    updates = Updates()
    updates.add(block)
    assert list(updates) == [GOOD[0], GOOD[1], GOOD[3]]
    assert updates[-1]["step"] == 3
    assert block.evaluations == [GOOD[2]]
    assert block.damaged == 0
    for key, wanted in {"loss": [8.5, 8.25, 8.0], "seconds": [2, math.nan, 2.5], "mfu": 3 * [math.nan]}.items():
        np.testing.assert_array_equal(column(updates, key), wanted)
    np.testing.assert_array_equal(column(updates, "no such key"), 3 * [math.nan])
    assert updates.share("clipped") == 0.5
    assert updates.share("loss") is None


@pytest.mark.parametrize(
    "bad",
    [
        b"no row",
        b"[2]",
        b'{"step": 9}{"step": 10}',
        b"\xff",
        b'{"step": 1, "step": 2, "x": "\\ud800"}',
        b'{"supervised_tokens": "many", "loss": "low"}',
        b'{"loss": 1' + 400 * b"0" + b"}",
        b'{"loss": NaN, "supervised_tokens": 1e999}',
        b'{"supervised_tokens": true}',
        b"{",
    ],
)
def test_a_damaged_line_costs_no_other_row(bad: bytes) -> None:
    block = read_block(lines(GOOD[:2]) + bad + b"\n\n" + lines(GOOD[2:]))
    updates = Updates()
    updates.add(block)
    assert [row["step"] for row in updates] == [1, 2, 3]
    assert column(updates, "loss").tolist() == [8.5, 8.25, 8.0]
    assert block.evaluations == [GOOD[2]]


def test_a_key_that_comes_later_is_unknown_before() -> None:
    updates = Updates()
    for row in ({"supervised_tokens": 1}, {"supervised_tokens": 2, "noise_scale": 5.0}, {"supervised_tokens": 3}):
        updates.add(read_block(lines([row])))
    np.testing.assert_array_equal(column(updates, "noise_scale"), [math.nan, 5.0, math.nan])


def test_only_the_last_rows_are_kept_where_that_is_asked() -> None:
    updates = Updates(keep=2)
    for step in range(1, 6):
        updates.add(read_block(lines([{"supervised_tokens": step, "clipped": step > 3}])))
    assert [row["supervised_tokens"] for row in updates] == [4, 5]
    assert column(updates, "supervised_tokens").tolist() == [4.0, 5.0]
    assert updates.share("clipped") == 1.0
