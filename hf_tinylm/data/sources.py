"""The files of a source, and its documents from text, JSONL, Parquet, Arrow and `datasets` names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from glob import glob, has_magic
from pathlib import Path

from ..errors import DataError
from ..files import bundled
from ..sections import SourceSection
from ..tokenization.load import load_backend, separator_id
from . import hub, readers
from .chunks import Chunk, Skipped
from .pipeline_parts import task_files
from .readers import ReadBytes
from .records import Document, documents_of, filter_columns

BUNDLED_PREFIX = "bundled:"
COMPRESSIONS = (".xz", ".gz", ".zst")
FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
}
# A .bin file in a folder may be anything; token files are asked for by name or format.
_IN_FOLDERS = set(FORMATS.values()) - {"tokens"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def read_documents(source: SourceSection, skipped: Skipped) -> Iterator[Document]:
    """The documents of a source, in the order of its files; what is not used is counted in `skipped`.

    Raises:
        DataError: a file is missing or damaged, is not UTF-8 under the policy strict, or has another shape than the
            source says; the message names the file and the line, row or byte.
    """
    kept = 0
    for chunk in read_chunks(source):
        skipped.merge(chunk.skipped)
        for document in documents_of(chunk, source, skipped):
            yield document
            kept += 1
            if kept == source.max_documents:
                return


def read_chunks(source: SourceSection, read: ReadBytes | None = None, cut_large: bool = False) -> Iterator[Chunk]:
    """The input of a source in chunks, in the order of its files.

    `read` is told how much has been read; with `cut_large`, large documents of text files come in pieces.

    Raises:
        DataError: a file is missing or damaged, or a setting does not fit its format.
    """
    files, read = source_files(source), read or ReadBytes()
    formats = {format_ for _, format_ in files} or {"datasets"}
    if source.splitter is not None and formats != {"text"}:
        raise DataError(f"source {source.name}: splitter {source.splitter} is for text files only. Leave it out.")
    if formats == {"parts"}:
        raise DataError(f"source {source.name}: {source.path} is encoded already; only prepare can use it.")
    columns = [source.text_column, *filter_columns(source)]
    if len(columns) > 1 and formats & {"text", "tokens"}:
        raise DataError(f"source {source.name}: text files have no column {columns[1]} to filter by. Leave it out.")
    if not files:
        yield from hub.read_dataset(source, columns)
    for path, format_ in files:
        if format_ == "text":
            yield from readers.read_text(path, source.splitter, source.utf8, read, cut_large)
        elif format_ == "jsonl":
            yield from readers.read_jsonl(path, read)
        elif format_ == "tokens":
            yield from readers.read_tokens(path, _separator_of(source), read)
        elif format_ == "arrow":
            yield from readers.read_arrow(path, columns, read)
        else:
            yield from readers.read_parquet(path, columns, read)


def source_files(source: SourceSection) -> list[tuple[Path, str]]:
    """Files of a source with the format of each, sorted by path; empty for a `datasets` name.

    Raises:
        DataError: the file, folder or pattern holds nothing that can be read.
    """
    if source.format == "datasets":
        return []
    if source.format == "parts":
        return [(path, "parts") for path in task_files(source)]
    paths = _find_paths(source)
    if not paths and source.format == "auto" and _may_be_hub_name(source.path):
        return []
    if not paths:
        raise DataError(
            f"source {source.name}: {source.path} does not exist or holds no .txt, .md, .jsonl, .parquet, "
            f".arrow or .bin file. Correct the path, or give format: datasets for a dataset of the Hub."
        )
    if source.format == "auto":
        return [(path, _format_of(path.name) or "text") for path in paths]
    return [(path, source.format) for path in paths]


def _separator_of(source: SourceSection) -> int:
    """The separator id of the tokenizer that a token source declares.

    Raises:
        DataError: it declares none, or one without a separator.
    """
    if source.encoded_with is None:
        raise DataError(
            f"source {source.name} is a file of token ids, and nothing says whose. Give its tokenizer: "
            f"encoded_with: DIR."
        )
    return separator_id(load_backend(source.encoded_with))


def _find_paths(source: SourceSection) -> list[Path]:
    if source.path.startswith(BUNDLED_PREFIX):
        return [bundled("recipes", "corpora", source.path.removeprefix(BUNDLED_PREFIX))]
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        wanted = None if source.format == "auto" else source.format
        found = [file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)]
        return sorted(file for file in found if _format_of(file.name) in ({wanted} if wanted else _IN_FOLDERS))
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
