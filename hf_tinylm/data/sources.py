"""Documents from text files, JSONL, Parquet and `datasets` names, one at a time, with what was skipped counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from ..config import SourceSection
from ..errors import DataError
from ..files import bundled
from . import readers
from .readers import Record

BUNDLED_PREFIX = "bundled:"
COMPRESSIONS = (".xz", ".gz", ".zst")
FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Document:
    """One text of a source; `place` says where it was read (file and line, row or byte), for people."""

    text: str
    source: str
    place: str


@dataclass
class Skipped:
    """Records without text, counted by reason: empty, white_space, null, missing. `first` is where each began."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Count one record."""
        self.counts[reason] += 1
        self.first.setdefault(reason, place)


def read_documents(source: SourceSection, skipped: Skipped) -> Iterator[Document]:
    """The documents of a source, in the order of its files; what has no text is counted in `skipped`.

    Raises:
        DataError: a file is missing or damaged, is not UTF-8, or has another shape than the source says; the message
            names the file and the line, row or byte.
    """
    kept = 0
    for record in _records(source):
        text = record.text
        reason = _why_skip(text)
        if reason is not None:
            skipped.add(reason, record.place)
            continue
        if not isinstance(text, str):
            raise DataError(
                f"{record.place}: {source.text_column} is {type(text).__name__}, not text. Name the column that holds "
                f"the text: text_column."
            )
        _require_unicode(text, record.place)
        yield Document(text, source.name, record.place)
        kept += 1
        if kept == source.max_documents:
            return


def source_files(source: SourceSection) -> list[tuple[Path, str]]:
    """Files of a source with the format of each, sorted by path; empty for a `datasets` name.

    Raises:
        DataError: the file, folder or pattern holds nothing that can be read.
    """
    if source.format == "datasets":
        return []
    paths = _find_paths(source)
    if not paths and source.format == "auto" and _may_be_hub_name(source.path):
        return []
    if not paths:
        raise DataError(
            f"source {source.name}: {source.path} does not exist or holds no .txt, .md, .jsonl or .parquet file. "
            f"Correct the path, or give format: datasets for a dataset of the Hub."
        )
    if source.format == "auto":
        return [(path, _format_of(path.name) or "text") for path in paths]
    return [(path, source.format) for path in paths]


def _records(source: SourceSection) -> Iterator[Record]:
    files = source_files(source)
    if source.splitter is not None and (not files or any(format_ != "text" for _, format_ in files)):
        raise DataError(f"source {source.name}: splitter {source.splitter} is for text files only. Leave it out.")
    if not files:
        yield from readers.read_hub_dataset(source.path, source.config, source.split, source.text_column)
    for path, format_ in files:
        if format_ == "text":
            yield from readers.read_text(path, source.splitter)
        elif format_ == "jsonl":
            yield from readers.read_jsonl(path, source.text_column)
        else:
            yield from readers.read_parquet(path, source.text_column)


def _find_paths(source: SourceSection) -> list[Path]:
    if source.path.startswith(BUNDLED_PREFIX):
        return [bundled("recipes", "corpora", source.path.removeprefix(BUNDLED_PREFIX))]
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        wanted = None if source.format == "auto" else source.format
        found = [file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)]
        return sorted(
            file for file in found if _format_of(file.name) in ({wanted} if wanted else set(FORMATS.values()))
        )
    if has_magic(str(path)):
        return sorted(Path(name) for name in glob(str(path), recursive=True) if Path(name).is_file())
    return []


def _may_be_hub_name(path: str) -> bool:
    """Whether `owner/name` can be meant for the Hub: not when it reads as a file, or when `owner` is a folder here."""
    return bool(_HUB_NAME.fullmatch(path)) and _format_of(path) is None and not Path(path).parent.exists()


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _format_of(name: str) -> str | None:
    """Format that the end of a file's name says, below its compression."""
    path = Path(name)
    while path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
    return FORMATS.get(path.suffix)


def _why_skip(text: Any) -> str | None:
    if text is readers.MISSING:
        return "missing"
    if text is None:
        return "null"
    if text == "":
        return "empty"
    return "white_space" if isinstance(text, str) and not text.strip() else None


def _require_unicode(text: str, place: str) -> None:
    """A JSON escape such as backslash-u-d800 is half a character; no UTF-8 text can hold it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: U+{ord(text[error.start]):04X} at character {error.start:,} of the text is half a surrogate "
            f"pair, which is not valid Unicode. Remove it from the source."
        ) from error
