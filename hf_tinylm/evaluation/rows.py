"""Rows and documents that are scored: JSON lines, and raw text with the source of each document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..data.chunks import Skipped
from ..data.readers import open_binary
from ..data.records import Document, why_skip
from ..data.sources import read_documents
from ..errors import DataError
from ..sections import SourceSection

_JSONL = (".jsonl", ".ndjson", ".json")


def jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each line that is not empty; `place` is for messages.

    Raises:
        DataError: the file cannot be read, or a line is no JSON object.
    """
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path} line {number:,}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place} is not valid JSON ({error}). One JSON object per line is needed.") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is a JSON {type(row).__name__}; one JSON object per line is needed.")
            yield place, row


def text_documents(paths: Sequence[str], splitter: str | None = None) -> list[Document]:
    """The documents of raw text files, in order, with the source of each.

    A text file is one document, or is cut by `splitter`; its source is its name. A JSON line is a document: its `text`,
    and its `source` where it has one.

    Raises:
        DataError: a file cannot be read, or all of them together hold no text.
    """
    names = [Path(path).name for path in paths]
    found: list[Document] = []
    for path, name in zip(paths, names, strict=True):
        source = name if names.count(name) == 1 else path
        if any(suffix in _JSONL for suffix in Path(path).suffixes):
            found += _json_documents(Path(path), source)
        else:
            found += read_documents(SourceSection(source, path, splitter=splitter), Skipped())
    if not found:
        raise DataError(f"{', '.join(paths)} holds no text to score. Give a file that is not empty.")
    return found


def _json_documents(path: Path, source: str) -> Iterator[Document]:
    for place, row in jsonl_rows(path):
        text = row.get("text")
        if not isinstance(text, str) or not _is_unicode(text):
            raise DataError(f"{place} has no text in the field text. Give rows with a field text of valid Unicode.")
        if why_skip(text) is None:
            yield Document(text, str(row.get("source", source)), place)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True
