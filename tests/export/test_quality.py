"""What quantization costs, on distributions small enough to do by hand and on real files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hf_tinylm.errors import ConfigError
from hf_tinylm.export import quality
from hf_tinylm.export.quality import DEFAULT_LIMITS, Quality, QualityLimits, limits_of, measure_quality, quality_table
from hf_tinylm.gguf_plan import GGUF_TYPES

MakeModel = Callable[..., Path]


class Model:
    """Three tokens; always predicts probabilities 1/2, 1/4, 1/4. Each character of a text is a token."""

    tokens, context = 3, 40

    def logits(self, ids: list[int]) -> np.ndarray:
        return np.log([[0.5, 0.25, 0.25]] * len(ids)) + 7.0  # a constant changes no probability

    def encode(self, texts: list[str], parse_special: bool) -> list[list[int]]:
        return [[ord(character) % 3 for character in text] for text in texts]


class Server:
    """Predicts 0.2, 0.7, 0.1."""

    def next_token_logprobs(self, prompt_ids: list[int], vocab_size: int) -> np.ndarray:
        return np.log([0.2, 0.7, 0.1])

    def tokens_per_second(self, prompt_ids: list[int], tokens: int) -> float:
        return 12.0


@pytest.fixture
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "every_logit_is_available", lambda: False)


@pytest.mark.usefixtures("without_llama_cpp")
def test_divergence_perplexity_and_agreement_are_those_done_by_hand(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc" * 221)  # 64 rows start 10 characters apart, so each id follows a third
    found = measure_quality(tmp_path / "m.gguf", Server(), Model(), tmp_path / "text")  # type: ignore[arg-type]
    assert found.positions == 64
    assert found.engine == "xllamacpp"
    expected = 0.5 * math.log(0.5 / 0.2) + 0.25 * math.log(0.25 / 0.7) + 0.25 * math.log(0.25 / 0.1)
    assert found.kl_divergence == pytest.approx(expected)
    assert found.top1_agreement == 0.0
    assert found.perplexity == pytest.approx((0.2 * 0.7 * 0.1) ** (-1 / 3), rel=0.02)
    assert found.model_perplexity == pytest.approx(4 * 2 ** (-1 / 3), rel=0.01)
    assert found.tokens_per_second == 12.0


@pytest.mark.usefixtures("without_llama_cpp")
@pytest.mark.parametrize(("content", "reason"), [(b"ab" * 20, "40 tokens"), (b"\xff" * 500, "cannot be read")])
def test_a_text_that_is_short_or_not_text_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        measure_quality(tmp_path / "m.gguf", Server(), Model(), tmp_path / "text")  # type: ignore[arg-type]


def some_quality(kl: float = 0.01, perplexity: float = 10.1, top1: float = 0.9) -> Quality:
    return Quality("text", "engine", 100, kl, perplexity, 10.0, top1, 50.0, 1)


def test_each_limit_is_judged_and_a_figure_that_is_not_a_number_passes_none() -> None:
    limits = QualityLimits(0.01, 0.0101, 0.9)
    assert some_quality().failures(limits) == []
    assert "KL divergence is 0.011" in some_quality(kl=0.011).failures(limits)[0]
    assert "rises by 2.00%" in some_quality(perplexity=10.2).failures(limits)[0]
    assert "at 89.0% of positions" in some_quality(top1=0.89).failures(limits)[0]
    assert len(some_quality(math.nan, math.nan, math.nan).failures(limits)) == 3
    assert some_quality(kl=math.nan).to_json()["kl_divergence"] is None
    assert some_quality(perplexity=9.0).failures(limits) == []  # a lower perplexity is no fault


def test_limits_can_be_given_one_by_one() -> None:
    assert limits_of("q4_0") == DEFAULT_LIMITS["q4_0"]
    changed = limits_of("q4_0", {"kl_divergence": 0.5})
    assert changed == QualityLimits(0.5, DEFAULT_LIMITS["q4_0"].perplexity_rise, DEFAULT_LIMITS["q4_0"].top1_agreement)
    assert limits_of("f16") is None
    assert limits_of("f16", {"top1_agreement": 0.5}) == QualityLimits(math.inf, math.inf, 0.5)
    assert set(DEFAULT_LIMITS) == set(GGUF_TYPES) - {"f32", "f16"}


def test_the_table_has_a_line_for_each_file() -> None:
    lines = quality_table({"f16": (2_000, some_quality(0.0, 10.0, 1.0)), "q4_0": (500, some_quality())})
    assert len(lines) == 5
    assert lines[2].split() == ["f16", "2,000", "0.0e+00", "+0.00%", "100.0%", "50"]
    assert lines[3].split() == ["q4_0", "500", "1.0e-02", "+1.00%", "90.0%", "50"]
    assert quality_table({}) == []
