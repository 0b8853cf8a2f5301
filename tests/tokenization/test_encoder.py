"""The fast encoder gives the ids of the `tokenizers` library, whatever the text."""

from __future__ import annotations

import json
import logging
import lzma
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_tinylm.errors import TokenizerError
from hf_tinylm.files import bundled
from hf_tinylm.tokenization.audit import HOSTILE_STRINGS
from hf_tinylm.tokenization.encoder import FastEncoder, why_not_tiktoken


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerFast) -> FastEncoder:
    return FastEncoder(tokenizer)


def reference_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    reference = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    reference.encode_special_tokens = True
    return [encoding.ids for encoding in reference.encode_batch_fast(texts, add_special_tokens=False)]


def changed(tokenizer: PreTrainedTokenizerFast, **parts: object) -> PreTrainedTokenizerFast:
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | parts
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))


def test_ids_equal_those_of_tokenizers_on_every_document_of_the_bundled_texts(
    encoder: FastEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert encoder.engine == "tiktoken"
    count = 0
    for name in ("austen.txt.xz", "kjv.txt.xz"):
        with lzma.open(bundled("recipes", "corpora", name), "rt", encoding="utf-8") as file:
            text = file.read()
        texts = [text[start : start + 4096] for start in range(0, len(text), 4096)]
        for fast, exact in zip(encoder.encode_batch(texts), reference_ids(tokenizer, texts), strict=True):
            assert fast.tolist() == exact
            count += 1
    assert count > 1900


def test_ids_equal_those_of_tokenizers_on_hostile_and_random_text(
    encoder: FastEncoder, tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> None:
    rng = random.Random(1)
    alphabet = list(dict.fromkeys(documents[-1] + documents[0] + "\x00\x1c\x85\u2028\u3000ſİı\u0301"))
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(3000)]
    texts += ["".join(chr(rng.randrange(0xE000, 0x110000)) for _ in range(50)) for _ in range(100)]
    texts += [*HOSTILE_STRINGS, documents[-1]]
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == reference_ids(tokenizer, texts)


@pytest.mark.parametrize("engine", [None, "tokenizers"])
def test_text_that_spells_a_special_token_yields_ordinary_ids(
    engine: str | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "a <|endoftext|> b<|im_start|><|im_end|><|pad|>"
    (ids,) = FastEncoder(tokenizer, engine).encode_batch([text])
    assert ids.min() > 3
    assert tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False) == text


def test_encoding_leaves_the_given_tokenizer_as_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    FastEncoder(tokenizer).encode_batch(["<|im_end|>"])
    assert tokenizer("<|im_end|>").input_ids == [2]


@pytest.mark.parametrize("run", ["a", " ", "\n", "\t ", "^", "好", "1"])
def test_a_run_of_a_million_characters_is_encoded_like_any_text(
    run: str, encoder: FastEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "start " + run * (1_000_000 // len(run) // (4 if run in "好1" else 1)) + "end"
    (ids,) = encoder.encode_batch([text])
    assert [ids.tolist()] == reference_ids(tokenizer, [text])


def test_threads_share_an_encoder(encoder: FastEncoder, documents: list[str]) -> None:
    expected = encoder.encode_batch(documents)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: encoder.encode_batch([text])[0], documents))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_difference_from_tokenizers_is_noticed(encoder: FastEncoder) -> None:
    (ids,) = encoder.encode_batch(["It is a truth"])
    assert not encoder.differs("It is a truth", ids)
    assert encoder.differs("It is a truth", ids[:-1])
    assert encoder.differs("It is a truth", np.append(ids[:-1], 5))


def test_half_a_surrogate_pair_is_refused(encoder: FastEncoder) -> None:
    with pytest.raises(TokenizerError, match=r"U\+D83D at character 3"):
        encoder.encode_batch(["fine", "abc\ud83d"])


def test_a_tokenizer_that_tiktoken_cannot_represent_falls_back_with_a_notice(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    normalized = changed(tokenizer, normalizer={"type": "NFC"})
    with caplog.at_level(logging.WARNING):
        encoder = FastEncoder(normalized)
    assert encoder.engine == "tokenizers"
    assert "normalizer (NFC)" in caplog.text
    (composed, decomposed) = encoder.encode_batch(["é", "e\u0301"])
    assert composed.tolist() == decomposed.tolist()


def test_each_obstacle_to_tiktoken_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, steps = content["model"], content["pre_tokenizer"]["pretokenizers"]
    assert why_not_tiktoken(tokenizer) is None
    prefixed = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert "split" in str(why_not_tiktoken(changed(tokenizer, pre_tokenizer=prefixed)))
    two_splits = {"type": "Sequence", "pretokenizers": [steps[0], *steps]}
    assert "split" in str(why_not_tiktoken(changed(tokenizer, pre_tokenizer=two_splits)))
    swapped = model | {"merges": [*model["merges"][1::-1], *model["merges"][2:]]}
    assert "order" in str(why_not_tiktoken(changed(tokenizer, model=swapped)))
    ordinary = [content["added_tokens"][0] | {"special": False}, *content["added_tokens"][1:]]
    assert "not special" in str(why_not_tiktoken(changed(tokenizer, added_tokens=ordinary)))
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert "not bytes" in str(why_not_tiktoken(PreTrainedTokenizerFast(tokenizer_object=words)))
    small = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert "some bytes" in str(why_not_tiktoken(PreTrainedTokenizerFast(tokenizer_object=small)))


def test_a_tokenizer_with_the_split_of_gpt2_is_encoded_by_tiktoken_too(
    tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> None:
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    other = changed(tokenizer, pre_tokenizer=gpt2)
    encoder = FastEncoder(other)
    texts = [*documents[:5], documents[-1], *HOSTILE_STRINGS, "in 1995 we're  here"]
    assert encoder.engine == "tiktoken"
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == reference_ids(other, texts)
