"""`hf-tinylm preflight` of chat runs: what is planted is found, by the check that is for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tinylm.cli import main
from hf_tinylm.data.packing import ConversationWindows
from hf_tinylm.files import bundled
from hf_tinylm.preflight import run as run_module
from hf_tinylm.tokenization.chat import chat_tokenizer
from hf_tinylm.training.random_state import random_tensors

Preflight = Callable[..., dict[str, dict[str, Any]]]
NOT_OF_CHAT = {"shards", "separators", "round trip", "initial loss"}
FIRST = ("ids", "targets", "template", "split", "weights", "starting weights")


@pytest.fixture
def preflight(chat_settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Preflight:
    """Runs the command with further arguments; its checks by name. The exit code must fit them."""

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        command = ["preflight", "--config", str(chat_settings), "--output_dir", str(tmp_path / "run"), "--json"]
        capsys.readouterr()  # of a recipe before
        code = main([*command, *arguments])
        report = json.loads(capsys.readouterr().out)
        checks = {check["name"]: check for check in report["checks"]}
        assert report["ok"] == (not failed(checks))
        assert code == (1 if failed(checks) else 0)
        assert not list(tmp_path.glob("**/.tmp-*")), "a scratch folder was left behind"
        assert not (tmp_path / "run").exists()
        return checks

    return run


@pytest.fixture
def first_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks that train copies of the model."""
    rules = tuple(rule for rule in run_module.CHAT_RULES if rule.name in FIRST)
    monkeypatch.setattr(run_module, "CHAT_RULES", rules)


def failed(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in checks.items() if check["ok"] is False]


