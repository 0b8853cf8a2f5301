"""A run whose batch grows, as the monitor sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.monitor.history import history_of
from hf_tinylm.monitor.run import Run


@pytest.mark.parametrize(("done", "batch"), [(0, 100), (5, 100), (6, 300)])
def test_updates_are_counted_and_the_newest_batch_is_told(
    write_run: Callable[..., Path], done: int, batch: int
) -> None:
    """4,000 tokens: 5 updates of 100, then 11 of 300 and one of the last 200."""
    folder = write_run(updates=done)
    contract = json.loads((folder / "run.json").read_text())
    contract["identity"]["training"]["batch_growth"] = [[500, 300]]
    (folder / "run.json").write_text(json.dumps(contract))
    (folder / "events.jsonl").write_text("")
    run = Run(folder)
    assert run.planned_updates == 5 + 12
    history = history_of(run)
    assert (history.batch_tokens, history.batch_grows) == (batch, batch == 300)
