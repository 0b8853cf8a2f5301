"""Multiple-choice items of HellaSwag's schema, cut from the bundled prose, with lengths that a benchmark asks for."""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_tinylm.files import bundled

Count = Callable[[str], int]


def questions(
    count: int, tokens: Count, context: tuple[int, int] = (70, 90), ending: tuple[int, int] = (20, 30), seed: int = 0
) -> list[dict[str, Any]]:
    """`count` items: a passage and four endings, one of which is what follows it.

    Args:
        tokens: number of tokens of a text.
        context, ending: least and most tokens.
    """
    with lzma.open(bundled("recipes", "corpora", "austen.txt.xz"), "rt", encoding="utf-8") as file:
        words = file.read(1_000_000).split()
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        place = draw.randrange(len(words) - 400)
        passage, after = _passage(words, place, context, tokens, draw)
        label = draw.randrange(4)
        starts = [after if choice == label else draw.randrange(len(words) - 200) for choice in range(4)]
        endings = [_passage(words, start, ending, tokens, draw)[0] for start in starts]
        row = {"ind": number, "activity_label": "Prose", "ctx_a": passage, "ctx_b": "", "ctx": passage}
        rows.append({**row, "endings": endings, "label": str(label)})
    return rows


def write_questions(rows: list[dict[str, Any]], path: Path) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _passage(
    words: list[str], start: int, wanted: tuple[int, int], tokens: Count, draw: random.Random
) -> tuple[str, int]:
    """Words from `start` on with about as many tokens as drawn from `wanted`, and the word after them."""
    target, end = draw.randint(*wanted), start + 1
    while tokens(" ".join(words[start : end + 1])) <= target:
        end += 1
    return " ".join(words[start:end]).replace("[", "(").replace("]", ")"), end
