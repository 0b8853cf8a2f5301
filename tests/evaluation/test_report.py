"""What an evaluation leaves behind, and what it must not touch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.errors import ConfigError
from hf_tinylm.evaluation.engines import weights_sha256
from hf_tinylm.evaluation.report import BEGIN, END, load_report, results_folder, save_report, update_card, with_block


def a_report(suite: str, model: Path, value: float = 0.25) -> dict[str, Any]:
    result = {"value": value, "stderr": 0.1, "interval": [0.1, 0.4], "rule": "a | b"}
    return {
        **{"model": "m", "suite": suite, "items": 1234, "results": {"accuracy_sum": result}, "items_sha256": "x"},
        "engine": {"model_sha256": weights_sha256(model)},
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The final folder of a run, as far as reports look at it."""
    folder = tmp_path / "run" / "final"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("# Card\n\ntext\n")
    (tmp_path / "run" / "run.json").write_text("{}")
    return folder


def test_results_of_a_run_are_beside_its_final_folder_and_apart_for_each_checkpoint(model: Path) -> None:
    run = model.parent
    (run / "run-F16.gguf").touch()
    assert results_folder(model) == run / "eval"
    assert results_folder(run / "checkpoint-00000100") == run / "eval" / "checkpoint-00000100"
    assert results_folder(run / "run-F16.gguf") == run / "eval" / "run-F16"
    (run / "run.json").unlink()
    assert results_folder(model) == model / "eval"
    assert results_folder(run / "run-F16.gguf") == run / "eval"


def test_a_report_comes_back_with_its_records(model: Path, tmp_path: Path) -> None:
    report = a_report("lm-eval:hellaswag", model)
    path = save_report(report, [{"item": 0, "é": 1}, {"item": 1}], tmp_path / "out")
    assert path == tmp_path / "out" / "lm-eval-hellaswag.json"
    assert load_report(path) == (report, [{"item": 0, "é": 1}, {"item": 1}])
    path.with_name("lm-eval-hellaswag.items.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"items\.jsonl does not exist"):
        load_report(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no report of hf-tinylm eval"):
        load_report(path)


def test_the_card_gets_one_table_of_all_suites_that_is_replaced_on_the_next_run(model: Path) -> None:
    folder = results_folder(model)
    save_report(a_report("hellaswag", model), [], folder)
    assert update_card(model, folder)
    save_report(a_report("piqa", model), [], folder)
    save_report(a_report("hellaswag", model, 0.5), [], folder)
    update_card(model, folder)
    text = (model / "README.md").read_text()
    assert text.startswith("# Card\n\ntext\n\n" + BEGIN)
    assert text.count(BEGIN) == text.count(END) == text.count("## Evaluation") == 1
    assert "| hellaswag | 1,234 | accuracy_sum | 0.5000 | 0.1000 to 0.4000 | a \\| b |" in text
    assert "| piqa | 1,234 |" in text
    assert "0.2500 | 0.1" in text.split("| piqa")[1]
    update_card(model, folder)
    assert (model / "README.md").read_text() == text


def test_scores_of_other_weights_do_not_enter_the_card(model: Path) -> None:
    folder = results_folder(model)
    save_report(a_report("hellaswag", model), [], folder)
    (model / "model.safetensors").write_bytes(b"other weights")
    save_report(a_report("piqa", model), [], folder)
    update_card(model, folder)
    assert "hellaswag" not in (model / "README.md").read_text()
    assert "piqa" in (model / "README.md").read_text()


def test_a_checkpoint_whose_files_are_hashed_is_left_alone(model: Path) -> None:
    (model / "manifest.json").write_text("{}")
    before = (model / "README.md").read_bytes()
    assert not update_card(model, results_folder(model))
    assert (model / "README.md").read_bytes() == before


def test_text_around_and_after_the_block_stays_and_a_lone_mark_loses_nothing() -> None:
    first = with_block("before\n", f"{BEGIN}\none\n{END}")
    assert with_block(first + "after\n", f"{BEGIN}\ntwo\n{END}") == f"before\n\n{BEGIN}\ntwo\n{END}\nafter\n"
    torn = f"{BEGIN}\nkept because no end mark follows\n"
    again = with_block(with_block(torn, f"{BEGIN}\none\n{END}"), f"{BEGIN}\ntwo\n{END}")
    assert "kept because" in again
    assert "one" not in again
    assert with_block("", f"{BEGIN}{END}") == f"{BEGIN}{END}\n"


def test_items_are_lines_of_json_that_hold_no_nan(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_report(a_report("x", model), [{"nats": float("nan")}], tmp_path / "out")
    assert not (tmp_path / "out" / "x.json").exists()
    json.dumps(a_report("x", model), allow_nan=False)
