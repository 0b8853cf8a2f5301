"""Bundled suites make the texts that the papers and lm-eval make; a row that does not fit is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.evaluation.suites import items_sha256, load_items, load_suite, wikihow_brackets
from hf_tinylm.files import bundled

HELLASWAG = {
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "endings": ["is using wrap.", "[step] rips tiles  off.", "holds a rubik's cube.", "throws darts."],
    "label": "3",
}
ARC = {"question": "Which is hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"}
ROWS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], int | None]] = {
    "hellaswag": (
        HELLASWAG,
        [
            ("Roof shingle removal: A man is sitting on a roof. He", " is using wrap."),
            ("Roof shingle removal: A man is sitting on a roof. He", " rips tiles off."),
            ("Roof shingle removal: A man is sitting on a roof. He", " holds a rubik's cube."),
            ("Roof shingle removal: A man is sitting on a roof. He", " throws darts."),
        ],
        3,
    ),
    "arc_easy": (ARC, [("Question: Which is hot?\nAnswer:", " ice"), ("Question: Which is hot?\nAnswer:", " fire")], 1),
    "arc_challenge": (
        {**ARC, "answerKey": "1", "choices": {"text": ["ice", "fire"], "label": ["1", "2"]}},
        [("Question: Which is hot?\nAnswer:", " ice"), ("Question: Which is hot?\nAnswer:", " fire")],
        0,
    ),
    "piqa": (
        {"goal": "dry a plate", "sol1": "Use a cloth.", "sol2": "Use water.", "label": 0},
        [("Question: dry a plate\nAnswer:", " Use a cloth."), ("Question: dry a plate\nAnswer:", " Use water.")],
        0,
    ),
    "winogrande": (
        {"sentence": "Ann beat Eve because _ was fast.", "option1": "Ann", "option2": "Eve", "answer": "1"},
        [("Ann beat Eve because Ann", " was fast."), ("Ann beat Eve because Eve", " was fast.")],
        0,
    ),
    "openbookqa": (
        {**ARC, "question_stem": "A hot thing is", "answerKey": " A"},
        [("A hot thing is", " ice"), ("A hot thing is", " fire")],
        0,
    ),
    "lambada": ({"text": "She opened the old door"}, [("She opened the old", " door")], None),
}


def test_there_is_a_fixture_for_every_bundled_suite() -> None:
    assert {path.stem for path in bundled("eval", "suites").glob("*.yaml")} == set(ROWS)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_bundled_suite_makes_these_texts_with_exactly_one_space(name: str) -> None:
    row, pairs, label = ROWS[name]
    suite = load_suite(name)
    item = suite.item(row, "row 1")
    assert (suite.name, item.pairs, item.label) == (name, pairs, label)
    assert suite.dataset["path"]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("[header] How to cook [title] Heat it.  [step] Turn [substeps] up. ", " How to cook. Heat it.  Turn up."),
        ("plain", "plain"),
        ("a   b", "a  b"),  # once over the text, as in the paper's code
    ],
)
def test_the_clean_up_of_hellaswag(text: str, cleaned: str) -> None:
    assert wikihow_brackets(text) == cleaned


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": ""}, "label -1 names none of 4"),  # the test split has no labels
        ({"label": "4"}, "label 4 names none of 4"),
        ({"endings": ["a", "[step]", "c", "d"]}, "an ending is empty after the clean-up wikihow_brackets"),
        ({"endings": ["only"]}, "2 or more endings"),
        ({"endings": "text"}, "2 or more endings"),
        ({"ctx_b": None}, "context of the suite hellaswag"),
    ],
)
def test_a_row_that_is_no_question_is_refused_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^row 7.*{message}"):
        load_suite("hellaswag").item({**HELLASWAG, **change}, "row 7")


@pytest.mark.parametrize("missing", ["ctx_a", "endings", "label"])
def test_a_row_without_a_field_says_which_expression_needs_it(missing: str) -> None:
    row = {key: value for key, value in HELLASWAG.items() if key != missing}
    with pytest.raises(DataError, match=r"row 7: \w+ of the suite hellaswag .* cannot be made of fields activity"):
        load_suite("hellaswag").item(row, "row 7")


def test_rows_come_from_a_jsonl_file_in_order_and_a_limit_takes_the_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{**HELLASWAG, "label": str(n % 4)} for n in range(6)]
    file.write_text("\n\n".join(json.dumps(row) for row in rows))
    suite = load_suite("hellaswag")
    items = load_items(suite, str(file))
    assert [item.label for item in items] == [0, 1, 2, 3, 0, 1]
    assert load_items(suite, str(file), limit=2) == items[:2]
    assert items_sha256(items) != items_sha256(items[:5]) != items_sha256(items[1:])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no item"),
        ("\n \n", "holds no item"),
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 is a JSON list"),
        (json.dumps(HELLASWAG) + "\n{}", "line 2: context of the suite"),
    ],
)
def test_a_file_that_holds_no_rows_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        load_items(load_suite("hellaswag"), str(file))


def test_a_dataset_that_cannot_be_had_says_what_to_give_instead() -> None:
    with pytest.raises(DataError, match=r"Rowan/hellaswag of the suite hellaswag could not be loaded.*--data FILE"):
        load_items(load_suite("hellaswag"))
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        load_items(load_suite("hellaswag"), "missing.jsonl")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "unknown keys"),
        ({"kind": "multiple_choice", "label": "0", "prompt": "x"}, r"unknown keys \(prompt\)"),
        ({"kind": "essay"}, "needs a kind of multiple_choice"),
        ({"kind": "last_word", "cleanup": "magic"}, "cleanup of none, wikihow_brackets"),
        ({"kind": "last_word", "context": "a"}, "needs context and ending"),
        ({"kind": "multiple_choice", "context": "a", "label": "b"}, "context and endings, or with contexts and ending"),
        ({"kind": "last_word", "context": "a", "ending": 3}, "is no text"),
        ({"kind": "last_word", "context": "a +", "ending": "b"}, "context: a \\+ is no expression"),
        ({"kind": "last_word", "context": "a", "ending": "b", "dataset": "x"}, "needs dataset"),
    ],
)
def test_a_suite_with_wrong_keys_is_refused(values: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=message):
        load_suite(str(file))


def test_a_suite_of_ones_own_cannot_reach_into_python(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"kind": "last_word", "context": "a.__class__.__mro__ | string", "ending": "a"}))
    with pytest.raises(DataError, match="cannot be made of"):
        load_suite(str(file)).item({"a": "x"}, "row 1")


@pytest.mark.parametrize("name", ["helaswag", "../suites/hellaswag", "missing.yaml"])
def test_an_unknown_suite_lists_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no suite .*arc_challenge, arc_easy, hellaswag, lambada"):
        load_suite(name)
