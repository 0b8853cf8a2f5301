"""A run that watches itself: once a word on each fault, the same numbers, and nothing left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest import mock

import pytest

from hf_tinylm.config import load_config
from hf_tinylm.errors import RunStopped
from hf_tinylm.files import bundled, read_rows
from hf_tinylm.monitor import watch
from hf_tinylm.monitor.diagnosis import Finding
from hf_tinylm.monitor.events import EVENT_FIELDS
from hf_tinylm.monitor.watch import gpu_names

TIMED = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds", "mfu")
TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "text": lambda value: isinstance(value, str),
    "list of text": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "list of objects": lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value),
    "integer or null": lambda value: value is None or type(value) is int,
}


@pytest.fixture
def train(tiny_config: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that trains the tiny configuration for 12 updates in the named folder."""

    def run(name: str, *settings: str) -> Path:
        recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
        config = load_config(str(tiny_config))
        tokens = ["--train_tokens", str(12 * config.training.global_batch_tokens), "--preflight", "false"]
        start = [
            "--config",
            str(tiny_config),
            "--output_dir",
            str(tmp_path / name),
            "--gguf",
            "[]",
            "--verify",
            "false",
        ]
        recipe([*start, *tokens, "--eval_steps", "8", "--save_steps", "8", *settings])
        return tmp_path / name

    return run


def numbers(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_rows(folder / "metrics.jsonl")]


def test_a_sick_run_warns_once_over_a_resume_and_its_numbers_are_those_of_an_unwatched_one(
    train: Callable[..., Path],
) -> None:
    found = Finding("rate_too_low", "The rate is too low", "loss 6.4", "It is slow.", "Raise it.")
    with mock.patch.object(watch, "diagnose", return_value=[found]):
        with pytest.raises(RunStopped):
            train("watched", "--sample_steps", "8", "--stop_after_updates", "11", "--sensor_seconds", "0.05")
        folder = train("watched", "--sample_steps", "8", "--resume_from_checkpoint", "auto", "--sensor_seconds", "0.05")
    assert "sensors" not in [thread.name for thread in threading.enumerate()]
    events = read_rows(folder / "events.jsonl")
    warned = [event for event in events if event.get("finding")]
    assert [(event["step"], event["reason"]) for event in warned] == [(10, "The rate is too low: loss 6.4")]
    assert (warned[0]["meaning"], warned[0]["next_step"]) == ("It is slow.", "Raise it.")
    rows = read_rows(folder / "hardware.jsonl")
    assert sum(row.get("first", False) for row in rows) == 2  # two invocations
    assert {row["interval_seconds"] for row in rows} == {0.05}
    for event in events:
        for key, value in event.items():
            if key not in ("time", "event", "step"):
                assert TYPES[EVENT_FIELDS[event["event"]][key]](value), (event["event"], key)
    with mock.patch.object(watch, "diagnose", side_effect=AssertionError("broken")):
        plain = train("plain", "--sensor_seconds", "null")
    assert not (plain / "hardware.jsonl").exists()
    told = [event["reason"] for event in read_rows(plain / "events.jsonl") if event["event"] == "warned"]
    assert sum("Live diagnosis ends here: AssertionError('broken')" in reason for reason in told) == 1
    assert numbers(folder) == numbers(plain)
    hashes = [json.loads((run / "DONE.json").read_text())["final_weights_sha256"] for run in (folder, plain)]
    assert hashes[0] == hashes[1]


def test_a_run_on_the_processor_reads_no_gpu() -> None:
    import torch

    assert gpu_names(torch.device("cpu")) == []
