"""Folders of runs, written row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def row(step: int, **more: Any) -> dict[str, Any]:
    """An update of 100 tokens that took 2 seconds of training and, with all the rest, 4 of wall time."""
    return {
        **{"step": step, "supervised_tokens": 100 * step, "loss": 8.0 - step / 100, "learning_rate": 1e-3},
        **{"grad_norm": 0.5 + step % 3, "clipped": step % 3 == 2, "seconds": 2.0, "tokens_per_second": 50.0},
        **{"wall_seconds": 4.0 * step},
        **more,
    }


def lines(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as the text of a JSON-lines file."""
    return "".join(json.dumps(one) + "\n" for one in rows)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a run of 40 planned updates, `updates` done; keyword arguments change its run.json."""

    def write(name: str = "run", updates: int = 10, learning_rate: float = 1e-3, **training: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        identity = {
            "model": {"hidden_size": 32},
            "training": {"train_tokens": 4_000, "global_batch_tokens": 100, "max_grad_norm": 1.0}
            | {"learning_rate": learning_rate},
            "data": {"sequence_length": 10, "manifest_sha256": "ab" * 32},
        }
        config = {
            "training": {"price_per_hour": 9.0, **training},
            "data": {"shards": None, "sources": [{"name": "prose", "path": "a.txt", "licence": "none"}]},
        }
        contract = {"identity": identity, "config": config, "facts": {"note": None}, "environment": {"python": "3"}}
        (folder / "run.json").write_text(json.dumps(contract))
        rows = [row(step) for step in range(1, updates + 1)]
        scored = {"step": updates, "eval_loss": 7.25, "bits_per_byte": 2.5, "eval_tokens": 500}
        (folder / "metrics.jsonl").write_text(lines([*rows, scored]))
        started = {"time": 1e9, "event": "started", "step": 0, "updates": 40, "train_tokens": 4_000}
        (folder / "events.jsonl").write_text(lines([started]))
        return folder

    return write


@pytest.fixture
def add_lines() -> Callable[..., None]:
    """A function that appends updates, or any rows, to a file, as a run does."""

    def add(path: Path, *rows: int | dict[str, Any], torn: str = "") -> None:
        with path.open("a") as file:
            file.write(lines(row(one) if isinstance(one, int) else one for one in rows) + torn)

    return add
