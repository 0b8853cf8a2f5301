"""Every rule by hand: four endings of which each is the best under one rule; ties; words; chance; intervals."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.evaluation.likelihood import CausalLMEngine, Question, SpanScore
from hf_tinylm.evaluation.metrics import metric
from hf_tinylm.evaluation.multiple_choice import score_suite
from hf_tinylm.evaluation.suites import Item, Suite
from hf_tinylm.files import bundled

CHOICES = Suite("own", "multiple_choice", {}, "none", {"context": "q", "endings": "e", "label": "l"})
LAST_WORD = Suite("own", "last_word", {}, "none", {"context": "q", "ending": "e"})

# ending: (log-probability of each token). Divided by tokens, characters and bytes:
HAND = {
    "no": [-4.0],  #                              sum -4   token -4     character -2.0   byte -2.0      <- sum
    "yes.": [-1.5, -1.5, -1.5, -1.5],  #          sum -6   token -1.5   character -1.5   byte -1.5      <- token
    "nine char": [-3.0, -3.0, -3.0],  #           sum -9   token -3     character -1.0   byte -1.0      <- character
    "가나다라마": [-2.0, -2.0, -2.0, -2.0],  #    sum -8   token -2     character -1.6   byte -0.533    <- byte
}


class Given:
    """An engine whose log-probabilities are written down: ids of an ending are 1000 x its number + place."""

    prefix: tuple[int, ...] = ()
    start_id = 0
    vocab_size = 10**6

    def __init__(
        self, table: dict[str, list[float]], greedy: Sequence[str] = (), max_length: int | None = None
    ) -> None:
        self.table, self.names, self.greedy = table, list(table), greedy
        self.max_length = max_length

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        found = []
        for text in texts:
            ending = text.removeprefix("Q").removeprefix(" ")
            number = 1000 * (1 + self.names.index(ending)) if ending else 0
            found.append([7] + [number + place for place in range(len(self.table[ending]))] if ending else [7])
        return found

    def score(self, questions: Sequence[Question], progress: bool = False) -> list[list[SpanScore]]:
        def one(number: int) -> SpanScore:
            name = self.names[number // 1000 - 1]
            return SpanScore(np.array(self.table[name], dtype=np.float32), name in self.greedy)

        return [[one(span.ids[span.start]) for span in question] for question in questions]

    def facts(self) -> dict[str, Any]:
        return {}


def test_each_rule_chooses_what_it_chooses_by_hand() -> None:
    items = [Item(("Q",) * 4, tuple(HAND), label) for label in (0, 1, 2, 3)]
    found = score_suite(Given(HAND), CHOICES, items)
    assert found["records"][0]["chosen"] == {"sum": 0, "per_token": 1, "per_character": 2, "per_byte": 3}
    assert found["records"][0]["characters"] == [2, 4, 9, 5]
    assert found["records"][0]["bytes"] == [2, 4, 9, 15]
    assert found["records"][0]["tokens"] == [1, 4, 3, 4]
    assert found["records"][0]["logprobs"] == [-4.0, -6.0, -9.0, -8.0]
    for rule in ("sum", "per_token", "per_character", "per_byte"):  # one of four right
        result = found["results"][f"accuracy_{rule}"]
        assert result["value"] == 0.25
        assert result["stderr"] == pytest.approx(math.sqrt(0.25 * 0.75 / 3))
        assert result["interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)  # Wilson, from a table
    assert found["results"]["chance"]["value"] == 0.25


def test_ties_go_to_the_ending_that_comes_first() -> None:
    table = {"aa": [-1.0, -1.0], "bb": [-1.0, -1.0], "cc": [-3.0, -3.0]}
    items = [Item(("Q",) * 3, ("cc", "bb", "aa"), 1), Item(("Q",) * 3, ("aa", "cc", "bb"), 2)]
    found = score_suite(Given(table), CHOICES, items)
    assert [set(record["chosen"].values()) for record in found["records"]] == [{1}, {0}]
    assert found["results"]["accuracy_sum"]["value"] == 0.5


def test_a_last_word_is_right_when_all_its_tokens_are_first_choices_and_has_a_perplexity() -> None:
    table = {"door": [-1.0], "window": [-2.0, -3.0], "cat": [-0.5]}
    items = [Item(("Q",), (word,), None) for word in table]
    results = score_suite(Given(table, greedy=["door", "cat"]), LAST_WORD, items)["results"]
    assert results["exact_match"]["value"] == pytest.approx(2 / 3)
    assert results["perplexity_per_word"]["value"] == pytest.approx(math.exp(6.5 / 3))
    assert results["perplexity_per_token"]["value"] == pytest.approx(math.exp(6.5 / 4))
    assert (
        results["perplexity_per_word"]["interval"][0]
        < math.exp(6.5 / 3)
        < results["perplexity_per_word"]["interval"][1]
    )


def test_partial_evaluation_scores_the_same_words_after_each_option(byte_engine: CausalLMEngine) -> None:
    suite = Suite("own", "multiple_choice", {}, "none", {"contexts": "c", "ending": "e", "label": "l"})
    item = Item(("Because Ann", "Because Evelyn"), ("was fast.", "was fast."), 0)
    found = score_suite(byte_engine, suite, [item])
    assert found["records"][0]["tokens"] == [10, 10]  # " was fast." and not the option
    assert "the same ending after each option" in found["results"]["accuracy_sum"]["rule"]


def test_cut_contexts_are_counted_and_the_same_items_have_the_same_hashes(byte_engine: CausalLMEngine) -> None:
    items = [Item(("word " * 30,) * 2, ("a", "b"), 0), Item(("short",) * 2, ("a", "b"), 1)]
    found, again = (score_suite(byte_engine, CHOICES, items) for _ in range(2))
    assert found["truncated"] == 2
    assert found["items_sha256"] == again["items_sha256"]
    assert found["ids_sha256"] == again["ids_sha256"]
    assert score_suite(byte_engine, CHOICES, items[::-1])["items_sha256"] != found["items_sha256"]


# --- the modules alone


def test_a_lone_question_has_no_standard_error_and_a_length_of_zero_is_refused() -> None:
    inputs = {"tokens": [[1, 1]], "characters": [[1, 1]], "bytes": [[1, 1]]}
    found = metric("multiple_choice").compute(predictions=[[0.0, -1.0]], references=[0], **inputs)
    assert (found["accuracy_sum"], found["accuracy_sum_stderr"]) == (1.0, None)
    with pytest.raises(ValueError, match="length of 1 or more"):
        metric("multiple_choice").compute(predictions=[[0.0, -1.0]], references=[0], **{**inputs, "bytes": [[0, 1]]})


def test_bits_per_byte_counts_utf8_and_takes_texts_or_sizes() -> None:
    nats = [3 * math.log(2), 4 * math.log(2)]
    by_text = metric("bits_per_byte").compute(predictions=nats, references=["é", "abcde"])
    assert by_text["bits_per_byte"] == pytest.approx(7 / 7)
    assert by_text["bytes"] == 7
    assert metric("bits_per_byte").compute(predictions=nats, references=[2, 5]) == by_text
    with pytest.raises(ValueError, match="no byte"):
        metric("bits_per_byte").compute(predictions=[1.0], references=[0])


def test_perplexity_weighs_spans_by_their_tokens() -> None:
    found = metric("token_weighted_perplexity").compute(predictions=[30.0, 4.0], references=[30, 2])
    assert found["loss"] == pytest.approx(34 / 32)  # a mean of means would say 1.5
    assert found["perplexity"] == pytest.approx(math.exp(34 / 32))
    equal = metric("token_weighted_perplexity").compute(predictions=[4.0, 8.0, 6.0], references=[2, 2, 2])
    assert equal["loss_stderr"] == pytest.approx(np.std([2, 4, 3], ddof=1) / math.sqrt(3))
    assert metric("token_weighted_perplexity").compute(predictions=[1.0], references=[1])["loss_interval"] is None


@pytest.mark.parametrize("name", ["bits_per_byte", "multiple_choice", "token_weighted_perplexity"])
def test_each_module_has_a_card_with_metadata_and_a_description(name: str) -> None:
    card = (bundled("eval", name) / "README.md").read_text()
    assert card.startswith(f"---\ntitle: {name}\nsdk: evaluate\n")
    assert "# " + name in card
    assert metric(name).description
    assert "Returns:" in metric(name).inputs_description


@pytest.mark.slow
def test_the_modules_open_offline_from_a_home_that_is_empty(tmp_path: Path) -> None:
    code = f"import evaluate; print(evaluate.load({str(bundled('eval', 'bits_per_byte'))!r})"
    code += ".compute(predictions=[2.772588722239781], references=['ab'])['bits_per_byte'])"
    env = {**os.environ, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == "2.0", found.stderr
