"""Rows are read once each, whole, and again only when a resume has replaced their file."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from hf_tinylm.files import write_text
from hf_tinylm.monitor.follow import Follower, column, number, parse


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    follower = Follower(path)
    assert follower.poll() == ([{"a": 1}, {"a": 2}], False)
    assert follower.poll() == ([], False)
    with path.open("a") as file:
        file.write('{"a": 3}\n')
    with mock.patch("hf_tinylm.monitor.follow.parse", side_effect=parse) as parsed:
        assert follower.poll() == ([{"a": 3}], False)
    parsed.assert_called_once_with(b'{"a": 3}\n')


def test_a_torn_last_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    follower = Follower(path)
    assert follower.poll() == ([{"a": 1}], False)
    with path.open("a") as file:
        file.write("2}")
    assert follower.poll() == ([], False)  # it may still go on: {"a": 2}5 is no row
    with path.open("a") as file:
        file.write("\n")
    assert follower.poll() == ([{"a": 2}], False)


def test_a_torn_line_that_a_resume_cuts_off_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 22222')
    follower = Follower(path)
    follower.poll()
    with path.open("r+b") as file:
        file.truncate(9)
        file.seek(9)
        file.write(b'{"a": 3}\n')
    assert follower.poll() == ([{"a": 3}], False)


@pytest.mark.parametrize("rest", ['{"a": 1}\n', '{"a": 1}\n{"a": 7}\n{"a": 8}\n{"a": 9}\n'])
def test_a_file_that_was_replaced_is_read_again(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "rows.jsonl"
    follower = Follower(path)
    assert follower.poll() == ([], False)  # not there yet
    path.write_text('{"a": 1}\n{"a": 2}\n')
    follower.poll()
    write_text(path, rest)
    assert follower.poll() == (parse(rest.encode())[0], True)
    assert follower.poll() == ([], False)


def test_lines_that_are_no_rows_are_counted_and_lose_nothing() -> None:
    assert parse(b'{"a": 1}\nnonsense\n[2]\n\xff\n{"a": 3}\n\n') == ([{"a": 1}, {"a": 3}], 3)
    assert parse(b'{"a": 1}\n7\n') == ([{"a": 1}], 1)
    assert parse(b'{"a": 1}, {"a": 2}\n') == ([], 1)  # two values in a line are no row, though the array has them


@pytest.mark.parametrize("value", ["1", None, True, [1], math.nan, math.inf, 10**400])
def test_what_is_no_finite_number_is_unknown(value: object) -> None:
    assert number({"x": value}, "x") is None
    assert np.isnan(column([{"x": 1.5}, {"x": value}, {}], "x")).tolist() == [False, True, True]
