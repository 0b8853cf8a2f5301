"""The gate must pass right files and fail files that are wrong in one way each; llama.cpp itself is the judge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hf_tinylm.errors import ConfigError, VerificationError
from hf_tinylm.export import gguf as gguf_module
from hf_tinylm.export import gguf_splits, parity
from hf_tinylm.export.gguf import write_gguf
from hf_tinylm.export.llamacpp import Continuation
from hf_tinylm.export.parity import ParityReport, random_unicode_strings, verify_gguf

pytest.importorskip("xllamacpp")

MakeModel = Callable[..., Path]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (15, 5), "theta": 500_000.0, "vocab_size": 608},
        {"architecture": "qwen3", "heads": (8, 2), "head_dim": 32, "hidden_size": 64, "tied": False},
        pytest.param({"heads": (8, 2), "tied": False, "theta": 500_000.0}, marks=SLOW),
        pytest.param({"heads": (12, 4), "tied": False, "vocab_size": 608}, marks=SLOW),
        pytest.param({"heads": (8, 2), "head_dim": 16, "hidden_size": 64}, marks=SLOW),
        pytest.param({"architecture": "qwen3", "heads": (8, 2), "theta": 500_000.0, "vocab_size": 608}, marks=SLOW),
        pytest.param({"architecture": "qwen3", "heads": (12, 4), "theta": 2_000.0}, marks=SLOW),
        pytest.param({"architecture": "qwen3", "heads": (15, 5), "tied": False, "vocab_size": 608}, marks=SLOW),
    ],
)
def test_an_f32_file_agrees_with_its_model(make_model: MakeModel, tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = make_model(**shape)
    write_gguf(folder, tmp_path / "model.gguf", "f32")
    report = verify_gguf(tmp_path / "model.gguf", folder, random_strings=300, threads=1)
    assert report.failures == []
    assert report.ok
    assert report.max_logit_difference < 2e-4  # five times below the limit
    assert report.logit_limit == 1e-3
    assert report.token_mismatches == 0
    assert report.strings > 400
    assert report.positions == 24
    assert report.raw_positions in (0, 4 * 48)  # every position of the prompts, where llama-cpp-python is installed
    assert report.quality is not None
    assert report.quality.kl_divergence < 1e-6
    assert report.quality.top1_agreement == 1.0
    assert report.greedy_equal
    assert report.ties == 0
    assert report.greedy_tokens > 20
    assert report.ends_equal
    assert report.template_equal is None


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3", marks=SLOW)])
def test_an_f16_chat_file_agrees_with_its_model_on_five_thousand_strings(
    make_model: MakeModel, tmp_path: Path, architecture: str
) -> None:
    folder = make_model(architecture, heads=(12, 4), chat=True)
    write_gguf(folder, tmp_path / "model.gguf", "f16")
    report = verify_gguf(tmp_path / "model.gguf", folder, threads=1)
    assert report.failures == []
    assert 1e-4 < report.max_logit_difference < 0.1
    assert report.logit_limit == 0.1
    assert report.strings > 5_000
    assert report.template_equal is True


def test_a_context_shorter_than_the_prompts_is_not_exceeded(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(context=40)
    write_gguf(folder, tmp_path / "model.gguf", "f32")
    report = verify_gguf(tmp_path / "model.gguf", folder, random_strings=0, threads=1)
    assert report.failures == []
    assert 0 < report.greedy_tokens <= 2 * 39


def replace_metadata(monkeypatch: pytest.MonkeyPatch, method: str, value: Any) -> None:
    """Make GGUFWriter's `method` write `value`, or nothing if it is None, whatever it is given."""
    original = getattr(gguf.GGUFWriter, method)
    monkeypatch.setattr(gguf.GGUFWriter, method, lambda self, given: None if value is None else original(self, value))


def wrong_pre(label: str) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gguf_splits, "PRE_TOKENIZERS", dict.fromkeys(gguf_splits.PRE_TOKENIZERS, label))

    return apply


def reversed_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, merges: original(self, merges[::-1]))


def unpermuted_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gguf_module.interleave_rotary_rows
    monkeypatch.setattr(
        gguf_module, "interleave_rotary_rows", lambda weight, heads: original(weight, heads) if heads == 12 else weight
    )


def swapped_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up projections, which have the same shape, in each other's place."""
    original = gguf_module.gguf_tensors
    other = {"mlp.gate_proj": "mlp.up_proj", "mlp.up_proj": "mlp.gate_proj"}

    def swapped(shape: Any, tokens: int) -> list[Any]:
        return [
            replace(tensor, source=re.sub("|".join(other), lambda found: other[found.group()], tensor.source))
            for tensor in original(shape, tokens)
        ]

    monkeypatch.setattr(gguf_module, "gguf_tensors", swapped)


DAMAGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "no permutation": (
        lambda m: m.setattr(gguf_module, "interleave_rotary_rows", lambda weight, heads: weight),
        "log-probabilities differ",
    ),
    "swapped tensors": (swapped_tensors, "log-probabilities differ"),
    "only queries permuted": (unpermuted_keys, "log-probabilities differ"),
    "no theta": (lambda m: replace_metadata(m, "add_rope_freq_base", None), "log-probabilities differ"),
    "another theta": (lambda m: replace_metadata(m, "add_rope_freq_base", 400_000.0), "log-probabilities differ"),
    "another epsilon": (lambda m: replace_metadata(m, "add_layer_norm_rms_eps", 1e-3), "log-probabilities differ"),
    "the split of gpt-2": (wrong_pre("gpt-2"), "other token ids"),
    "the default split": (wrong_pre("default"), "other token ids"),
    "merges in another order": (reversed_merges, "other token ids"),
    "a bos added": (lambda m: replace_metadata(m, "add_add_bos_token", True), "other token ids"),
    "all tokens ordinary": (lambda m: replace_metadata(m, "add_token_types", [1] * 544), "other token ids"),
    "an ordinary token as eos": (lambda m: replace_metadata(m, "add_eos_token_id", 40), "stops at the ordinary tokens"),
    "no template": (lambda m: replace_metadata(m, "add_chat_template", None), "chat template"),
    "another template": (
        lambda m: replace_metadata(m, "add_chat_template", "{% for x in messages %}{{ x.content }}{% endfor %}"),
        "chat template",
    ),
}


QUICK = ("no permutation", "no theta", "swapped tensors", "the split of gpt-2", "no template")


