"""The engine against the plainest reference: one span at a time, all logits, float64, no cache and no padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from hf_tinylm.errors import DataError, TokenizerError
from hf_tinylm.evaluation.likelihood import CausalLMEngine, Span, encode_pairs
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.sections import ModelSection

VOCAB = 64


def reference(model: PreTrainedModel, span: Span) -> np.ndarray:
    """Log-probabilities of the scored ids of one span."""
    ids = torch.tensor([span.ids])
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].double().log_softmax(-1)
    return logits[torch.arange(span.start - 1, len(span.ids) - 1), ids[0, span.start :]].numpy()


def questions_of(vocab: int, count: int = 7) -> list[list[Span]]:
    """Questions of one to four spans with contexts of 1 to 40 ids and endings of 1 to 12, some without a context."""
    draw = random.Random(3)
    found = []
    for number in range(count):
        context = [draw.randrange(vocab) for _ in range(draw.choice([1, 2, 15, 30, 40]))]
        endings = [[draw.randrange(vocab) for _ in range(draw.randint(1, 12))] for _ in range(1 + number % 4)]
        found.append([Span((*context, *ending), len(context)) for ending in endings])
    return found


def gpt2() -> PreTrainedModel:
    """Learned positions: a wrong position changes everything."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def gemma2() -> PreTrainedModel:
    """Capped logits and a sliding window of 8: neither head nor cache is plain."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    limits = {"sliding_window": 8, "final_logit_softcapping": 2.0, "max_position_embeddings": 64}
    return Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCAB, num_key_value_heads=1, head_dim=16, **shape, **limits))


def mistral() -> PreTrainedModel:
    """A plain head over a sliding window of 8: the cache forgets."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    limits = {"sliding_window": 8, "max_position_embeddings": 64}
    return MistralForCausalLM(MistralConfig(vocab_size=VOCAB, num_key_value_heads=1, **shape, **limits))


def ours() -> PreTrainedModel:
    return new_model(ModelSection(32, 2, 4, 2, 48, pad_vocab_to_multiple_of=40), VOCAB, 64, seed=1)


