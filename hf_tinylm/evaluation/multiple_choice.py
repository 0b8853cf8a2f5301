"""Score a suite of questions: every usual rule from the same log-probabilities, and what each item got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..files import sha256_of_json
from .likelihood import Engine, Span, SpanScore, encode_pairs
from .metrics import compute, metric, result
from .suites import Item, Suite, items_sha256

RULES = {
    "sum": "highest summed log-probability (lm-eval acc)",
    "per_token": "highest log-probability per scored token (llm.c)",
    "per_character": "highest log-probability per character of the ending (lm-eval acc_norm)",
    "per_byte": "highest log-probability per UTF-8 byte of the ending (lm-eval acc_bytes)",
}


def score_suite(engine: Engine, suite: Suite, items: Sequence[Item], progress: bool = False) -> dict[str, Any]:
    """Score `items` with `engine`.

    Returns:
        `items`, `results` {metric: {value, stderr, interval, rule}}, `records` (one of each item: label, and of each
        ending log-probability, tokens, characters, bytes and greedy), and the facts that make two scores comparable.

    Raises:
        DataError: an item that the model cannot read.
    """
    pairs = [pair for item in items for pair in item.pairs]
    spans = iter(encode_pairs(engine, pairs))
    questions = [[next(spans) for _ in item.pairs] for item in items]
    scores = engine.score(questions, progress)
    records = [_record(*found) for found in zip(range(len(items)), items, scores, strict=True)]
    results = _last_word(records) if suite.kind == "last_word" else _choices(suite, records)
    return {
        "items": len(items),
        "results": results,
        "rule": suite.rule,
        "items_sha256": items_sha256(list(items)),
        "ids_sha256": sha256_of_json([[span.ids, span.start] for question in questions for span in question]),
        "truncated": _truncated(engine, questions),
        "records": records,
    }


def _record(number: int, item: Item, scores: Sequence[SpanScore]) -> dict[str, Any]:
    return {
        "item": number,
        "label": item.label,
        "logprobs": [score.total for score in scores],
        "tokens": [score.tokens for score in scores],
        "characters": [len(ending) for ending in item.endings],
        "bytes": [len(ending.encode("utf-8")) for ending in item.endings],
        "greedy": [score.greedy for score in scores],
    }


def _choices(suite: Suite, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy under each rule; each record also gets `chosen`, the index that each rule takes."""
    columns = {name: [record[name] for record in records] for name in ("tokens", "characters", "bytes")}
    found = compute(
        "multiple_choice",
        predictions=[record["logprobs"] for record in records],
        references=[record["label"] for record in records],
        return_chosen=True,
        **columns,
    )
    for number, record in enumerate(records):
        record["chosen"] = {rule: found[f"chosen_{rule}"][number] for rule in RULES}
    partial = "; the same ending after each option" if "contexts" in suite.expressions else ""
    results = {f"accuracy_{rule}": result(found, f"accuracy_{rule}", text + partial) for rule, text in RULES.items()}
    return {**results, "chance": result(found, "chance", "guessing")}


def _last_word(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Exact match of the last word, and the perplexity of it."""
    match = metric("multiple_choice").share("exact_match", [record["greedy"][0] for record in records])
    nats = [-record["logprobs"][0] for record in records]
    by_token = compute(
        "token_weighted_perplexity", predictions=nats, references=[record["tokens"][0] for record in records]
    )
    by_word = compute("token_weighted_perplexity", predictions=nats, references=[1] * len(records))
    return {
        "exact_match": result(match, "exact_match", "each token of the last word is the most likely one (lm-eval acc)"),
        "perplexity_per_word": result(by_word, "perplexity", "exp of mean nats per last word (lm-eval perplexity)"),
        "perplexity_per_token": result(by_token, "perplexity", "exp of mean nats per token of the last word"),
    }


def _truncated(engine: Engine, questions: Sequence[Sequence[Span]]) -> int:
    """Endings whose context lost ids on its left because the model does not read as many."""
    limit = math.inf if engine.max_length is None else engine.max_length
    return int(np.sum([len(span.ids) - 1 > limit for question in questions for span in question]))
