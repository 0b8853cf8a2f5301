"""Encode a chunk: its documents as ids, each with the digests that tell copies, splits and order; and the worker.

`python -m hf_tinylm.data.encoding` is a worker process: it reads chunks from standard input and writes what became of
them to standard output until its input ends, which is also how it learns that its parent died.
"""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..errors import DataError, TinyLMError
from ..sections import SourceSection
from ..tokenization.encoder import FastEncoder
from ..tokenization.load import parse_backend, vocabulary_size
from .chunks import Chunk, Skipped
from .frames import read_frame, write_frame
from .records import documents_of, why_length, why_skip
from .shards import id_dtype
from .split import content_digest

# One row per document. `high` and `low` are the first two 64-bit halves of its content digest: `high` decides the
# split, `low` its place in a shuffle, and both together whether it is a copy. (128 bits: two different documents of a
# trillion share them with a probability of about 1e-15.) `checksum` of the exact text orders copies that differ in
# white space. `ids` counts without the separator. A row that is not `used` only covers ids that were dropped.
ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("checksum", "<u4"), ("ids", "<u8"), ("bytes", "<u8"), ("used", "u1")])
# Documents encoded a second time by `tokenizers` and compared: the first ones of a source, then one in so many.
SAMPLE_FIRST, SAMPLE_EVERY = 32, 256


class EngineMismatch(Exception):
    """The fast engine gave other ids than `tokenizers` on a document of the sample."""


@dataclass
class Encoded:
    """What became of a chunk: `rows` (n,) of type `ROW`, `ids` of all its documents, and what was not used."""

    rows: np.ndarray
    ids: np.ndarray
    skipped: Skipped


class ChunkEncoder:
    """Encode chunks of the given sources with one tokenizer; `separator_id` must not come out of any text."""

    def __init__(self, sources: Sequence[SourceSection], encoder: FastEncoder, vocab_size: int, separator_id: int):
        self.sources = sources
        self.encoder = encoder
        self.vocab_size = vocab_size
        self.separator_id = separator_id
        self.dtype = id_dtype(vocab_size)

    def encode(self, chunk: Chunk, source: int, first: bool, limit: int | None = None) -> Encoded:
        """Encode a chunk of source number `source`, its `first` one or a later one, `limit` documents at most.

        Raises:
            DataError: a record cannot be used.
            EngineMismatch: a document of the sample has other ids in `tokenizers`.
        """
        skipped = Skipped()
        skipped.merge(chunk.skipped)
        if chunk.kind == "ids":
            documents, encoded = self._token_documents(chunk, source, skipped, limit)
        else:
            documents = self._text_documents(chunk, source, skipped, limit)
            encoded = self.encoder.encode_batch([text for text, _ in documents])
        rows = np.zeros(len(documents), ROW)
        for number, ((text, place), ids) in enumerate(zip(documents, encoded, strict=True)):
            content = text.encode("utf-8")
            checksum = zlib.crc32(content)
            sampled = chunk.kind != "ids" and ((first and number < SAMPLE_FIRST) or checksum % SAMPLE_EVERY == 0)
            if sampled and self.encoder.engine != "tokenizers" and self.encoder.differs(text, ids):
                raise EngineMismatch(f"{self.encoder.engine} gives other ids than tokenizers on {place}.")
            high, low = (0, 0) if chunk.part else halves(content_digest(text))
            rows[number] = (high, low, checksum, len(ids), len(content), not chunk.part)
        flat = np.concatenate(encoded) if encoded else np.empty(0, np.uint32)
        self._check(flat, self.sources[source].name)
        return Encoded(rows, flat.astype(self.dtype), skipped)

    def _text_documents(self, chunk: Chunk, source: int, skipped: Skipped, limit: int | None) -> list[tuple[str, str]]:
        """(text, place) of each document, or of the one piece of a large document."""
        if chunk.part:
            return [(chunk.payload.decode("utf-8"), f"{chunk.path} at byte {chunk.pieces[0][0]:,}")]
        documents = documents_of(chunk, self.sources[source], skipped)
        return [(document.text, document.place) for document in itertools.islice(documents, limit)]

    def _token_documents(
        self, chunk: Chunk, source: int, skipped: Skipped, limit: int | None
    ) -> tuple[list[tuple[str, str]], list[np.ndarray]]:
        """(text, place) and ids of each document of a token file; the text tells whether it is a copy."""
        section, flat = self.sources[source], np.frombuffer(chunk.payload, "<u2")
        self._check(flat, section.name)
        documents: list[tuple[str, str]] = []
        encoded: list[np.ndarray] = []
        position = 0
        for offset, size in chunk.pieces:
            ids, place = flat[position : position + size], f"{chunk.path} at id {offset:,}"
            position += size
            text = self.encoder.decode(ids)
            reason = why_skip(text) or why_length(len(text), section)
            if reason is not None:
                skipped.add(reason, place)
            elif limit is None or len(documents) < limit:
                documents.append((text, place))
                encoded.append(ids)
        return documents, encoded

    def _check(self, ids: np.ndarray, source: str) -> None:
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise DataError(
                f"a document of source {source} has id {int(ids.max()):,}; ids from 0 to {self.vocab_size - 1:,} are "
                f"possible. Use the tokenizer that it was encoded with."
            )
        if np.any(ids == self.separator_id):
            raise DataError(
                f"a document of source {source} holds the separator id {self.separator_id}, which only stands between "
                f"documents. Use a tokenizer whose separator is no ordinary token."
            )


