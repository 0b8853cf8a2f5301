"""The rows and events that a trainer really writes, over a stop and a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from runpy import run_path

import pytest

from hf_tinylm.cli import main
from hf_tinylm.errors import RunStopped
from hf_tinylm.files import bundled
from hf_tinylm.monitor.events import _WORDS
from hf_tinylm.monitor.run import Run
from hf_tinylm.monitor.tail import state_of


def test_a_real_run_is_read_in_full(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    mirror = tmp_path / "mirror"
    start = ["--config", str(tiny_config), "--output_dir", str(folder), "--gguf", "[]", "--verify", "false"]
    start += ["--mirror_dir", str(mirror), "--sample_steps", "3"]
    with pytest.raises(RunStopped):
        recipe([*start, "--stop_after_updates", "3", "--price_per_hour", "3600"])
    stopped = Run(folder)
    assert (stopped.status(), stopped.step) == ("stopped", 3)
    assert stopped.seconds_left() > 0
    assert recipe([*start, "--price_per_hour", "3600", "--resume_from_checkpoint", "auto"]) == 0
    assert stopped.refresh()  # the resume rewrote the rows
    run, done = Run(folder), json.loads((folder / "DONE.json").read_text())
    assert list(stopped.updates) == list(run.updates)
    assert [row["step"] for row in run.updates] == [1, 2, 3, 4, 5, 6]
    state = state_of(run)
    assert (state["status"], state["percent"], state["updates"]) == ("finished", 100.0, done["updates"])
    assert state["last_evaluation"] == done["last_evaluation"]
    assert run.wall_seconds == pytest.approx(done["clocks"]["wall_seconds"], abs=0.01)
    assert run.cost == pytest.approx(run.wall_seconds)  # 3600 an hour is 1 a second
    assert len(run.invocations()) == done["clocks"]["invocations"] == 2
    assert run.missing == []
    assert {event["event"] for event in run.events} <= set(_WORDS)
    assert [one["name"] for one in run.checkpoints()][-1] == done["last_checkpoint"]
    capsys.readouterr()
    page = (folder / "report.html").read_text()  # the recipe has written it
    card = (folder / "final" / "README.md").read_text()
    assert "](curves.png)" in card
    assert (folder / "final" / "curves.png").read_bytes().startswith(b"\x89PNG")
    for told in (
        "From DONE.json",
        "stop_after_updates=3",
        done["last_checkpoint_manifest_sha256"],
        "prose",
        "documents",
    ):
        assert told in page
    assert "its counts are not shown" not in page  # the pack lies where the run read it
    for name in ("run.json", "metrics.jsonl", "events.jsonl", "DONE.json"):
        assert (mirror / name).read_bytes() == (folder / name).read_bytes()
    shutil.rmtree(folder)
    assert main(["report", str(mirror), "--png", "--pdf"]) == 0
    page = (mirror / "report.html").read_text()
    assert f"From the mirror {mirror} of the run {folder}, which is gone" in page
    assert done["last_checkpoint_manifest_sha256"] in page
    assert "A mirror has no checkpoints" in page
    assert (mirror / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (mirror / "report.pdf").read_bytes().startswith(b"%PDF")
