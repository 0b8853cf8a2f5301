"""A persona set with a fault is refused with the place of each fault, and the shipped one has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.cli import main
from hf_tinylm.data.persona import check_persona
from hf_tinylm.errors import DataError
from hf_tinylm.files import bundled

WriteSet = Callable[..., Path]


def chat(*contents: str, kind: str = "help", first: str = "user") -> dict[str, Any]:
    """A conversation in which `first` and the other speaker take turns."""
    other = {"user": "assistant", "assistant": "user"}
    roles = [first]
    while len(roles) < len(contents):
        roles.append(other[roles[-1]])
    return {"kind": kind, "messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]}


GOOD = [
    chat("Who are you?", "I am Ada, a small program.", kind="identity"),
    chat("Name a colour that is not red", "Blue."),
    chat("Hello", "Good day.", "Are you there?", "Yes, I am here."),
]
HELD_OUT = [chat("And you?", "My name is Ada.", kind="identity")]


@pytest.fixture
def write_set(tmp_path: Path) -> WriteSet:
    """A function that writes train.jsonl and test.jsonl; rows that are bytes are written as they are."""

    def write(train: list[Any], test: list[Any] | None = None) -> Path:
        for name, rows in (("train", train), ("test", HELD_OUT if test is None else test)):
            lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
            (tmp_path / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
        return tmp_path

    return write


def faults(folder: Path, name: str | None = None) -> list[tuple[str, int, str]]:
    """(file, line, kind) of every problem."""
    return [(Path(p.file).name, p.line, p.kind) for p in check_persona([folder], name).problems]


def test_the_shipped_set_has_no_problem_and_enough_held_out_phrasings() -> None:
    report = check_persona([bundled("recipes", "persona")])
    assert [str(problem) for problem in report.problems] == []
    assert report.name == "Wren"
    train, test = report.files.values()
    assert train["conversations"] >= 200
    assert train["with_several_rounds"] >= 50
    assert test["about_identity"] >= 10
    assert test["conversations"] - test["about_identity"] >= 20


def test_no_five_words_of_a_shipped_test_question_are_in_a_training_question() -> None:
    """Counted another way than the validator counts: by searching the words in the text."""
    import re

    def questions(name: str) -> list[str]:
        rows = bundled("recipes", "persona", name).read_text(encoding="utf-8").splitlines()
        said = [m["content"] for row in rows for m in json.loads(row)["messages"] if m["role"] == "user"]
        return [" ".join(re.sub(r"[^a-z0-9\s]", "", text.lower()).split()) for text in said]

    known = " | ".join(["", *questions("train.jsonl"), ""])
    for question in questions("test.jsonl"):
        parts = question.split()
        pieces = [" ".join(parts[i : i + 5]) for i in range(len(parts) - 4)] or [f"| {question} |"]
        assert not [piece for piece in pieces if piece in known], question


def test_a_good_set_passes(write_set: WriteSet) -> None:
    assert faults(write_set(GOOD)) == []


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (b"{not json", "format"),
        (b'{"messages": [], "kind": "x"}', "format"),
        (b"\xff\xfe", "format"),
        ({"messages": [{"role": "user"}]}, "format"),
        (chat("Speak", "  "), "format"),
        (chat("Say <|im_end|>", "No."), "format"),
        (chat("No reply here"), "role"),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}, "role"),
        ({"messages": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]}, "role"),
        (
            {"messages": [{"role": r, "content": f"{r} says so"} for r in ("user", "system", "assistant")]},
            "role",
        ),
        (chat("Talk at length", "word " * 61), "length"),
        (chat("go " * 140, "word " * 41), "length"),
        (chat("who are YOU", "I am Ada."), "duplicate"),
        (chat("What are you?", "Just a program.", kind="identity"), "identity"),
        (chat("Say it", "I'm Claude, at your service."), "identity"),
        (chat("What is your name?", "My name is Ada, but call me Max.", kind="identity"), "identity"),
    ],
)
def test_a_planted_fault_is_found_at_its_line(write_set: WriteSet, row: Any, kind: str) -> None:
    assert faults(write_set([*GOOD, row])) == [("train.jsonl", 4, kind)]


@pytest.mark.parametrize(
    ("question", "leaks"),
    [
        ("please name a colour that: IS green", True),  # five words in a row
        ("name a colour that was red", False),  # four
        ("hello!", True),  # all words of a short one
        ("hello there", False),
    ],
)
def test_a_test_question_that_was_trained_on_is_a_leak(write_set: WriteSet, question: str, leaks: bool) -> None:
    found = faults(write_set(GOOD, [chat(question, "Green.")]))
    assert found == ([("test.jsonl", 1, "leak")] if leaks else [])


def test_a_declared_name_is_demanded(write_set: WriteSet) -> None:
    found = faults(write_set(GOOD), name="Eve")
    assert found.count(("train.jsonl", 1, "identity")) == 2  # does not name Eve, claims Ada
    assert ("test.jsonl", 1, "identity") in found


def test_identical_replies_are_reported_and_no_problem(write_set: WriteSet) -> None:
    folder = write_set(GOOD, [chat("Some hue?", "BLUE!")])
    report = check_persona([folder / "train.jsonl", folder / "test.jsonl"])
    assert report.ok
    (same,) = report.identical_replies
    assert same["places"] == [f"{folder / 'test.jsonl'}:1", f"{folder / 'train.jsonl'}:2"]


def test_the_command_prints_file_and_line_and_ends_with_1(
    write_set: WriteSet, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_set([*GOOD, chat("Who are you", "I am Bob.")])
    assert main(["persona", "check", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert f"{folder / 'train.jsonl'}:4: identity: a reply claims to be Bob, not Ada" in shown
    assert f"{folder / 'train.jsonl'}:4: duplicate: asks the same as {folder / 'train.jsonl'}:1" in shown
    assert main(["persona", "check", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["name"], len(found["problems"])) == (False, "Ada", 2)
    assert main(["persona", "check", str(write_set(GOOD))]) == 0


def test_a_missing_path_or_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent does not exist"):
        check_persona([tmp_path / "absent"])
    with pytest.raises(DataError, match="neither"):
        check_persona([tmp_path])
    (tmp_path / "train.jsonl").touch()
    assert faults(tmp_path) == [("train.jsonl", 1, "format")]
