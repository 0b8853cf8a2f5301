"""With `stage_dir` checkpoints are read from a local copy, and the run is the same run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.errors import CheckpointError, RunStopped
from hf_tinylm.training import record
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
SAVES = {"save_strategy": "steps", "save_steps": 1, "train_tokens": 4 * 256}


@pytest.fixture
def read_from(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that checkpoints and models are read from, in order."""
    found: list[Path] = []
    for name in ("read_checkpoint", "initialise_from"):
        original = getattr(record, name)
        spy = lambda folder, *others, original=original: (found.append(Path(folder)), original(folder, *others))[1]  # noqa: E731
        monkeypatch.setattr(record, name, spy)
    return found


def test_a_resume_from_the_local_copy_is_the_uninterrupted_run(
    make_trainer: Make, tmp_path: Path, read_from: list[Path]
) -> None:
    whole = make_trainer("whole", **SAVES)
    whole.train()
    with pytest.raises(RunStopped):
        make_trainer("run", **SAVES, stop_after_updates=2).train()
    staged = {"resume_from_checkpoint": "auto", "stage_dir": str(tmp_path / "near")}
    with pytest.raises(RunStopped):
        make_trainer("run", **SAVES, **staged, stop_after_updates=1).train()
    resumed = make_trainer("run", **SAVES, **staged)
    resumed.train()
    assert [folder.name for folder in read_from] == ["checkpoint-00000002", "checkpoint-00000003"]
    assert all(folder.is_relative_to(tmp_path / "near") for folder in read_from)
    assert len([path for path in (tmp_path / "near").iterdir() if path.is_dir()]) == 1, "one copy is kept for a run"
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(run.output_dir / "checkpoint-00000004" / name) for run in (whole, resumed))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_damaged_checkpoint_is_passed_over_or_refused_as_without_a_copy(
    make_trainer: Make, tmp_path: Path, read_from: list[Path]
) -> None:
    run = make_trainer("run", **SAVES)
    run.train()
    for number, name in ((4, "manifest.json"), (3, "model.safetensors")):
        victim = run.output_dir / f"checkpoint-0000000{number}" / name
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 0x80
        victim.write_bytes(content)
    near = {"stage_dir": str(tmp_path / "near")}
    with pytest.raises(CheckpointError, match=r"checkpoint-00000003 cannot be resumed from: model\.safetensors of"):
        make_trainer("run", **SAVES, **near, resume_from_checkpoint=str(run.output_dir / "checkpoint-00000003")).train()
    again = make_trainer("run", **SAVES, **near, resume_from_checkpoint="auto")
    assert again.train().global_step == 4
    assert [folder.name for folder in read_from] == ["checkpoint-00000002"]
    reasons = " ".join(str(event.get("reason")) for event in read_rows(again.output_dir / "events.jsonl"))
    assert "checkpoint-00000004 was passed over" in reasons
    assert "checkpoint-00000003 was passed over" in reasons


def test_a_branch_from_the_local_copy_records_where_it_really_came_from(
    make_trainer: Make, tmp_path: Path, read_from: list[Path]
) -> None:
    parent = make_trainer("parent", **SAVES)
    parent.train()
    source = parent.output_dir / "checkpoint-00000002"
    runs = [
        make_trainer(name, init_from=str(source), init_optimizer=True, stage_dir=stage_dir, **SAVES)
        for name, stage_dir in (("far", None), ("near", str(tmp_path / "stage")))
    ]
    for run in runs:
        run.train()
    assert read_from[0] == source
    assert read_from[1].is_relative_to(tmp_path / "stage")
    contracts = [json.loads((run.output_dir / "run.json").read_text())["identity"] for run in runs]
    assert contracts[0] == contracts[1]
    assert contracts[1]["training"]["init_from"]["path"] == str(source.resolve())
    rows = [[row["loss"] for row in read_rows(run.output_dir / "metrics.jsonl")] for run in runs]
    assert rows[0] == rows[1]
    shutil.rmtree(tmp_path / "stage")
