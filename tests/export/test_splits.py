"""Each split that we name is cut by llama.cpp exactly as by the tokenizers library; anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from hf_tinylm.errors import ExportError
from hf_tinylm.export.gguf import GGUFSource
from hf_tinylm.export.gguf_splits import LLAMA3_SPLIT, adds_bos, pre_tokenizer_label
from hf_tinylm.export.llamacpp import LlamaCppServer
from hf_tinylm.export.parity import HOSTILE_STRINGS, random_unicode_strings

# The steps of tokenizer.json as Meta-Llama-3-8B, SmolLM2-135M and gpt2 have them.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def steps_of(label: str) -> PreTokenizer:
    return {
        "llama-bpe": Sequence([Split(Regex(LLAMA3), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
        "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        "gpt-2": ByteLevel(add_prefix_space=False),
    }[label]


def bos_template(text: str, token_id: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


@pytest.mark.parametrize("label", ["llama-bpe", "smollm", "gpt-2"])
def test_llama_cpp_gives_the_ids_of_the_tokenizer_under_the_name_that_is_written(
    make_model: Callable[..., Path],
    make_tokenizer: Callable[..., dict[str, Any]],
    edit_json: Callable[..., None],
    tmp_path: Path,
    label: str,
) -> None:
    pytest.importorskip("xllamacpp")
    value = make_tokenizer(steps_of(label), ignore_merges=label == "llama-bpe")
    folder = make_model()
    if label == "llama-bpe":
        value["post_processor"] = bos_template("<|im_start|>", 1)
        edit_json(folder / "tokenizer_config.json", lambda settings: settings.update(bos_token="<|im_start|>"))
    (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    source = GGUFSource(folder)
    assert (source.section.pre, source.section.add_bos) == (label, label == "llama-bpe")
    source.write(tmp_path / "model.gguf", "f32")
    reference = Tokenizer.from_str(json.dumps(value))
    reference.encode_special_tokens = True
    texts = [*HOSTILE_STRINGS, *random_unicode_strings(2_000)]
    with LlamaCppServer(tmp_path / "model.gguf", threads=1) as server:
        for special, some in ((False, texts), (True, texts[:20])):
            ids = server.tokenize(some, parse_special=False, add_special=special)
            wanted = [row.ids for row in reference.encode_batch(some, add_special_tokens=special)]
            wrong = [text for text, got, want in zip(some, ids, wanted, strict=True) if got != want]
            assert wrong == []
    assert reference.encode("a").ids[0] == 1 or label != "llama-bpe"  # the bos was really there


def tokenizer_with(*steps: PreTokenizer, **model: Any) -> dict[str, Any]:
    made = json.loads(Sequence(list(steps)).__getstate__())
    return {"pre_tokenizer": made, "decoder": {"type": "ByteLevel"}, "model": model}


def test_the_split_of_llama_3_is_spelled_as_its_tokenizer_spells_it() -> None:
    assert LLAMA3_SPLIT == LLAMA3
    bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
    whole = tokenizer_with(Split(Regex(LLAMA3), "isolated"), bytes_only, ignore_merges=True)
    assert pre_tokenizer_label(whole) == "llama-bpe"
    with pytest.raises(ExportError, match="ignore_merges=false"):
        pre_tokenizer_label(tokenizer_with(Split(Regex(LLAMA3), "isolated"), bytes_only))


@pytest.mark.parametrize(
    ("steps", "given", "needed"),
    [
        ((ByteLevel(add_prefix_space=True),), "add_prefix_space=true", "nearest is gpt-2: ByteLevel\\(add_prefix"),
        ((Digits(), ByteLevel(add_prefix_space=False)), "individual_digits=false", "nearest is smollm"),
        (
            (Split(Regex(LLAMA3.replace("1,3", "1,2")), "isolated"), ByteLevel(False, use_regex=False)),
            r"\{1,2\}",
            r"nearest is llama-bpe: .*\{1,3\}",
        ),
    ],
)
def test_a_refusal_shows_what_the_tokenizer_does_beside_the_nearest_split(
    steps: tuple[PreTokenizer, ...], given: str, needed: str
) -> None:
    with pytest.raises(ExportError, match=f"{given}.*{needed}"):
        pre_tokenizer_label(tokenizer_with(*steps))


def test_only_the_bos_token_in_front_may_be_added() -> None:
    assert adds_bos({"post_processor": bos_template("<s>", 7)}, "<s>") is True
    assert adds_bos({"post_processor": {"type": "ByteLevel"}}, None) is False
    behind = bos_template("<s>", 7)
    behind["single"].reverse()
    for template, bos in ((behind, "<s>"), (bos_template("<s>", 7), "<bos>"), (bos_template("<s>", 7), None)):
        with pytest.raises(ExportError, match="special tokens around"):
            adds_bos({"post_processor": template}, bos)
