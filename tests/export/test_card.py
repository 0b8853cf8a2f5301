from __future__ import annotations

import math
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_tinylm.export.card import CardFacts, write_card
from hf_tinylm.export.curves import draw_curves

SOURCES = {"a|b": {"ids": 1_200, "documents": 3, "licence": "cc0"}}


def rows(updates: int) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for step in range(1, updates + 1):
        row = {"step": step, "supervised_tokens": 64 * step, "loss": 5 / step, "learning_rate": 1e-3, "grad_norm": 1.0}
        found.append(row)
        if step % 2 == 0:
            found.append({"step": step, "eval_loss": 5.5 / step, "bits_per_byte": 2 / step, "eval_tokens": 100})
    return found


def test_the_metadata_is_valid_for_the_hub_and_holds_the_last_validation(tmp_path: Path) -> None:
    write_card(tmp_path, "mine", CardFacts({"parameters": "5"}, SOURCES, rows(4), licence="mit", base_model="a/b"))
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.library_name, data.license, data.base_model) == ("transformers", "mit", "a/b")
    values = {result.metric_type: result.metric_value for result in data.eval_results}
    assert values == {"loss": 1.375, "bits_per_byte": 0.5}
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| a\\|b | 1,200 | 3 | cc0 |" in text
    assert "(curves.png)" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_was_not_evaluated_or_licensed_says_so(tmp_path: Path) -> None:
    write_card(tmp_path, "mine", CardFacts({}, SOURCES))
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.license is None
    assert not data.eval_results
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "none was chosen; all rights are reserved" in text
    assert "curves.png" not in text


def test_a_chat_model_is_tagged_and_shows_a_conversation(tmp_path: Path) -> None:
    write_card(tmp_path, "mine", CardFacts({}, SOURCES, chat=True))
    assert "conversational" in ModelCard.load(tmp_path / "README.md").data.tags
    assert "apply_chat_template" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("broken", [[], rows(1)[:1], [{"step": 1, "eval_loss": 1.0}]])
def test_nothing_is_drawn_from_too_few_updates(broken: list[dict[str, float]], tmp_path: Path) -> None:
    assert not draw_curves(broken, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_rows_of_skipped_updates_do_not_stop_the_drawing(tmp_path: Path) -> None:
    found = rows(6)
    found[0]["grad_norm"] = math.nan
    assert draw_curves(found, tmp_path / "x.png")