def rows_of(chat_settings: Path, split: str) -> list[list[dict[str, str]]]:
    lines = (chat_settings.parent / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_a_sound_chat_run_passes_with_counts_that_transformers_gives_too(
    preflight: Preflight, chat_settings: Path, chat_base: Path
) -> None:
    before = random_tensors()
    checks = preflight()
    after = random_tensors()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert failed(checks) == []
    assert {name for name, check in checks.items() if check["ok"] is None} == NOT_OF_CHAT
    assert all(checks[name]["value"].startswith("does not apply: ") for name in NOT_OF_CHAT)

    tokenizer = chat_tokenizer(str(chat_base))
    learned, lengths = 0, []
    for messages in rows_of(chat_settings, "train"):
        theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        lengths.append(len(theirs["input_ids"]))
        learned += sum(theirs["assistant_masks"]) if lengths[-1] <= 129 else 0
    long = sum(length > 129 for length in lengths)
    assert long > 0
    assert (
        f"38 conversations in 25 windows, 80.3% of their positions used; {learned:,} super"
        in (checks["conversations"]["value"])
    )
    told = "\n".join(checks["conversations"]["detail"])
    assert f"dropped: {long} too_long; truncated: 0" in told
    middle = int(np.percentile(lengths, 50, method="lower"))
    assert f"persona: {min(lengths)} " in told
    assert f" {middle} " in told
    assert f"{max(lengths)} (0 5 25 50 75 95 100%); {long} of 40 are above 129" in told
    assert f"for {2 * learned:,} tokens in 6,400 positions and 7 updates" in checks["throughput"]["value"]


@pytest.mark.parametrize(
    "settings",
    [
        "--assistant_only_loss false --packing false --truncation turns",
        pytest.param(
            "--test_conversations [] --eval_steps null --train_tokens 300 --epochs 1 --warmup_steps 0",
            marks=pytest.mark.slow,
        ),
        pytest.param("--truncation left --sequence_length 32 --global_batch_tokens 64", marks=pytest.mark.slow),
    ],
)
def test_a_sound_chat_run_of_any_kind_passes(preflight: Preflight, settings: str) -> None:
    checks = preflight(*settings.split())
    assert {name: checks[name] for name in failed(checks)} == {}


@pytest.mark.usefixtures("first_checks")
def test_targets_that_are_not_the_masked_ones_are_found(preflight: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ConversationWindows.batch

    def unshifted(self: ConversationWindows, ks: Any) -> dict[str, torch.Tensor]:
        batch = sound(self, ks)
        labels = batch["shift_labels"]
        return {**batch, "shift_labels": torch.where(labels == -100, labels, batch["input_ids"])}

    def one_more(self: ConversationWindows, ks: Any) -> dict[str, torch.Tensor]:
        batch = sound(self, ks)
        batch["shift_labels"][0, 0] = batch["input_ids"][0, 1]
        return batch

    def without_restarts(self: ConversationWindows, ks: Any) -> dict[str, torch.Tensor]:
        batch = sound(self, ks)
        length = batch["input_ids"].shape[1]
        return {**batch, "position_ids": torch.arange(length).expand(len(batch["input_ids"]), -1).contiguous()}

    for broken in (unshifted, one_more, without_restarts):
        monkeypatch.setattr(ConversationWindows, "batch", broken)
        assert failed(preflight()) == ["targets"], broken.__name__


@pytest.mark.usefixtures("first_checks")
def test_a_template_that_renders_otherwise_is_found(preflight: Preflight, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bundled("tokenizer", "chat_template.jinja").read_text(encoding="utf-8")
    assert "<|im_end|>" in ours
    monkeypatch.setattr("hf_tinylm.tokenization.chat.chat_template", lambda: ours.replace("<|im_end|>", "<|im_end|> "))
    checks = preflight()
    assert failed(checks) == ["template"]
    assert checks["template"]["value"] == "16 of 16 conversations differ"


@pytest.mark.usefixtures("first_checks")
def test_test_conversations_that_are_learned_are_found(preflight: Preflight, chat_settings: Path) -> None:
    same = chat_settings.parent / "train.jsonl"
    checks = preflight("--test_conversations", f"[{{name: persona, path: {same}}}]")
    assert failed(checks) == ["split"]
    different = {json.dumps(row) for row in rows_of(chat_settings, "train")}
    assert checks["split"]["value"].split(" different")[0].split(" of ") == [f"{len(different) - 2}"] * 2


@pytest.mark.usefixtures("first_checks")
def test_what_cannot_be_tuned_or_read_has_the_line_of_the_recipe(
    preflight: Preflight, chat_settings: Path, chat_base: Path, tmp_path: Path
) -> None:
    recipe = run_path(str(bundled("recipes", "sft.py")))["main"]
    for name in ("cut", "empty", "foreign"):
        shutil.copytree(chat_base, tmp_path / name)
    (tmp_path / "cut" / "model.safetensors").write_bytes((chat_base / "model.safetensors").read_bytes()[:-100])
    (tmp_path / "empty" / "config.json").unlink()
    vocabulary = json.loads((tmp_path / "foreign" / "tokenizer.json").read_text(encoding="utf-8"))
    first, second = list(vocabulary["model"]["vocab"])[300:302]
    words = vocabulary["model"]["vocab"]
    words[first], words[second] = words[second], words[first]
    (tmp_path / "foreign" / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    cases = (
        ("starting model", ["--init_from", str(tmp_path / "gone")], "is no model folder"),
        ("starting model", ["--init_from", str(tmp_path / "empty")], "is not a model folder: it has no config.json"),
        ("tokenizer", ["--sequence_length", "256"], "is more than the 128 tokens"),
        ("conversations", ["--conversations", f"[{{name: a, path: {tmp_path}/bad.jsonl}}]"], "is a conversation"),
        ("starting weights", ["--init_from", str(tmp_path / "cut")], "cannot be read as safetensors"),
        ("starting weights", ["--tokenizer_path", str(tmp_path / "foreign")], "ids would mean other tokens"),
    )
    for name, arguments, told in cases:
        checks = preflight(*arguments)
        assert failed(checks) == [name], arguments
        with pytest.raises(Exception, match=told) as refused:
            recipe(["--config", str(chat_settings), "--output_dir", str(tmp_path / "run"), *arguments])
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        line = f"{type(refused.value).__name__}: {refused.value}"
        assert checks[name]["value"] == line[: len(checks[name]["value"])]
        assert told in checks[name]["value"]


def test_a_chat_configuration_without_a_start_is_one_line_and_exit_code_2(
    chat_settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["preflight", "--config", str(chat_settings), "--output_dir", str(tmp_path / "run")]
    assert main([*command, "--init_from", "null"]) == 2
    assert "init_from is missing" in capsys.readouterr().err
