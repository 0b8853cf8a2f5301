"""`hf-tinylm plan` of a chat run: its conversations are rendered, and what is planned is what is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from hf_tinylm.cli import main
from hf_tinylm.files import bundled

Plan = Callable[..., dict[str, Any]]
PARAMETERS, WIDE = 34_976, 12 * 2 * 32 * 128  # of the tiny model: 12 x layers x width x T


def test_a_chat_run_trains_what_was_planned(plan: Plan, chat_settings: Path, tmp_path: Path) -> None:
    found = plan("--config", str(chat_settings), "--tokens_per_second", "100")
    assert (found["problems"], found["notices"]) == ([], [])
    folder = tmp_path / "run"
    recipe = run_path(str(bundled("recipes", "sft.py")))["main"]
    assert recipe(["--config", str(chat_settings), "--output_dir", str(folder), "--gguf", "[]"]) == 0
    done = json.loads((folder / "DONE.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    assert found["train_tokens"] == done["supervised_tokens"] == last["supervised_tokens"]
    assert found["updates"] == done["updates"] == 7
    assert found["positions"] == 2 * 25 * 128
    assert last["positions"] == 7 * 1_024  # the masked tail of the last update is computed as well
    assert found["last_update_tokens"] == 2 * 25 * 128 - 6 * 1_024
    assert done["clocks"]["flops"] == 7 * 1_024 * (6 * PARAMETERS + WIDE)
    assert found["epochs"] == 2.0
    assert found["shard_bytes"] is None


def test_speed_is_in_targets_and_arithmetic_in_positions(plan: Plan, chat_settings: Path) -> None:
    """1,540 targets an epoch, twice, in 6,400 positions."""
    flops = 6_400 * (6 * PARAMETERS + WIDE)
    by_tokens = plan("--config", str(chat_settings), "--tokens_per_second", "77")
    assert by_tokens["hours"] == pytest.approx(3_080 / 77 / 3600)
    assert by_tokens["total_flops_with_attention"] == flops
    assert by_tokens["flops_per_second"] == pytest.approx(flops / 40)
    by_flops = plan("--config", str(chat_settings), "--flops_per_second", "1e6")
    assert by_flops["hours"] == pytest.approx(flops / 1e6 / 3600)
    assert by_flops["tokens_per_second"] == pytest.approx(3_080 * 1e6 / flops)
    asked = plan("--config", str(chat_settings), "--tokens", "1540", "--tokens_per_second", "77")
    assert (asked["train_tokens"], asked["epochs"]) == (1_540, 1.0)
    assert asked["positions"] <= 25 * 128


def test_the_table_names_positions_and_targets(chat_settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(chat_settings)]) == 0
    shown = capsys.readouterr().out
    assert "budget        3,080 tokens, 2.000 epochs of the 1,540 in the conversations" in shown
    assert "in 6,400 positions: 48.1% of them are learned" in shown
    assert "updates       7 of 1,024 positions, 4 micro-batches each on 1 process" in shown
    assert "the last one 256 positions, its tail masked" in shown


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["--conversations", "[{name: a, path: missing.jsonl}]"], "missing.jsonl does not exist"),
        (["--sequence_length", "16"], "none of its 40 conversations has a supervised token within"),
        (["--warmup_steps", "7"], "leaves no update of this run's 7"),
        (["--per_device_train_batch_size", "3"], "is not a multiple of the 384 tokens"),
    ],
)
def test_what_a_chat_run_would_refuse_is_a_problem(
    plan: Plan, chat_settings: Path, settings: list[str], told: str
) -> None:
    found = plan("--config", str(chat_settings), *settings, code=1)
    assert any(told in problem for problem in found["problems"]), found["problems"]


def test_a_model_without_a_tokenizer_is_a_problem(
    plan: Plan, chat_settings: Path, chat_base: Path, tmp_path: Path
) -> None:
    shutil.copytree(chat_base, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    found = plan("--config", str(chat_settings), "--init_from", str(tmp_path / "base"), code=1)
    assert "has no tokenizer.json" in found["problems"][0]