@pytest.mark.parametrize("make", [ours, gpt2, gemma2, mistral])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_every_span_has_the_log_probabilities_of_a_reference_without_cache_padding_or_batch(
    make: Callable[[], PreTrainedModel], batch_size: int
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    questions = questions_of(VOCAB)
    scores = CausalLMEngine(model, batch_size=batch_size).score(questions)
    assert [len(found) for found in scores] == [len(question) for question in questions]
    for question, found in zip(questions, scores, strict=True):
        for span, score in zip(question, found, strict=True):
            expected = reference(model, span)
            np.testing.assert_allclose(score.logprobs, expected, atol=2e-5)
            assert score.total == pytest.approx(expected.sum(), abs=1e-4)
            assert score.tokens == len(span.ids) - span.start


def test_what_endings_share_is_computed_once(byte_model: TinyLMForCausalLM) -> None:
    context = tuple(range(10, 70))
    question = [Span((*context, first, 5, 6), 60) for first in (1, 2, 3, 4)]
    read: list[int] = []
    hook = byte_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        for share in (True, False):
            engine = CausalLMEngine(byte_model, share=share)
            engine.score([question])
            read.clear()
            engine.score([question])
            assert sum(read) == (59 + 4 * 3 if share else 4 * 62)
    finally:
        hook.remove()


def test_a_span_is_greedy_when_each_of_its_ids_is_the_first_choice(byte_model: TinyLMForCausalLM) -> None:
    ids = [20, 30]
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(byte_model(torch.tensor([ids])).logits[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 200]
    engine = CausalLMEngine(byte_model)
    found = engine.score([[Span(tuple(ids), 2), Span(tuple(other), 2), Span(tuple(other[:-1]), 2)]])[0]
    assert [score.greedy for score in found] == [True, False, True]


def test_equal_endings_are_computed_once_so_they_tie_exactly_wherever_they_stand(
    byte_model: TinyLMForCausalLM,
) -> None:
    same, other = Span((*range(5, 45), 7, 8, 9), 40), Span((*range(5, 45), 9, 8, 7, 6, 5), 40)
    rows: list[int] = []
    hook = byte_model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    try:
        for question in ([same, other, same], [other, other, same, same]):
            totals = [score.total for score in CausalLMEngine(byte_model, batch_size=2).score([question])[0]]
            assert rows[-2:] == [1, 2]  # what they share, and two different endings
            for a, first in zip(question, totals, strict=True):
                assert all((first == second) is (a == b) for b, second in zip(question, totals, strict=True))
    finally:
        hook.remove()


def test_a_context_that_is_too_long_loses_ids_on_its_left_and_an_ending_that_is_too_long_is_refused(
    byte_model: TinyLMForCausalLM,
) -> None:
    draw = random.Random(0)
    ids = tuple(draw.randrange(4, 260) for _ in range(140))
    score = CausalLMEngine(byte_model).score([[Span(ids, 120)]])[0][0]
    np.testing.assert_allclose(score.logprobs, reference(byte_model, Span(ids[-97:], 77)), atol=2e-5)
    with pytest.raises(DataError, match="100 tokens are to be scored at once and the model reads 96"):
        CausalLMEngine(byte_model).score([[Span(ids, 40)]])


def test_an_id_that_the_model_does_not_have_is_refused(byte_model: TinyLMForCausalLM) -> None:
    with pytest.raises(TokenizerError, match=r"id 265 and the model 260 tokens.*--tokenizer"):
        CausalLMEngine(byte_model).score([[Span((1, 265, 2), 1)]])


def test_a_span_needs_an_id_before_and_one_to_score() -> None:
    for ids, start in (((1, 2), 0), ((1, 2), 2), ((), 1)):
        with pytest.raises(DataError, match="cannot be scored"):
            Span(ids, start)


def test_weights_that_are_no_numbers_are_not_a_score(byte_tokenizer: object) -> None:
    model = new_model(ModelSection(32, 1, 2, 2, 32), VOCAB, 32, seed=0)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DataError, match="no finite log-probability"):
        CausalLMEngine(model).score([[Span((1, 2, 3), 1)]])


def test_bf16_stays_near_float32_and_the_mode_of_the_model_is_restored(byte_model: TinyLMForCausalLM) -> None:
    questions = questions_of(200)
    exact = CausalLMEngine(byte_model).score(questions)
    byte_model.train()
    rounded = CausalLMEngine(byte_model, bf16=True).score(questions)
    assert byte_model.training
    byte_model.eval()
    pairs = [(a.total, b.total) for x, y in zip(exact, rounded, strict=True) for a, b in zip(x, y, strict=True)]
    differences = [abs(a - b) / max(1.0, abs(a)) for a, b in pairs]
    assert 0 < max(differences) < 0.05


# --- joint tokenization


class Words:
    """Greedy longest match over a few tokens, one of which spans the border of context and ending."""

    prefix: tuple[int, ...] = ()
    start_id = 99
    tokens = ("ab", " of", " off", "a", "b", " ", "o", "f")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        found = []
        for text in texts:
            ids = []
            while text:
                token = max((t for t in self.tokens if text.startswith(t)), key=len)
                ids.append(self.tokens.index(token))
                text = text[len(token) :]
            found.append(ids)
        return found


@pytest.mark.parametrize(
    ("context", "ending", "ids", "start"),
    [
        ("a", " of", (3, 1), 1),  # the plain case
        ("a ", "of", (3, 1), 1),  # white space at the end of the context belongs to the ending
        ("b of", "f", (4, 2), 1),  # the border falls inside " off": that token is scored
        ("a", "b", (99, 0), 1),  # ... also when it is the first: a start token stands before it
        ("", "ab", (99, 0), 1),
        ("  ", "ab", (99, 5, 5, 0), 1),
    ],
)
def test_context_and_ending_are_encoded_as_one_text(
    context: str, ending: str, ids: tuple[int, ...], start: int
) -> None:
    (span,) = encode_pairs(Words(), [(context, ending)])  # type: ignore[arg-type]
    assert (span.ids, span.start) == (ids, start)


def test_ids_that_the_tokenizer_puts_first_are_context() -> None:
    class WithBegin(Words):
        prefix = (50,)

    spans = encode_pairs(WithBegin(), [("a", " of"), ("", "ab")])  # type: ignore[arg-type]
    assert [(span.ids, span.start) for span in spans] == [((50, 3, 1), 2), ((50, 0), 1)]


def test_an_empty_ending_is_refused() -> None:
    with pytest.raises(DataError, match="empty ending"):
        encode_pairs(Words(), [("ab", "")])  # type: ignore[arg-type]


# --- memory


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells and resets the peak of a process")
def test_peak_memory_rises_by_less_than_two_batches_of_logits_with_a_vocabulary_of_32768() -> None:
    model = new_model(ModelSection(32, 1, 2, 2, 32), 32_768, 256, seed=0)
    engine = CausalLMEngine(model, batch_size=8)
    rows = np.random.default_rng(0).integers(0, 32_768, (16, 257))
    engine.score([[Span(tuple(rows[0].tolist()), 1)]])  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    engine.score([[Span(tuple(row), 1)] for row in rows.tolist()])
    batch_of_logits = 8 * 256 * 32_768 * 4
    assert peak_bytes() - before < 2 * batch_of_logits
    assert peak_bytes() - before < 0.8 * batch_of_logits  # not even one is held
