"""The harness and our engine decide every item of a file alike."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import pytest

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.files import bundled
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.load import load_tokenizer


@pytest.fixture
def folder(tiny_config: Path, tmp_path: Path) -> Path:
    """A random model, and 200 items of HellaSwag's schema made of the bundled prose."""
    model = new_model(load_config(str(tiny_config)).model, 512, 192, seed=1)
    save_stock_model(model, tmp_path / "model", load_tokenizer(tiny_config.parent / "tokenizer"))
    with lzma.open(bundled("recipes", "corpora", "austen.txt.xz"), "rt", encoding="utf-8") as file:
        words = file.read(200_000).replace("[", "(").replace("]", ")").split()
    draw = random.Random(0)

    def prose(low: int, high: int) -> str:
        start = draw.randrange(len(words) - high)
        return " ".join(words[start : start + draw.randint(low, high)])

    rows = [
        {
            **{"ind": number, "activity_label": prose(1, 2), "ctx_a": prose(4, 12), "ctx_b": "", "split": "val"},
            **{"ctx": "", "label": str(draw.randrange(4))},
            "endings": [prose(1, 9) + draw.choice(["", " é", " [step] 한국어", "."]) for _ in range(4)],
        }
        for number in range(200)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.slow
def test_our_engine_and_lm_eval_agree_on_every_item_of_a_hellaswag_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    found = {}
    for suite in ("hellaswag", "lm-eval:hellaswag"):
        command = ["eval", str(folder / "model"), "--suite", suite, "--data", str(folder / "rows.jsonl"), "--json"]
        assert main([*command, "--device", "cpu"]) == 0
        found[suite] = json.loads(capsys.readouterr().out)
    ours, theirs = found["hellaswag"]["results"], found["lm-eval:hellaswag"]["results"]
    assert ours["accuracy_sum"]["value"] == theirs["acc"]["value"]
    assert ours["accuracy_per_character"]["value"] == theirs["acc_norm"]["value"]
    assert ours["accuracy_sum"]["stderr"] == pytest.approx(theirs["acc"]["stderr"])
    assert "lm-eval" in theirs["acc"]["rule"]
    rule = found["lm-eval:hellaswag"]["rule"]
    assert (rule["task"], rule["task_version"], rule["few_shot"]) == ("hellaswag", 1.0, 0)
    saved = str(folder / "model" / "eval" / "lm-eval-hellaswag.json")
    assert main(["eval", "--compare", saved, saved, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["results"]
    assert {name: (one["a"], one["better"]) for name, one in compared.items()} == {
        name: (theirs[name]["value"], None) for name in ("acc", "acc_norm")
    }
    names = ("hellaswag.items.jsonl", "lm-eval-hellaswag.items.jsonl")
    pairs = zip(*((folder / "model" / "eval" / name).read_text().splitlines() for name in names), strict=True)
    for own, other in (map(json.loads, pair) for pair in pairs):
        assert own["item"] == other["item"]
        assert (own["chosen"]["sum"] == own["label"]) == bool(other["acc"])
        assert (own["chosen"]["per_character"] == own["label"]) == bool(other["acc_norm"])
    assert main(["eval", str(folder / "model"), "--suite", "lm-eval:no_such_task"]) == 2
    assert "no single task no_such_task" in capsys.readouterr().err


def test_without_lm_eval_the_extra_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hf_tinylm.evaluation.harness.importlib.util.find_spec", lambda name: None)
    assert main(["eval", str(folder / "model"), "--suite", "lm-eval:hellaswag"]) == 2
    assert "pip install 'hf-tinylm[lm-eval]'" in capsys.readouterr().err
