"""From a chunk to its documents: JSON, UTF-8, filters; what is not used is counted with its reason and place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..sections import SourceSection
from .chunks import Chunk, Skipped
from .utf8 import decode

if TYPE_CHECKING:
    import pyarrow as pa


class _Missing:
    """Type of `MISSING`: a row without the text column, as distinct from one whose text is null."""


MISSING = _Missing()
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One text of a source; `place` says where it was read (file and line, row or byte), for people."""

    text: str
    source: str
    place: str


@dataclass(frozen=True)
class Row:
    """A record before it is judged: `text` may be of any type, `columns` are those that filters read."""

    text: Any
    place: str
    columns: dict[str, Any]


def documents_of(chunk: Chunk, source: SourceSection, skipped: Skipped) -> Iterator[Document]:
    """The documents of a chunk in order; what is not used is counted in `skipped`.

    Raises:
        DataError: a record has another shape than the source says, or is not UTF-8 and the policy is strict.
    """
    for row in rows_of(chunk, source, skipped):
        reason = why_skip(row.text) or _why_filtered(row.columns, source)
        if reason is None and not isinstance(row.text, str):
            raise DataError(
                f"{row.place}: {source.text_column} is {type(row.text).__name__}, not text. Name the column that "
                f"holds the text: text_column."
            )
        text = row.text if reason else _unicode(row, source, skipped)
        reason = reason or (why_length(len(text), source) if text is not None else None)
        if reason is not None:
            skipped.add(reason, row.place)
        elif text is not None:
            yield Document(text, source.name, row.place)


def why_skip(text: Any) -> str | None:
    """Why a record has no text; None when it has."""
    if text is MISSING:
        return "missing"
    if text is None:
        return "null"
    if text == "":
        return "empty"
    return "white_space" if isinstance(text, str) and text.isspace() else None


def why_length(characters: int, source: SourceSection) -> str | None:
    """Whether a document is too short or too long for its source."""
    if source.min_characters is not None and characters < source.min_characters:
        return "short"
    return "long" if source.max_characters is not None and characters > source.max_characters else None


def filter_columns(source: SourceSection) -> list[str]:
    """Columns besides the text that the filters of a source read."""
    return [column for column in (source.language_column, source.licence_column) if column is not None]


def _why_filtered(columns: dict[str, Any], source: SourceSection) -> str | None:
    if source.language_column is not None and columns.get(source.language_column) not in source.allowed_languages:
        return "language"
    if source.licence_column is not None:
        found = columns.get(source.licence_column)
        given = found if isinstance(found, list) and found else [found]  # a file may carry several; all must be allowed
        if any(licence not in source.allowed_licences for licence in given):
            return "licence"
    return None


def rows_of(chunk: Chunk, source: SourceSection, skipped: Skipped) -> Iterator[Row]:
    """The records of a chunk as they are, whatever the text column holds (`MISSING` where there is none).

    Raises:
        DataError: a line is not valid JSON or not UTF-8, or the chunk holds token ids.
    """
    if chunk.kind == "text":
        position = 0
        for offset, size in chunk.pieces:
            text = chunk.payload[position : position + size].decode("utf-8")
            position += size
            yield Row(text, f"{chunk.path} at byte {offset:,}", {})
    elif chunk.kind == "ids":
        raise DataError(
            f"{chunk.path} holds token ids, not text. It can be a source of prepare, not of training or auditing a "
            f"tokenizer."
        )
    elif chunk.kind == "jsonl":
        yield from _json_rows(chunk, source, skipped)
    else:
        yield from _table_rows(chunk, source, skipped)


def _json_rows(chunk: Chunk, source: SourceSection, skipped: Skipped) -> Iterator[Row]:
    offset = chunk.offset
    for number, line in enumerate(chunk.payload.split(b"\n"), start=chunk.first):
        start, offset = offset, offset + len(line) + 1
        if not line.strip():
            continue
        content = decode(line, source.utf8, chunk.path, start, skipped)
        if content is None:
            continue
        place = f"{chunk.path} {chunk.unit} {number:,}"
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not valid JSON ({error}). One JSON object per line is needed.") from error
        except RecursionError as error:
            raise DataError(f"{place} is JSON nested too deep. One JSON object per line is needed.") from error
        if not isinstance(row, dict):
            raise DataError(f"{place} is a JSON {type(row).__name__}; one JSON object per line is needed.")
        yield Row(row.get(source.text_column, MISSING), place, row)


def _table_rows(chunk: Chunk, source: SourceSection, skipped: Skipped) -> Iterator[Row]:
    """Rows of an Arrow record batch; texts are read as bytes, so that bad ones meet the policy, not an exception."""
    import pyarrow as pa

    batch = pa.ipc.open_stream(chunk.payload).read_next_batch()
    texts = _as_bytes(batch.column(0))
    columns = {name: _strings(batch.column(name)) for name in filter_columns(source)}
    for index, text in enumerate(texts):
        place = f"{chunk.path} row {chunk.first + index:,}"
        if isinstance(text, bytes):
            text = decode(text, source.utf8, place, 0, skipped)
            if text is None:
                continue
        yield Row(text, place, {name: values[index] for name, values in columns.items()})


def _as_bytes(column: pa.Array) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        return list(column.cast(pa.binary()).to_pylist())
    if pa.types.is_large_string(column.type):
        return list(column.cast(pa.large_binary()).to_pylist())
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [value if value is None else bytearray(value) for value in column.to_pylist()]  # no text: an error
    return list(column.to_pylist())


def _strings(column: pa.Array) -> list[Any]:
    import pyarrow as pa

    return list((column.dictionary_decode() if pa.types.is_dictionary(column.type) else column).to_pylist())


def _unicode(row: Row, source: SourceSection, skipped: Skipped) -> str | None:
    """The text; a JSON escape such as backslash-u-d800 is half a character, which the UTF-8 policy decides on."""
    text: str = row.text
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError as error:
        if source.utf8 == "strict":
            raise DataError(
                f"{row.place}: U+{ord(text[error.start]):04X} at character {error.start:,} of the text is half a "
                f"surrogate pair, which is not valid Unicode. Remove it from the source, or set utf8: replace or "
                f"utf8: skip."
            ) from error
    skipped.add_bad([row.place], len(_SURROGATE.findall(text)))
    if source.utf8 == "skip":
        skipped.add("not_utf8", row.place)
        return None
    return _SURROGATE.sub("\ufffd", text)