@pytest.mark.parametrize("damage", [d if d in QUICK else pytest.param(d, marks=SLOW) for d in DAMAGES])
def test_a_file_that_is_wrong_in_one_way_fails_the_gate(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    apply, message = DAMAGES[damage]
    folder = make_model(heads=(12, 4), theta=500_000.0, chat=True)
    with monkeypatch.context() as patched:
        apply(patched)
        write_gguf(folder, tmp_path / "model.gguf", "f16")
    report = verify_gguf(tmp_path / "model.gguf", folder, random_strings=300, threads=1)
    assert not report.ok
    assert any(message in failure for failure in report.failures), report.failures
    if "log-probabilities" in message:
        assert report.token_mismatches == 0
        assert not report.max_logit_difference <= 0.1
    if "token ids" in message:
        assert report.token_mismatches > 0
    assert report.to_json()["ok"] is False


def test_a_quantized_file_is_held_to_what_its_type_may_cost(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = make_model(heads=(12, 4), theta=500_000.0), tmp_path / "model.gguf"
    write_gguf(folder, path, "q8_0")
    # random weights lose more than trained ones: about 0.008 nats, and a tenth of the most likely tokens
    roomy = {"kl_divergence": 0.05, "top1_agreement": 0.7}
    report = verify_gguf(path, folder, random_strings=100, threads=1, limits=roomy)
    assert report.failures == []
    assert (report.logit_limit, report.greedy_equal) == (None, None)
    assert report.quality is not None
    assert 1e-7 < report.quality.kl_divergence < 0.05
    assert report.to_json()["quality"]["perplexity_rise"] == report.quality.perplexity_rise
    strict = verify_gguf(path, folder, random_strings=0, threads=1, limits={"kl_divergence": 1e-9})
    assert any("KL divergence" in failure for failure in strict.failures)
    with monkeypatch.context() as patched:
        DAMAGES["no permutation"][0](patched)
        write_gguf(folder, path, "q4_0")
    damaged = verify_gguf(path, folder, random_strings=0, threads=1)
    assert any("KL divergence" in failure for failure in damaged.failures)
    assert damaged.quality is not None
    assert damaged.quality.kl_divergence > 0.5


def test_the_model_of_another_run_fails_the_gate(make_model: MakeModel, tmp_path: Path) -> None:
    write_gguf(make_model(heads=(8, 2)), tmp_path / "model.gguf", "f32")
    report = verify_gguf(tmp_path / "model.gguf", make_model("qwen3", heads=(8, 2)), random_strings=0, threads=1)
    assert not report.ok
    assert not report.greedy_equal


def test_a_truncated_file_and_missing_paths_are_named(make_model: MakeModel, tmp_path: Path) -> None:
    folder, path = make_model(), tmp_path / "model.gguf"
    write_gguf(folder, path, "f32")
    with pytest.raises(ConfigError, match=r"absent\.gguf"):
        verify_gguf(tmp_path / "absent.gguf", folder)
    with pytest.raises(ConfigError, match=r"config\.json"):
        verify_gguf(path, tmp_path / "absent")
    whole = path.read_bytes()
    for kept in (len(whole) * 2 // 3, 100, 3):
        path.write_bytes(whole[:kept])
        with pytest.raises(VerificationError, match="not a whole GGUF file"):
            verify_gguf(path, folder)


class StubServer:
    """Answers `generate` from a table of continuations by what has been chosen so far."""

    def __init__(self, continuations: dict[tuple[int, ...], list[int]]) -> None:
        self.continuations = continuations

    def generate(self, prompt_ids: list[int], tokens: int) -> Continuation:
        return Continuation(self.continuations[tuple(prompt_ids[1:])][:tokens], ended=False)


class StubReference:
    """Chooses 5, 6, 7, 8; the logits of 6 and of 1 in the second place are `gap` apart."""

    context = 64

    def __init__(self, gap: float) -> None:
        self.rows = np.zeros((4, 9))
        for place, token in enumerate((5, 6, 7, 8)):
            self.rows[place, token] = 4.0
        self.rows[1, 1] = 4.0 - gap

    def greedy(self, prompt: list[int], count: int, ends: set[int]) -> tuple[list[int], np.ndarray]:
        return [5, 6, 7, 8], self.rows


@pytest.mark.parametrize(
    ("gap", "after_tie", "ties", "equal"),
    [
        (0.0005, [7, 8], 1, True),
        (0.002, [7, 8], 0, False),  # farther apart than rounding explains
        (0.0005, [7, 3], 1, False),  # the comparison goes on after a tie
    ],
)
def test_a_near_tie_is_counted_and_the_comparison_goes_on(
    gap: float, after_tie: list[int], ties: int, equal: bool
) -> None:
    report = ParityReport("file", "folder", logit_limit=1e-3)
    server = StubServer({(): [5, 1, 1, 1], (5, 6): after_tie})
    parity._compare_greedy(report, server, StubReference(gap), [2], set())  # type: ignore[arg-type]
    assert (report.ties, report.greedy_equal, report.ok) == (ties, equal, equal)
    assert report.greedy_tokens == (4 if equal else 3 if ties else 1)


def test_a_generation_that_stops_early_is_a_difference() -> None:
    report = ParityReport("file", "folder", logit_limit=1e-3)
    parity._compare_greedy(report, StubServer({(): [5, 6]}), StubReference(1.0), [2], set())  # type: ignore[arg-type]
    assert not report.greedy_equal
    assert "stopped after 2" in report.failures[0]


@pytest.mark.parametrize("missing", [True, False])
def test_a_log_probability_that_is_missing_or_not_a_number_fails(missing: bool) -> None:
    class Reference:
        tokens = 3

        def logits(self, ids: list[int]) -> np.ndarray:
            return np.log([[0.5, 0.25, 0.25]] * len(ids))

    class Server:
        def next_token_logprobs(self, prompt_ids: list[int], vocab_size: int) -> np.ndarray:
            exact = np.log([0.5, 0.25, 0.25])
            return np.where([False, False, missing and len(prompt_ids) == 1], np.nan, exact)

    report = ParityReport("file", "folder", logit_limit=1e-3)
    parity._compare_logprobs(report, Server(), Reference(), [[1, 2, 0]])  # type: ignore[arg-type]
    assert report.ok is not missing
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["max_logit_difference"] == (
        None if missing else 0.0
    )


def test_the_report_has_the_keys_that_others_read() -> None:
    keys = "ok token_mismatches strings max_logit_difference greedy_equal template_equal"
    assert set(keys.split()) <= ParityReport("file", "folder").to_json().keys()


def test_random_strings_are_seeded_varied_and_encodable() -> None:
    strings = random_unicode_strings(2_000)
    assert strings == random_unicode_strings(2_000)
    assert strings != random_unicode_strings(2_000, seed=1)
    assert {len(text) for text in strings} == set(range(1, 41))
    assert len({character for text in strings for character in text}) > 5_000
    assert all(text.encode("utf-8").decode("utf-8") == text for text in strings)


def test_an_end_id_that_only_hugging_face_stops_at_fails_the_gate(
    make_model: MakeModel, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model()
    write_gguf(folder, tmp_path / "model.gguf", "f32")
    edit_json(folder / "generation_config.json", lambda config: config.update(eos_token_id=[0, 40]))
    report = verify_gguf(tmp_path / "model.gguf", folder, random_strings=0, threads=1)
    assert not report.ends_equal
    assert any("stops at [40]" in failure for failure in report.failures)