def halves(digest: bytes) -> tuple[int, int]:
    """The first two 64-bit numbers of a content digest."""
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def run_worker() -> None:
    """Serve the process at the other end of standard input and output until it closes or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    logging.disable(logging.WARNING)  # it has said what there is to say of the tokenizer
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    opening = read_frame(source)
    if opening is None:
        return
    facts, (tokenizer_json,) = opening
    tokenizer = parse_backend(tokenizer_json.decode("utf-8"), "the worker's tokenizer")
    encoder = FastEncoder(tokenizer, facts["engine"])
    sections = [SourceSection(**section) for section in facts["sources"]]
    chunks = ChunkEncoder(sections, encoder, vocabulary_size(tokenizer), facts["separator_id"])
    while (message := read_frame(source)) is not None:
        header, (payload,) = message
        try:
            write_frame(sink, *_answer(chunks, header, payload))
        except BrokenPipeError:
            return


def _answer(chunks: ChunkEncoder, header: dict[str, Any], payload: bytes) -> tuple[Any, ...]:
    try:
        chunk = chunk_from_json(header["chunk"], payload)
        encoded = chunks.encode(chunk, header["source"], header["first"])
    except EngineMismatch as mismatch:
        return ({"mismatch": str(mismatch)},)
    except TinyLMError as error:
        return ({"error": str(error), "data": isinstance(error, DataError)},)
    return {"skipped": encoded.skipped.to_json()}, encoded.rows.tobytes(), encoded.ids.tobytes()


def chunk_to_json(chunk: Chunk) -> dict[str, Any]:
    """All of a chunk but its payload, as plain values."""
    values = {name: value for name, value in vars(chunk).items() if name not in ("payload", "skipped")}
    return {**values, "skipped": chunk.skipped.to_json()}


def chunk_from_json(values: dict[str, Any], payload: bytes) -> Chunk:
    """What `chunk_to_json` wrote."""
    pieces = [(offset, size) for offset, size in values["pieces"]]
    return Chunk(**{**values, "payload": payload, "pieces": pieces, "skipped": Skipped.from_json(values["skipped"])})


def opening_frame(sources: Sequence[SourceSection], engine: str, separator_id: int) -> dict[str, Any]:
    """What a worker is told before its first chunk."""
    return {"sources": [asdict(section) for section in sources], "engine": engine, "separator_id": separator_id}


if __name__ == "__main__":
    run_worker()
