"""Preflight of a pretraining run that starts from another one: `init_from` is opened as the recipe will open it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from hf_tinylm.files import bundled
from hf_tinylm.preflight import run as run_module

Preflight = Callable[..., dict[str, dict[str, Any]]]
NAME = "starting weights"


@pytest.fixture(scope="module")
def recipe() -> Callable[[list[str]], int]:
    """`main` of recipes/pretrain.py."""
    return run_path(str(bundled("recipes", "pretrain.py")))["main"]


@pytest.fixture(scope="module")
def finished(tiny_config: Path, recipe: Callable[[list[str]], int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of one update."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    short = ["--train_tokens", "256", "--warmup_steps", "0", "--eval_steps", "null"]
    assert recipe(["--config", str(tiny_config), "--output_dir", str(folder), *short]) == 0
    return folder


@pytest.fixture
def parent(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; preflight runs the checks of weights alone."""
    rules = tuple(rule for rule in run_module.RUN_RULES if rule.name in ("ids", "weights", NAME))
    monkeypatch.setattr(run_module, "RUN_RULES", rules)
    shutil.copytree(finished, tmp_path / "parent")
    return tmp_path / "parent"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def of_another_tokenizer(parent: Path) -> None:
    record = json.loads((parent / "run.json").read_text())
    record["identity"]["data"]["tokenizer_sha256"] = "0" * 64
    (parent / "run.json").write_text(json.dumps(record))


def with_another_tokenizer_and_no_record(parent: Path) -> None:
    (parent / "run.json").unlink()
    file = parent / "final" / "tokenizer.json"
    text = json.loads(file.read_text(encoding="utf-8"))
    text["model"]["merges"].pop()
    file.write_text(json.dumps(text), encoding="utf-8")


CHECKPOINT = "checkpoint-00000001"


@pytest.mark.parametrize(
    ("damage", "start", "settings", "told"),
    [
        (lambda parent: None, "gone", [], "is not a model folder"),
        (lambda parent: None, "final", ["--hidden_size", "64"], "is a model of another shape; hidden_size: 32 -> 64"),
        (of_another_tokenizer, "final", [], "was trained with the tokenizer 000000000000"),
        (with_another_tokenizer_and_no_record, "final", [], "ids would mean other tokens"),
        (lambda p: flip(p / "final" / "model.safetensors"), "final", [], "other bytes than"),
        (lambda p: flip(p / CHECKPOINT / "model.safetensors"), CHECKPOINT, [], "other bytes than"),
        (lambda p: (p / CHECKPOINT / "manifest.json").write_text("{}"), CHECKPOINT, [], "is damaged"),
        (lambda p: (p / "final" / "model.safetensors").unlink(), "final", [], "is missing or has other bytes"),
        (
            lambda p: flip(p / CHECKPOINT / "optimizer.safetensors"),
            CHECKPOINT,
            ["--init_optimizer", "true"],
            "init_optimizer needs a whole checkpoint",
        ),
    ],
)
def test_a_start_that_the_recipe_refuses_fails_with_the_recipes_line(
    tiny_config: Path, tmp_path: Path, parent: Path, recipe: Callable[[list[str]], int], preflight: Preflight,
    damage: Callable[[Path], None], start: str, settings: list[str], told: str,
) -> None:  # fmt: skip
    damage(parent)
    settings = ["--init_from", str(parent / start), *settings]
    with pytest.raises(Exception, match=told) as refused:
        recipe(["--config", str(tiny_config), "--output_dir", str(tmp_path / "refused"), *settings])
    checks = preflight(*settings)
    assert [name for name, check in checks.items() if check["ok"] is False] == [NAME]
    line = f"{type(refused.value).__name__}: {refused.value}"
    assert checks[NAME]["value"] == line[: len(checks[NAME]["value"])]


def test_a_sound_start_is_told_with_its_hash_and_loss(preflight: Preflight, parent: Path) -> None:
    for settings in ([], ["--init_optimizer", "true"]):
        checks = preflight("--init_from", str(parent / CHECKPOINT), *settings)
        assert checks[NAME]["ok"], checks[NAME]
        assert ("moments kept" if settings else "moments zero") in checks[NAME]["value"]
    evaluated = preflight("--init_from", str(parent / "final"))[NAME]["value"]
    assert evaluated.split("SHA-256 ")[1] == checks[NAME]["value"].split("SHA-256 ")[1].replace("kept", "zero")
    assert preflight()[NAME]["value"] == "fresh"
