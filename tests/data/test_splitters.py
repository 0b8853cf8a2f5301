"""Pieces of large documents: together they are the document, and their ids are the ids of the whole."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hf_tinylm.data import splitters
from hf_tinylm.data.splitters import find_splitter, split_text
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.train import train_tokenizer


def blocks(content: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


def documents(content: bytes, splitter: str | None, size: int) -> list[bytes]:
    found, parts = [], []
    for _, piece, continues in split_text(blocks(content, size), find_splitter(splitter)):
        parts.append(piece)
        if not continues:
            found.append(b"".join(parts))
            parts = []
    assert not parts
    return found


def paragraphs_by_line(content: bytes, size: int) -> list[bytes]:
    """The rule in its plainest words."""
    found, document = [], b""
    for line in content.splitlines(keepends=True):
        if not line.strip():
            if len(document) >= size:
                found.append(document.rstrip(b"\r\n"))
                document = b""
            if not document:
                continue
        document += line
    return [*found, document.rstrip(b"\r\n")] if document else found


@pytest.fixture
def noise() -> bytes:
    rng = random.Random(3)
    return b"".join(rng.choices([b"word", b" ", b"\n", b"\n\n", b" \n", b"a, b.", b"\t"], k=3000))


@pytest.mark.parametrize("block", [1, 7, 100, 10**6])
@pytest.mark.parametrize("piece", [16, 10**6])
def test_blocks_and_pieces_change_no_document(
    block: int, piece: int, noise: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitters, "CHUNK_BYTES", piece)
    assert documents(noise, None, block) == [noise]
    assert documents(noise, "lines", block) == noise.removesuffix(b"\n").split(b"\n")
    for size in (1, 50, 400):
        assert documents(noise, f"paragraphs_{size}", block) == paragraphs_by_line(noise, size)


def test_places_are_offsets_of_the_file(noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitters, "CHUNK_BYTES", 20)
    for splitter in (None, "lines", "paragraphs_50"):
        for offset, piece, _ in split_text(blocks(noise, 33), find_splitter(splitter), offset=1000):
            assert noise[offset - 1000 :].startswith(piece)


PARTS = [
    "the",
    "sea",
    "né",
    "소리",
    "42",
    "don't",
    "I'LL",
    ".",
    "!?",
    ",",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One whose merges reach over everything that the split leaves together, such as a full stop and line feeds."""
    rng = random.Random(4)
    return train_tokenizer(["".join(rng.choices(PARTS, k=400)) for _ in range(200)], 1000)[0]


@pytest.mark.parametrize("engine", ["tiktoken", "tokenizers"])
def test_ids_of_pieces_joined_are_the_ids_of_the_document(
    engine: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = FastEncoder(tokenizer, engine)
    rng = random.Random(5)
    cuts = 0
    for _ in range(50):
        text = "".join(rng.choices(PARTS, k=400))
        monkeypatch.setattr(splitters, "CHUNK_BYTES", rng.randrange(5, 80))
        pieces = [piece.decode() for _, piece, _ in split_text([text.encode()], find_splitter(None))]
        cuts += len(pieces)
        assert np.array_equal(np.concatenate(encoder.encode_batch(pieces)), encoder.encode_batch([text])[0])
    assert cuts > 500


def test_a_word_without_an_end_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitters, "CHUNK_BYTES", 10)
    found = list(split_text(blocks(b"a" * 95 + b" b", 9), find_splitter(None)))
    assert [(offset, len(piece), continues) for offset, piece, continues in found] == [(0, 95, True), (95, 2, False)]
