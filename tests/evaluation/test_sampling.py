"""Sampling with a random stock model: repeatable, inside the model's limits, and without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_tinylm.errors import ConfigError
from hf_tinylm.evaluation.sampling import prompt_ids, sample, sample_ids

TOKENS, POSITIONS = 260, 24


def greedy_by_hand(model: LlamaForCausalLM, ids: list[int], steps: int) -> list[int]:
    """Argmax over real tokens, the whole prefix recomputed at every step."""
    ids = list(ids)
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits[:TOKENS].argmax()))
    return ids[-steps:]


def test_temperature_zero_takes_the_most_likely_token_every_time(padded_model, byte_tokenizer) -> None:
    prompt = [10, 20, 30]
    expected = greedy_by_hand(padded_model, prompt, 8)
    assert sample_ids(padded_model, byte_tokenizer, prompt, 8, temperature=0) == expected
    assert sample_ids(padded_model, byte_tokenizer, prompt, 8, temperature=0, seed=1) == expected


def test_a_very_small_top_p_is_the_same_as_taking_the_most_likely(padded_model, byte_tokenizer) -> None:
    expected = greedy_by_hand(padded_model, [10, 20, 30], 8)
    assert sample_ids(padded_model, byte_tokenizer, [10, 20, 30], 8, temperature=0.8, top_p=1e-6) == expected


def test_equal_seeds_give_equal_ids_and_another_seed_gives_others(padded_model, byte_tokenizer) -> None:
    drawn = [sample_ids(padded_model, byte_tokenizer, "ab", 16, temperature=1.5, top_p=1.0, seed=s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_draws_follow_the_models_own_probabilities(padded_model, byte_tokenizer) -> None:
    with torch.no_grad():
        logits = padded_model(torch.tensor([[10, 20]])).logits[0, -1, :TOKENS]
    probabilities = torch.softmax(logits / 0.3, dim=-1)
    best = int(probabilities.argmax())
    draws = [sample_ids(padded_model, byte_tokenizer, [10, 20], 1, 0.3, 1.0, seed=s)[0] for s in range(200)]
    share, expected = draws.count(best) / 200, float(probabilities[best])
    assert abs(share - expected) < 4 * (expected * (1 - expected) / 200) ** 0.5 + 1e-9


def test_the_random_state_of_the_process_is_not_touched(padded_model, byte_tokenizer) -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    sample(padded_model, byte_tokenizer, "ab", 8)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_answer_does_not_depend_on_the_random_state_of_the_process(padded_model, byte_tokenizer) -> None:
    torch.manual_seed(1)
    first = sample_ids(padded_model, byte_tokenizer, "ab", 8)
    torch.manual_seed(2)
    assert sample_ids(padded_model, byte_tokenizer, "ab", 8) == first


def test_dropout_is_off_while_sampling_and_every_submodule_is_as_before_after_it(padded_model, byte_tokenizer) -> None:
    quiet = sample_ids(padded_model, byte_tokenizer, "ab", 8)
    padded_model.train()
    padded_model.model.norm.eval()
    assert sample_ids(padded_model, byte_tokenizer, "ab", 8) == quiet
    modes = {name: module.training for name, module in padded_model.named_modules()}
    assert modes.pop("model.norm") is False
    assert all(modes.values())


def test_the_mode_is_restored_when_generation_fails(padded_model, byte_tokenizer, monkeypatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    padded_model.train()
    settings = padded_model.generation_config
    monkeypatch.setattr(padded_model, "generate", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        sample(padded_model, byte_tokenizer, "ab", 8)
    assert padded_model.training
    assert padded_model.generation_config is settings


def test_rows_that_pad_the_embedding_are_never_drawn(padded_model, byte_tokenizer) -> None:
    with torch.no_grad():
        raw = padded_model(torch.tensor([[10, 20]])).logits[0, -1]
    assert int(raw.argmax()) >= TOKENS  # the model would choose one
    for temperature in (0, 2.0):
        ids = sample_ids(padded_model, byte_tokenizer, [10, 20], 16, temperature=temperature, top_p=1.0)
        assert max(ids) < TOKENS


def test_settings_saved_with_the_model_do_not_change_the_answer(padded_model, byte_tokenizer) -> None:
    expected = sample_ids(padded_model, byte_tokenizer, "ab", 12, temperature=1.0, top_p=1.0)
    padded_model.generation_config.top_k = 1
    padded_model.generation_config.no_repeat_ngram_size = 1
    padded_model.generation_config.repetition_penalty = 5.0
    assert sample_ids(padded_model, byte_tokenizer, "ab", 12, temperature=1.0, top_p=1.0) == expected
    assert padded_model.generation_config.top_k == 1


def test_generation_ends_with_the_models_end_token(padded_model, byte_tokenizer) -> None:
    with torch.no_grad():
        padded_model.lm_head.bias[0] = 1e4
    assert sample_ids(padded_model, byte_tokenizer, "ab", 16) == [0]
    assert sample(padded_model, byte_tokenizer, "ab", 16) == ""


def test_prompt_and_answer_together_stay_within_the_models_positions(padded_model, byte_tokenizer) -> None:
    assert len(sample_ids(padded_model, byte_tokenizer, [10] * 20, 100)) == POSITIONS - 20
    assert len(sample_ids(padded_model, byte_tokenizer, [10] * (POSITIONS - 1), 100)) == 1
    with pytest.raises(ConfigError, match=r"24 tokens; the model reads 24 at most"):
        sample_ids(padded_model, byte_tokenizer, [10] * POSITIONS, 1)


def test_an_empty_prompt_starts_from_the_separator_of_documents(padded_model, byte_tokenizer) -> None:
    expected = sample_ids(padded_model, byte_tokenizer, [0], 8)
    assert sample_ids(padded_model, byte_tokenizer, "", 8) == expected
    assert sample_ids(padded_model, byte_tokenizer, [], 8) == expected


def test_special_tokens_written_in_a_prompt_are_ordinary_text(byte_tokenizer) -> None:
    text = "a<|im_start|>b"
    ids = prompt_ids(byte_tokenizer, text)
    assert len(ids) == len(text)
    assert min(ids) >= 4
    assert byte_tokenizer.decode(ids) == text


def test_the_text_is_the_answer_without_the_prompt(padded_model, byte_tokenizer) -> None:
    ids = sample_ids(padded_model, byte_tokenizer, "ab", 8)
    assert sample(padded_model, byte_tokenizer, "ab", 8) == byte_tokenizer.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_without_a_separator_starts_from_its_end_token(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    class Elsewhere:
        eos_token_id = 7

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    assert prompt_ids(Elsewhere(), []) == [7]  # type: ignore[arg-type]
    Elsewhere.eos_token_id = None
    with pytest.raises(ConfigError, match="Give a prompt"):
        prompt_ids(Elsewhere(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_named(padded_model, byte_tokenizer, arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        sample_ids(padded_model, byte_tokenizer, "ab", **{"max_new_tokens": 4, **arguments})


# Probabilities of the ids 10 to 14, whatever the prompt; every other id is practically impossible.
SHARES = (0.5, 0.25, 0.15, 0.07, 0.03)


@pytest.fixture
def fixed_model(padded_model: LlamaForCausalLM) -> Callable[[Sequence[float]], LlamaForCausalLM]:
    """A function that makes a model whose logits are always those given for the ids from 10 on, -30 elsewhere."""

    def make(logits: Sequence[float]) -> LlamaForCausalLM:
        with torch.no_grad():
            padded_model.lm_head.weight.zero_()
            padded_model.lm_head.bias.fill_(-30.0)
            padded_model.lm_head.bias[10 : 10 + len(logits)] = torch.tensor(list(logits))
        return padded_model

    return make


@pytest.mark.parametrize(
    ("rules", "remaining"),
    [
        ({}, {10, 11, 12, 13, 14}),
        ({"top_k": 2}, {10, 11}),
        ({"top_k": 4}, {10, 11, 12, 13}),
        ({"top_p": 0.8}, {10, 11, 12}),  # 0.5 + 0.25 are not 0.8 yet
        ({"top_p": 0.74}, {10, 11}),
        ({"min_p": 0.1}, {10, 11, 12, 13}),  # at least 0.1 x 0.5
        ({"min_p": 0.2}, {10, 11, 12}),
        ({"min_p": 1.0}, {10}),
        ({"temperature": 0.5, "top_p": 0.85}, {10, 11}),  # squares: 0.734, 0.183, 0.066, ...
        ({"top_k": 3, "top_p": 0.8}, {10, 11}),  # 0.556, 0.278, 0.167 among the three
        ({"temperature": 0, "top_k": 3, "min_p": 0.1}, {10}),
    ],
    ids=str,
)
def test_each_rule_leaves_exactly_the_ids_of_a_hand_computed_distribution(
    fixed_model, byte_tokenizer, rules: dict[str, float], remaining: set[int]
) -> None:
    model = fixed_model([math.log(share) for share in SHARES])
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, **rules}
    drawn = {i for seed in range(6) for i in sample_ids(model, byte_tokenizer, [50], 23, seed=seed, **settings)}
    assert drawn == remaining


def test_what_remains_is_drawn_by_its_renormalised_probabilities(fixed_model, byte_tokenizer) -> None:
    model = fixed_model([math.log(share) for share in SHARES])
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 2}
    drawn = [i for seed in range(10) for i in sample_ids(model, byte_tokenizer, [50], 23, seed=seed, **settings)]
    assert abs(drawn.count(10) / len(drawn) - 2 / 3) < 4 * (2 / 9 / len(drawn)) ** 0.5


@pytest.mark.parametrize(
    ("logits", "prompt", "expected"),
    [
        ([2.0, 1.9, 1.2], [50], [10, 11, 10, 10]),  # 2 / 1.5 = 1.33, 1.9 / 1.5 = 1.27
        ([2.0, 1.9, 1.4], [50], [10, 11, 12, 10]),
        ([-1.0, -1.2], [50], [10, 11, 10, 10]),  # -1 x 1.5 = -1.5, -1.2 x 1.5 = -1.8
        ([2.0, 1.9, 1.2], [10], [11, 10, 10, 10]),  # the prompt counts
    ],
)
def test_the_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones(
    fixed_model, byte_tokenizer, logits: list[float], prompt: list[int], expected: list[int]
) -> None:
    model = fixed_model(logits)
    assert sample_ids(model, byte_tokenizer, prompt, 4, temperature=0, repetition_penalty=1.5) == expected
    assert sample_ids(model, byte_tokenizer, prompt, 4, temperature=0) == [10] * 4


def test_a_text_is_cut_exactly_before_the_first_stop_text(padded_model, byte_tokenizer) -> None:
    whole = sample(padded_model, byte_tokenizer, "ab", 20)
    first, second = whole[9:12], whole[5:7]
    assert whole.find(second) < whole.find(first)
    assert sample(padded_model, byte_tokenizer, "ab", 20, stop=[first]) == whole[: whole.find(first)]
    assert sample(padded_model, byte_tokenizer, "ab", 20, stop=[first, second]) == whole[: whole.find(second)]
    assert sample(padded_model, byte_tokenizer, "ab", 20, stop=["never written"]) == whole


def test_drawing_ends_with_the_token_that_completes_a_stop_text_in_the_new_part(fixed_model, byte_tokenizer) -> None:
    (b,) = prompt_ids(byte_tokenizer, "b")
    model = fixed_model([])
    with torch.no_grad():
        model.lm_head.bias[b] = 30.0
    assert sample_ids(model, byte_tokenizer, "a", 9, stop=["bbb"]) == [b] * 3
    assert sample(model, byte_tokenizer, "a", 9, stop=["bbb"]) == ""
    assert sample(model, byte_tokenizer, "a", 9, stop=["ab"]) == "b" * 9, "the a is in the prompt"


@pytest.mark.parametrize(
    "arguments", [{"top_k": -1}, {"min_p": -0.1}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"stop": [""]}], ids=str
)
def test_a_rule_out_of_range_is_named(padded_model, byte_tokenizer, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        sample_ids(padded_model, byte_tokenizer, "ab", 4, **arguments)
