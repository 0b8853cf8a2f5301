"""Sweeps: real short runs, one after another, restartable, a failed one beside the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_tinylm.cli import main
from hf_tinylm.errors import ConfigError
from hf_tinylm.files import read_json
from hf_tinylm.preflight.sweep import Outcome, branches_of, sweep_lines


def test_keys_with_several_values_span_the_branches_and_others_are_shared(tiny_config: Path, tmp_path: Path) -> None:
    branches = branches_of(
        str(tiny_config),
        [
            *("--output_dir", str(tmp_path), "--learning_rate", "3e-4", "6e-4", "--warmup_steps", "1", "2"),
            *("--seed", "7", "--report_to", "tensorboard", "trackio"),
        ],
    )
    names = [branch.name for branch in branches]
    assert names == [f"learning_rate={r},warmup_steps={w}" for r in ("3e-4", "6e-4") for w in (1, 2)]
    assert {branch.folder for branch in branches} == {tmp_path / "sweep" / name for name in names}
    for branch in branches:
        assert branch.arguments[branch.arguments.index("--seed") + 1] == "7"
        place = branch.arguments.index("--report_to")
        assert branch.arguments[place + 1 : place + 3] == ["tensorboard", "trackio"]
        assert branch.arguments[branch.arguments.index("--gguf") + 1] == "[]"
        assert "--eval_steps" not in branch.arguments, "3 divides the 6 updates: the last one is evaluated anyway"


def test_a_branch_is_evaluated_after_its_last_update(tiny_config: Path, tmp_path: Path) -> None:
    settings = ["--output_dir", str(tmp_path), "--learning_rate", "1", "2", "--eval_steps", "4"]
    arguments = branches_of(str(tiny_config), settings)[0].arguments
    assert arguments[-2:] == ["--eval_steps", "6"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["--learning_rate", "1e-3"], "give one key several values"),
        (["--learning_rate", "1e-3", "1e-3"], "Two branches are the same"),
        (["--learning_rate", "1e-3", "fast"], "--learning_rate|learning_rate='fast'"),
        (["--learning_rate", "1e-3", "-1"], "learning_rate=-1.0 must be above 0"),
        (["--warmup_steps", "2", "6"], "warmup_steps=6: warmup_steps=6 leaves no update"),
        (["--learning_rat", "1", "2"], "Did you mean learning_rate"),
    ],
)
def test_a_sweep_that_could_not_end_well_is_refused_before_it_begins(
    tiny_config: Path, tmp_path: Path, settings: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        branches_of(str(tiny_config), ["--output_dir", str(tmp_path), *settings])
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_needs_a_folder(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--config", str(tiny_config), "--learning_rate", "1e-3", "2e-3"]) == 2
    assert "--output_dir runs/NAME" in capsys.readouterr().err


def test_the_verdict_names_the_lowest_and_says_that_one_seed_is_no_proof() -> None:
    rows = [
        Outcome("a", {}, "finished", 10, 3.0, 3.5, 100.0),
        Outcome("b", {}, "finished", 10, 3.2, 3.4, 100.0),
        Outcome("c", {}, "failed", 2, 1.0, None, 100.0, "loss nan"),
    ]
    lines = sweep_lines(rows)
    assert lines[3].endswith("failed: loss nan")
    assert lines[4] == "lowest: b at 3.4000 nats per token, 0.1000 ahead of the next"
    assert "One seed each is no proof" in lines[5]
    assert sweep_lines(rows[2:])[-1] == "no branch finished"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)  # six processes that import torch, on a busy machine
def test_a_sweep_runs_goes_on_after_a_signal_and_records_a_failure(tiny_config: Path, tmp_path: Path) -> None:
    """Ended in its second branch, restarted: the first is not run again, the third fails, and the table has all."""
    command = [sys.executable, "-m", "hf_tinylm.cli", "sweep", "--config", str(tiny_config), "--output_dir"]
    command += [str(tmp_path), "--learning_rate", "1e-3", "3e-3", "1e30", "--save_steps", "1", "--json"]
    folder = tmp_path / "sweep"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ))
    metrics = folder / "learning_rate=3e-3" / "metrics.jsonl"
    limit = time.monotonic() + 300
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=200)
    first = folder / "learning_rate=1e-3" / "DONE.json"
    assert first.is_file()
    finished_at = first.stat().st_mtime_ns
    if process.returncode == 143:  # else the branch was over before the signal reached it
        assert b"The same command goes on from there" in told
        assert not (folder / "learning_rate=3e-3" / "DONE.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == finished_at
    assert "learning_rate=1e-3: finished before" in done.stderr
    report = json.loads(done.stdout)
    assert [row["status"] for row in report["branches"]] == ["finished", "finished", "failed"]
    assert [row["updates"] for row in report["branches"]][:2] == [6, 6]
    assert "gradient norm" in report["branches"][2]["error"]
    losses = [row["eval_loss"] for row in report["branches"]]
    assert losses[0] != losses[1]
    assert losses[2] is None
    seeds = {read_json(folder / name / "run.json")["identity"]["training"]["seed"] for name in ("learning_rate=1e-3",)}
    assert seeds == {42}
    assert Path(report["picture"]).read_bytes().startswith(b"\x89PNG")
    assert read_json(folder / "sweep.json") == report["branches"]
