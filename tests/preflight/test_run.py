"""Preflight leaves everything as if it had not run, and is the first step of the recipe."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch

from hf_tinylm.cli import main
from hf_tinylm.errors import ConfigError, VerificationError
from hf_tinylm.files import bundled
from hf_tinylm.preflight.checks import Finding, rule, run_rules
from hf_tinylm.training.random_state import random_tensors

CLOCKS = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")


@pytest.fixture(scope="module")
def recipe() -> Callable[[list[str]], int]:
    """`main` of recipes/pretrain.py."""
    return run_path(str(bundled("recipes", "pretrain.py")))["main"]


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]


def test_a_run_with_preflight_is_the_run_without_it_to_the_bit(
    tiny_config: Path, tmp_path: Path, recipe: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with_, without = tmp_path / "with" / "run", tmp_path / "without" / "run"
    settings = ["--config", str(tiny_config), "--attention_dropout", "0.1", "--save_minutes", "null"]
    assert recipe([*settings, "--output_dir", str(without)]) == 0
    assert "preflight" not in capsys.readouterr().out
    assert recipe([*settings, "--output_dir", str(with_), "--preflight", "true"]) == 0
    assert "preflight: all 30 checks passed" in capsys.readouterr().out
    found = [sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file()) for run in (with_, without)]
    assert found[0] == found[1]
    exact = [path for path in found[0] if path.suffix == ".safetensors"]
    assert len(exact) == 10  # three checkpoints of three files, and the final weights
    for path in exact:
        assert (with_ / path).read_bytes() == (without / path).read_bytes(), path
    assert rows(with_) == rows(without)
    events = [
        [json.loads(line)["event"] for line in (r / "events.jsonl").read_text().splitlines()] for r in (with_, without)
    ]
    assert events[0] == events[1]
    assert [path.name for path in with_.parent.iterdir()] == ["run"]


def test_the_command_leaves_random_state_and_files_alone(
    preflight: Callable[..., dict[str, dict[str, Any]]], tiny_config: Path
) -> None:
    before = random_tensors()
    files = {path: path.stat().st_mtime_ns for path in tiny_config.parent.rglob("*")}
    checks = preflight()
    assert all(check["ok"] for check in checks.values()), checks
    after = random_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {path: path.stat().st_mtime_ns for path in tiny_config.parent.rglob("*")} == files


def test_the_recipe_trains_nothing_when_a_check_fails_and_names_it(
    tiny_config: Path,
    tmp_path: Path,
    recipe: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hf_tinylm.modeling.model.TinyLMAttention.is_causal", False)
    settings = ["--config", str(tiny_config), "--output_dir", str(tmp_path / "run"), "--preflight", "true"]
    with pytest.raises(VerificationError, match=r"checks failed: .*causality.*Nothing was trained"):
        recipe(settings)
    shown = capsys.readouterr().err
    assert "FAIL  causality" in shown
    assert "usually: a position sees later ones" in shown
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        recipe(settings)


def test_a_resume_repeats_only_the_cheap_checks(
    tiny_config: Path, tmp_path: Path, recipe: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--config", str(tiny_config), "--output_dir", str(tmp_path / "run"), "--preflight", "true"]
    whole = [*settings, "--resume_from_checkpoint", "auto"]
    assert recipe(whole) == 0  # there is nothing to resume yet
    assert "all 30 checks" in capsys.readouterr().out
    for name in ("DONE.json", "checkpoint-00000006/manifest.json"):
        (tmp_path / "run" / name).unlink()
    assert recipe(whole) == 0
    assert "all 10 checks" in capsys.readouterr().out


def test_the_table_shows_decoded_pairs_the_schedule_and_a_summary(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["preflight", "--config", str(tiny_config), "--output_dir", str(tmp_path / "run")]
    assert main([*command, "--learning_rate", "2e-3", "--warmup_steps", "4"]) == 0
    shown = capsys.readouterr().out
    assert "0.0005, 0.001, 0.0015, ...; 0.002 at update 5; last 0.0002" in shown
    assert "learning rate over 6 updates" in shown
    pairs = [line.strip().split(" -> ") for line in shown.splitlines() if " -> " in line]
    assert len(pairs) == 8
    assert all(target == following for (_, target), (following, _) in itertools.pairwise(pairs))
    assert shown.strip().splitlines()[-1].startswith("preflight: all 33 checks passed in ")


@pytest.mark.parametrize(
    "settings",
    [
        "--train_tokens 100 --warmup_steps 0",  # one update, most of it masked
        pytest.param("--tie_word_embeddings false --qk_norm true --bf16 true", marks=pytest.mark.slow),
        pytest.param("--document_attention true --attn_implementation eager", marks=pytest.mark.slow),
        pytest.param("--window_order random --attention_dropout 0.2 --weight_decay 0", marks=pytest.mark.slow),
        pytest.param("--sequence_length 4 --global_batch_tokens 64 --initializer_range 0.02", marks=pytest.mark.slow),
        pytest.param("--pad_vocab_to_multiple_of 384 --gradient_checkpointing true", marks=pytest.mark.slow),
    ],
)
def test_a_sound_run_of_any_kind_passes(preflight: Callable[..., dict[str, dict[str, Any]]], settings: str) -> None:
    failed = {name: check for name, check in preflight(*settings.split()).items() if not check["ok"]}
    assert failed == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup_steps", "6"], "leaves no update of this run"),
        (["--global_batch_tokens", "352"], "is not a multiple of the 64 tokens"),
        (["--shards", "null"], "shards is missing"),
    ],
)
def test_a_setting_that_no_run_can_have_is_one_line_and_exit_code_2(
    tiny_config: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["preflight", "--config", str(tiny_config), "--output_dir", str(tmp_path / "run")]
    assert main([*command, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_breaks_fails_with_its_error_and_what_needs_it_is_not_run() -> None:
    @rule("first", "it broke")
    def first(_: Any) -> Finding:
        raise IndexError("out of range")

    @rule("second", "never known", needs=("first",))
    def second(_: Any) -> Finding:
        return Finding(True, 1, 1)

    checks = run_rules([first, second], None)
    assert [(check.ok, check.value) for check in checks] == [
        (False, "IndexError: out of range"),
        (None, "not run: first failed"),
    ]


def test_a_check_that_fails_on_any_process_fails_on_all_with_its_value() -> None:
    @rule("shared", "one process is different")
    def shared(_: Any) -> Finding:
        return Finding(True, 1, 1)

    (check,) = run_rules([shared], None, gather=lambda own: [own, Finding(False, 2, 1)])
    assert (check.ok, check.value) == (False, "process 1: 2")
