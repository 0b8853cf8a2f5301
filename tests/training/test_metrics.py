from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hf_tinylm.errors import TrainingError
from hf_tinylm.files import read_rows
from hf_tinylm.planning.devices import peak_of
from hf_tinylm.training.metrics import Events, JsonLines


def test_rows_come_back_and_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append({"step": step, "loss": 1 / step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in log.rows()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("torn", "steps"), [('{"step": 2, "te', [1, 3]), ('{"step": 2, "text": "é', [1, 3]), ('{"step": 2}', [1, 2, 3])]
)
def test_a_row_after_a_crash_starts_a_line_of_its_own(tmp_path: Path, torn: str, steps: list[int]) -> None:
    """events.jsonl is never rewritten, so what is appended to a torn row would be lost with it."""
    Events(tmp_path / "events.jsonl").append({"step": 1})
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(torn.encode()[:-1] if torn.endswith("é") else torn.encode())
    Events(tmp_path / "events.jsonl").append({"step": 3})
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps
    assert [row["step"] for row in read_rows(tmp_path / "events.jsonl")] == steps


def test_a_text_with_unusual_line_breaks_is_one_row(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "events.jsonl")
    rows = [{"step": 1, "text": "a\u2028b\u0085c\x0bd\ne"}, {"step": 2, "text": ""}]
    for row in rows:
        log.append(row)
    assert log.rows() == rows


def test_a_row_that_cannot_be_written_names_the_file_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrainingError, match=r"metrics\.jsonl could not be written: .*There is no good checkpoint yet"):
        JsonLines(tmp_path / "metrics.jsonl").append({"step": 1})


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


def test_the_peak_of_a_gpu_is_that_of_its_own_name() -> None:
    known = {"NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L4": 121e12, "NVIDIA H100 PCIe": 756e12}
    known |= {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA GeForce RTX 4090": 165.2e12}
    known |= {"NVIDIA L40": 181e12, "NVIDIA L40S": 362e12, "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12}
    known |= {"NVIDIA H100 NVL": 835e12, "NVIDIA A30": 165e12, "NVIDIA A40": 149.7e12}
    assert {name: peak_of(name) for name in known} == known
    others = ("NVIDIA RTX A1000", "NVIDIA H200 NVL", "Tesla T4", "Tesla V100-SXM2-16GB")
    parts = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A40-8Q")  # whose whole would make the share of the peak small
    for other in (*others, *parts):
        assert peak_of(other) is None, other
