"""Read one file, or one dataset of the Hub, record by record; memory is one record or one batch of rows."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import ConfigError, DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_ROWS = 1024
_PARAGRAPHS = re.compile(r"paragraphs_([1-9]\d*)")


class _Missing:
    """Type of `MISSING`: a row without the text column, as distinct from one whose text is null."""


MISSING = _Missing()


@dataclass(frozen=True)
class Record:
    """What a row or piece of a file holds as text (any value, `MISSING` included), and where it stands."""

    text: Any
    place: str


def read_text(path: Path, splitter: str | None = None) -> Iterator[Record]:
    """Documents of a text file: the whole file, its `lines`, or `paragraphs_N` of about N bytes.

    Raises:
        DataError: the file is damaged or not UTF-8 (with the offset of the first bad byte).
        ConfigError: the splitter is unknown.
    """
    pieces = _split_pieces(splitter)
    with open_binary(path) as file:
        for offset, piece in pieces(_without_mark(file)):
            yield Record(_decode(piece, path, offset), f"{path} at byte {offset:,}")


def read_jsonl(path: Path, text_column: str) -> Iterator[Record]:
    """The value of `text_column` of each line of a JSONL file; blank lines are passed over.

    Raises:
        DataError: the file is damaged, or a line is not UTF-8 or not a JSON object.
    """
    with open_binary(path) as file:
        for number, (offset, line) in enumerate(_without_mark(file), start=1):
            if not line.strip():
                continue
            place = f"{path} line {number:,}"
            try:
                row = json.loads(_decode(line, path, offset))
            except json.JSONDecodeError as error:
                raise DataError(f"{place} is not valid JSON ({error}). One JSON object per line is needed.") from error
            if not isinstance(row, dict):
                raise DataError(f"{place} is a JSON {type(row).__name__}; one JSON object per line is needed.")
            yield Record(row.get(text_column, MISSING), place)


def read_parquet(path: Path, text_column: str) -> Iterator[Record]:
    """The value of `text_column` of each row of a Parquet file.

    Raises:
        DataError: the file is damaged, has no such column, or a text is not UTF-8.
    """
    try:
        with pq.ParquetFile(path) as file:
            if text_column not in file.schema_arrow.names:
                raise _no_column(str(path), text_column, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_column]):
                for value in batch.column(0):
                    number += 1
                    yield Record(_as_python(value, f"{path} row {number:,}"), f"{path} row {number:,}")
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({error}).") from error


def read_hub_dataset(path: str, config: str | None, split: str, text_column: str) -> Iterator[Record]:
    """The value of `text_column` of each row of a dataset by name, streamed.

    Raises:
        DataError: there is no such dataset, configuration, split or column.
    """
    import datasets

    def unreadable(error: Exception) -> DataError:
        reason = " ".join(str(error).split())[:200]
        return DataError(
            f"{path} is no local file, and the dataset of that name could not be read: {reason}. Correct path, "
            f"config or split of the source."
        )

    try:
        rows = datasets.load_dataset(path, config, split=split, streaming=True)
        names = rows.column_names
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise unreadable(error) from error
    if names is not None and text_column not in names:
        raise _no_column(path, text_column, names)
    try:
        for number, row in enumerate(rows, start=1):
            yield Record(row.get(text_column, MISSING), f"{path} row {number:,}")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise unreadable(error) from error


@contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed when its name ends in .xz, .gz or .zst.

    Raises:
        DataError: it cannot be opened, or ends or breaks inside its compressed stream.
    """
    try:
        with _open(path) as file:
            yield file
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}. Check that the file is whole and readable.") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return pa.input_stream(str(path), compression="zstd", buffer_size=2**16)
    return open(path, "rb")


def _without_mark(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with the offset of each; a byte order mark at the start is an encoding sign, not text."""
    offset = 0
    for line in _lines(file):
        start = offset
        offset += len(line)
        if start == 0 and line.startswith(BYTE_ORDER_MARK):
            start, line = len(BYTE_ORDER_MARK), line[len(BYTE_ORDER_MARK) :]
        yield start, line


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines with their ends. Arrow's compressed streams cannot be iterated, so all files are read in blocks."""
    rest: list[bytes] = []
    while block := file.read(2**20):
        *complete, last = block.split(b"\n")
        for line in complete:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        if last:
            rest.append(last)
    if rest:
        yield b"".join(rest)


def _split_pieces(splitter: str | None) -> Any:
    if splitter is None:
        return _whole
    if splitter == "lines":
        return _stripped_lines
    paragraphs = _PARAGRAPHS.fullmatch(splitter)
    if paragraphs is None:
        raise ConfigError(
            f"splitter {splitter!r} is unknown; use lines, paragraphs_N (such as paragraphs_4096), or none."
        )
    size = int(paragraphs[1])
    return lambda lines: _paragraphs(lines, size)


def _whole(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    start, content = None, bytearray()
    for offset, line in lines:
        start = offset if start is None else start
        content += line
    yield start or 0, bytes(content)


def _stripped_lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    for offset, line in lines:
        yield offset, line.rstrip(b"\r\n")


def _paragraphs(lines: Iterable[tuple[int, bytes]], size: int) -> Iterator[tuple[int, bytes]]:
    """Cut at the first blank line after `size` bytes; the blank lines at a cut belong to no document."""
    start, content = 0, bytearray()
    for offset, line in lines:
        blank = not line.strip()
        if blank and len(content) >= size:
            yield start, bytes(content).rstrip(b"\r\n")
            content = bytearray()
        if blank and not content:
            continue
        if not content:
            start = offset
        content += line
    if content:
        yield start, bytes(content).rstrip(b"\r\n")


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not valid UTF-8: byte 0x{content[error.start]:02x} at offset {offset + error.start:,} "
            f"({error.reason}). Convert the file to UTF-8, or remove the bad bytes."
        ) from error


def _as_python(value: pa.Scalar, place: str) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: the text is not valid UTF-8 (byte {error.start:,} of it). Repair the file."
        ) from error


def _no_column(where: str, text_column: str, names: Iterable[str]) -> DataError:
    return DataError(f"{where} has no column {text_column}; its columns are {', '.join(names)}. Set text_column.")
