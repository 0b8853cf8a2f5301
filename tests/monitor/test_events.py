"""The events that the code writes are those that the code and the page name, field by field."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hf_tinylm.monitor.events import _WORDS, EVENT_FIELDS, in_words

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_fields_of_every_kind_with_their_types() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    table = text[text.index("## Events") : text.index("## Hardware")]
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (.+) \|$", table, re.MULTILINE)
    shown = {kind: dict(re.findall(r"`(\w+)` ([a-z ]+)", fields)) for kind, fields in rows}
    assert shown == EVENT_FIELDS


def test_every_kind_is_told_in_words() -> None:
    assert set(_WORDS) == set(EVENT_FIELDS)
    assert all(in_words({"event": kind}) for kind in EVENT_FIELDS)
    assert in_words({"event": "sampled", "samples": [{}, {}]}) == "samples of 2 prompts"


def test_every_event_that_is_written_in_the_code_is_declared() -> None:
    written: dict[str, set[str]] = {}
    for path in (ROOT / "hf_tinylm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add"):
                continue
            owner = ast.unparse(node.func.value)
            if owner.endswith("events") and node.args and isinstance(node.args[0], ast.Constant):
                named = {keyword.arg for keyword in node.keywords if keyword.arg}
                written.setdefault(str(node.args[0].value), set()).update(named)
    assert set(written) == set(EVENT_FIELDS)
    for kind, fields in written.items():
        assert fields <= set(EVENT_FIELDS[kind]), kind
