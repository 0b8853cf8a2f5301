from __future__ import annotations

import math
from pathlib import Path

import pytest

from hf_tinylm.training.metrics import Events, JsonLines, read_rows


def test_rows_come_back_and_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 1 / step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in log.rows()] == [1, 2, 3]


def test_rows_beyond_a_checkpoint_are_dropped_torn_line_included(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 2, 3):
        log.append({"step": step})
    with log.path.open("a") as file:
        file.write('{"st')
    assert log.drop_after(2) == 1
    log.append({"step": 3, "text": "é"})
    assert [row["step"] for row in read_rows(log.path)] == [1, 2, 2, 3]


def test_a_number_that_json_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        JsonLines(tmp_path / "metrics.jsonl").append({"step": 1, "loss": math.nan})


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl", enabled=False)
    events.add("started", 0)
    assert events.drop_after(0) == 0
    assert not list(tmp_path.iterdir())


def test_an_event_has_a_time_a_name_and_a_step(tmp_path: Path) -> None:
    Events(tmp_path / "events.jsonl").add("saved", 7, checkpoint="checkpoint-00000007")
    row = read_rows(tmp_path / "events.jsonl")[0]
    assert list(row) == ["time", "event", "step", "checkpoint"]
    assert row["time"] > 1.7e9
