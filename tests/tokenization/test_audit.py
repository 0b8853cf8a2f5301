"""The audit counts what it says, and a tokenizer that loses text does not pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hf_tinylm.errors import TokenizerError
from hf_tinylm.tokenization.audit import audit_tokenizer, missing_bytes
from hf_tinylm.tokenization.load import save_tokenizer, tokenizer_sha256
from hf_tinylm.tokenization.train import train_tokenizer


def test_bytes_per_token_are_counted_by_source(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> None:
    texts = {"prose": documents[:300], "scripts": [documents[-1]]}
    audit = audit_tokenizer(tokenizer, texts)
    tokens = {name: sum(len(tokenizer(text).input_ids) for text in group) for name, group in texts.items()}
    sizes = {name: sum(len(text.encode()) for text in group) for name, group in texts.items()}
    for name in texts:
        found = audit["sources"][name]
        assert (found["tokens"], found["bytes"], found["documents"]) == (tokens[name], sizes[name], len(texts[name]))
        assert found["bytes_per_token"] == pytest.approx(sizes[name] / tokens[name])
    assert audit["bytes_per_token"] == pytest.approx(sum(sizes.values()) / sum(tokens.values()))
    assert audit["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert (audit["ok"], audit["missing_bytes"], audit["round_trip_failures"]) == (True, [], [])


def test_tokens_that_the_texts_do_not_use_are_listed() -> None:
    tokenizer, _ = train_tokenizer(["hello world"] * 50, 269)
    audit = audit_tokenizer(tokenizer, {"all": ["hello"]})
    # Merges of " world" and the steps on the way to "hello" and " world"; single bytes are not counted.
    assert audit["unused_tokens"] == 8
    assert " world" in audit["unused_examples"]
    assert "hello" not in audit["unused_examples"]


def test_other_tokenizers_are_measured_on_the_same_text(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    other, _ = train_tokenizer(["hello world"] * 50, 269)
    save_tokenizer(other, tmp_path / "other")
    text = "hello world <|im_end|>"
    audit = audit_tokenizer(tokenizer, {"all": [text]}, compare=[str(tmp_path / "other")])
    compared = audit["compare"][str(tmp_path / "other")]
    # "hello", " world", " <|", then one byte each.
    tokens = 2 + len(" <|im_end|>")
    assert compared == {
        "vocab_size": 269,
        "bytes_per_token": len(text) / tokens,
        "sources": {"all": len(text) / tokens},
    }
    with pytest.raises(TokenizerError, match="nowhere"):
        audit_tokenizer(tokenizer, {"all": [text]}, compare=["/nowhere"])


def test_a_tokenizer_that_lacks_bytes_fails_the_audit(tokenizer: PreTrainedTokenizerFast) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for character in ("~", "Ā"):  # bytes 0x7e and 0x00
        del content["model"]["vocab"][character]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "~" not in "".join(pair)]
    lossy = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    assert missing_bytes(lossy) == [0x00, 0x7E]
    audit = audit_tokenizer(lossy, {"all": ["plain", "a~b"]})
    assert not audit["ok"]
    assert "a~b" in audit["round_trip_failures"]
    assert "plain" not in audit["round_trip_failures"]


def test_no_text_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TokenizerError, match="empty"):
        audit_tokenizer(tokenizer, {"all": []})
