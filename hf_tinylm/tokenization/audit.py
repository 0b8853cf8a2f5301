"""What a tokenizer does to text: bytes per token, round trips, tokens never used, and others beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TokenizerError
from .encoder import FastEncoder
from .load import (
    backend_json,
    is_byte_level,
    load_tokenizer,
    special_ids,
    token_bytes,
    tokenizer_sha256,
    vocabulary_size,
)
from .special import SPECIAL_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH = 256

HOSTILE_STRINGS = (
    "",
    " ",
    "  two  spaces  ",
    "\t\ttabs\tinside",
    "line\nbreaks\n\n\nand\r\nreturns\r",
    "\x00nul\x00\x01\x1f\x7f",
    "1234567890 3.14159 1e-9",
    "don't WE'LL they'Re ſ'S",
    "naïve Zürich Ångström",
    "e\u0301 combining, \u202eright to left\u202c, \u200bzero width\ufeff",
    "你好，世界。한국어 조사 ไทย हिन्दी العربية",
    "🙂👩\u200d👩\u200d👧\u200d👦🇰🇷 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff",
    "\u0085\u2028\u2029\u3000 unusual spaces \u00a0",
    "x" * 1000 + " " * 1000 + "\n" * 1000,
    *SPECIAL_TOKENS,
    "text <|endoftext|> text<|im_start|>user<|im_end|>",
    "".join(map(chr, range(0x100))),
)


def audit_tokenizer(
    tokenizer: PreTrainedTokenizerFast, texts_by_source: Mapping[str, Iterable[str]], compare: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure a tokenizer on texts, and other tokenizers (names or paths) on the same ones.

    Returns:
        `ok` (every round trip exact and no byte missing), `vocab_size`, `tokenizer_sha256`, `sources`
        {name: {documents, bytes, tokens, bytes_per_token}}, `bytes_per_token` (all sources), `missing_bytes` (byte
        values without a token), `round_trip_failures` (strings), `unused_tokens` (their number on these texts),
        `unused_examples`, `compare` {name: {vocab_size, bytes_per_token, sources {name: bytes_per_token}}}.

    Raises:
        TokenizerError: a tokenizer to compare with cannot be loaded, or there is no text.
    """
    own = _Measure(tokenizer)
    others = {name: _Measure(load_tokenizer(name)) for name in compare}
    failures: list[str] = []
    sizes: dict[str, dict[str, int]] = {}
    for source, texts in texts_by_source.items():
        sizes[source] = {"documents": 0, "bytes": 0}
        for batch in _batches(texts):
            sizes[source]["documents"] += len(batch)
            sizes[source]["bytes"] += sum(len(text.encode()) for text in batch)
            encoded = own.add(source, batch)
            pairs = zip(batch, encoded, strict=True)
            failures += [text[:200] for text, ids in pairs if _decode(tokenizer, ids) != text]
            for other in others.values():
                other.add(source, batch)
    if not own.tokens.total():
        raise TokenizerError("the texts to audit on are empty. Name a source that holds text.")
    missing = missing_bytes(tokenizer)
    failures += round_trip_failures(tokenizer, own.encoder)
    unused = _unused_tokens(tokenizer, own.used)
    ratios = own.bytes_per_token(sizes)
    return {
        "ok": not missing and not failures,
        "vocab_size": vocabulary_size(tokenizer),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "bytes_per_token": own.total_bytes_per_token(sizes),
        "sources": {
            source: {**size, "tokens": own.tokens[source], "bytes_per_token": ratios[source]}
            for source, size in sizes.items()
        },
        "missing_bytes": missing,
        "round_trip_failures": failures,
        "unused_tokens": len(unused),
        "unused_examples": unused[:20],
        "compare": {
            name: {
                "vocab_size": vocabulary_size(other.tokenizer),
                "bytes_per_token": other.total_bytes_per_token(sizes),
                "sources": other.bytes_per_token(sizes),
            }
            for name, other in others.items()
        },
    }


class _Measure:
    """Tokens by source, and which tokens occurred, of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.encoder = FastEncoder(tokenizer)
        self.tokens: Counter[str] = Counter()
        self.used = np.zeros(vocabulary_size(tokenizer), dtype=bool)

    def add(self, source: str, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode and count `texts`; returns their ids."""
        encoded = self.encoder.encode_batch(texts)
        self.tokens[source] += sum(map(len, encoded))
        for ids in encoded:
            self.used[ids] = True
        return encoded

    def bytes_per_token(self, sizes: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
        """By source; 0 for a source without text."""
        return {source: size["bytes"] / max(self.tokens[source], 1) for source, size in sizes.items()}

    def total_bytes_per_token(self, sizes: Mapping[str, Mapping[str, int]]) -> float:
        """Over all sources."""
        return sum(size["bytes"] for size in sizes.values()) / self.tokens.total()


def missing_bytes(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Byte values, of all 256, that no token spells alone: text that holds one would lose it.

    Raises:
        TokenizerError: the tokenizer is not byte-level.
    """
    spelled = set(token_bytes(tokenizer).values())
    return [byte for byte in range(256) if bytes([byte]) not in spelled]


def round_trip_failures(tokenizer: PreTrainedTokenizerFast, encoder: FastEncoder | None = None) -> list[str]:
    """Of the hostile strings, those that decoding does not give back exactly, or that yield a special id."""
    encoder = encoder or FastEncoder(tokenizer)
    special = special_ids(backend_json(tokenizer))
    encoded = encoder.encode_batch(HOSTILE_STRINGS)
    return [
        text
        for text, ids in zip(HOSTILE_STRINGS, encoded, strict=True)
        if _decode(tokenizer, ids) != text or special.intersection(ids.tolist())
    ]


def _decode(tokenizer: PreTrainedTokenizerFast, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _unused_tokens(tokenizer: PreTrainedTokenizerFast, used: np.ndarray) -> list[str]:
    """Spelling of each ordinary token that no text used, by id; single bytes are there for safety and do not count."""
    if not is_byte_level(backend_json(tokenizer)):
        return [str(tokenizer.convert_ids_to_tokens(int(id_))) for id_ in np.flatnonzero(~used)]
    spelled = token_bytes(tokenizer)
    return [
        spelled[id_].decode("utf-8", "backslashreplace")
        for id_ in sorted(spelled)
        if not used[id_] and len(spelled[id_]) > 1
    ]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, BATCH)):
        yield batch
