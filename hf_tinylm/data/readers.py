"""Read one file in chunks; memory is one chunk, one row group or one large record."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError
from .chunks import CHUNK_BYTES, CHUNK_DOCUMENTS, Chunk, Skipped
from .splitters import find_splitter, split_text
from .utf8 import BLOCK_BYTES, BYTE_ORDER_MARK, refuse_utf16, valid_blocks

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_ROWS = 256


class ReadBytes:
    """Bytes of the files read so far, compressed as they are: what a progress bar can know."""

    def __init__(self) -> None:
        self.before = 0
        self.file: IO[bytes] | None = None

    def now(self) -> int:
        """Bytes read, over all files opened with this counter."""
        return self.before + (0 if self.file is None or self.file.closed else self.file.tell())


def read_text(path: Path, splitter: str | None, utf8: str, read: ReadBytes, cut_large: bool = False) -> Iterator[Chunk]:
    """Documents of a text file: the whole file, its `lines`, or `paragraphs_N` of about N bytes.

    With `cut_large`, each piece of a document above `CHUNK_BYTES` is a chunk of its own.

    Lines that are not UTF-8 go by the policy `utf8`; offsets of documents count the bytes that remain.

    Raises:
        DataError: the file is damaged, or not UTF-8 under the policy strict (with the offset of the first bad byte).
        ConfigError: the splitter is unknown.
    """
    rule, skipped = find_splitter(splitter), Skipped()
    with open_binary(path, read) as file:
        pieces: list[tuple[int, bytes]] = []
        size, continues = 0, False

        def chunk(part: bool = False) -> Chunk:
            made = Chunk("text", str(path), b"".join(piece for _, piece in pieces), part=part, continues=continues)
            made.pieces = [(offset, len(piece)) for offset, piece in pieces]
            made.skipped, made.read = skipped.take(), read.now()
            return made

        for offset, piece, goes_on in split_text(valid_blocks(file, str(path), utf8, skipped), rule, 0, cut_large):
            part = continues or goes_on
            if pieces and (part or size + len(piece) > CHUNK_BYTES or len(pieces) == CHUNK_DOCUMENTS):
                yield chunk()
                pieces, size = [], 0
            pieces.append((offset, piece))
            size += len(piece)
            continues = goes_on
            if part:
                yield chunk(part=True)
                pieces, size = [], 0
        yield chunk()


def read_jsonl(path: Path, read: ReadBytes) -> Iterator[Chunk]:
    """Whole lines of a JSONL file.

    Raises:
        DataError: the file is damaged.
    """
    with open_binary(path, read) as file:
        number, offset, rest = 1, 0, b""
        while True:
            block = file.read(BLOCK_BYTES)
            content = rest + block
            if offset == 0:
                refuse_utf16(content, str(path))
            end = content.rfind(b"\n") + 1 if block else len(content)
            payload, rest = content[:end], content[end:]
            start = len(BYTE_ORDER_MARK) if offset == 0 and payload.startswith(BYTE_ORDER_MARK) else 0
            if payload:
                yield Chunk("jsonl", str(path), payload[start:], number, offset + start, read=read.now())
            number, offset = number + payload.count(b"\n"), offset + end
            if not block:
                return


def read_parquet(path: Path, columns: Sequence[str], read: ReadBytes) -> Iterator[Chunk]:
    """The given columns (the text first) of a Parquet file.

    Raises:
        DataError: the file is damaged or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            require_columns(str(path), columns, file.schema_arrow.names)
            size, rows, first = path.stat().st_size, max(file.metadata.num_rows, 1), 1
            for batch in file.iter_batches(batch_size=TABLE_ROWS, columns=list(dict.fromkeys(columns))):
                for part in _row_chunks(path, batch, columns, first):
                    part.read = read.before + size * (first - 1) // rows
                    yield part
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({error}).") from error
    read.before += size


def read_arrow(path: Path, columns: Sequence[str], read: ReadBytes) -> Iterator[Chunk]:
    """The given columns (the text first) of an Arrow file, in the file or the stream format.

    Raises:
        DataError: the file is damaged or lacks a column.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            first = 1
            for batch in _arrow_batches(file):
                require_columns(str(path), columns, batch.schema.names)
                for part in _row_chunks(path, batch, columns, first):
                    part.read = read.before + file.tell()
                    yield part
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Arrow file ({error}).") from error
    read.before += path.stat().st_size


def read_tokens(path: Path, separator: int, read: ReadBytes) -> Iterator[Chunk]:
    """Documents of a flat file of uint16 token ids (little-endian), which `separator` stands before, behind or between.

    Raises:
        DataError: the file is damaged, or holds no separator.
    """
    size = path.stat().st_size
    if size % 2:
        raise DataError(f"{path} has {size:,} bytes, which is no whole number of uint16 ids. Check that it is whole.")
    found = False
    with open_binary(path, read) as file:
        offset, rest = 0, np.empty(0, "<u2")
        while True:
            block = np.frombuffer(file.read(BLOCK_BYTES), "<u2")
            ids = np.concatenate([rest, block])
            ends = np.flatnonzero(ids == separator)
            found = found or len(ends) > 0
            end = len(ids) if not len(block) else int(ends[-1]) + 1 if len(ends) else 0
            if end:
                yield _token_chunk(path, ids[:end], ends, offset, read)
            rest, offset = ids[end:], offset + end
            if not len(block):
                break
    if not found:
        raise DataError(
            f"{path} holds no separator id {separator}, so where its documents end is unknown. Check encoded_with, and "
            f"that its ids are uint16."
        )


def _token_chunk(path: Path, ids: np.ndarray, ends: np.ndarray, offset: int, read: ReadBytes) -> Chunk:
    """The documents between separators, without these; nothing between two separators is no document."""
    starts, stops = np.concatenate([[0], ends + 1]), np.concatenate([ends, [len(ids)]])
    spans = [(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True) if stop > start]
    payload = b"".join(ids[start:stop].tobytes() for start, stop in spans)
    pieces = [(offset + start, stop - start) for start, stop in spans]
    return Chunk("ids", str(path), payload, offset=offset, pieces=pieces, read=read.now())


@contextmanager
def open_binary(path: Path, read: ReadBytes | None = None) -> Iterator[IO[bytes]]:
    """Open a file, decompressed when its name ends in .xz, .gz or .zst.

    Raises:
        DataError: it cannot be opened, or ends or breaks inside its compressed stream.
    """
    read = read or ReadBytes()
    try:
        with open(path, "rb") as raw:
            read.file = raw
            with _decompressed(raw, path.suffix) as file:
                yield file
                read.before, read.file = read.now(), None  # before it is closed: a closed file tells no place
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}. Check that the file is whole and readable.") from error


def _decompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".xz":
        return lzma.open(raw, "rb")
    if suffix == ".gz":
        return gzip.open(raw, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        import pyarrow as pa

        return pa.CompressedInputStream(raw, "zstd")
    return raw


def _arrow_batches(file: Any) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(file)
    except pa.ArrowInvalid:  # not the file format: a stream has no magic of its own
        file.seek(0)
        yield from pa.ipc.open_stream(file)
        return
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _row_chunks(path: Path, batch: pa.RecordBatch, columns: Sequence[str], first: int) -> Iterator[Chunk]:
    """Slices of a record batch of about `CHUNK_BYTES`, each as an Arrow stream of its own."""
    import pyarrow as pa

    wanted = batch.select(list(dict.fromkeys(columns)))
    rows = min(CHUNK_DOCUMENTS, max(1, wanted.num_rows * CHUNK_BYTES // max(wanted.nbytes, 1)))
    for start in range(0, wanted.num_rows, rows):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, wanted.schema) as writer:
            writer.write_batch(wanted.slice(start, rows))
        yield Chunk("rows", str(path), sink.getvalue().to_pybytes(), first + start)


def require_columns(where: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse data that lacks one of the columns (the text first) that a source reads.

    Raises:
        DataError: naming the column, those there are, and the setting.
    """
    for position, column in enumerate(columns):
        if column not in names:
            setting = "text_column" if position == 0 else "language_column or licence_column"
            raise DataError(f"{where} has no column {column}; its columns are {', '.join(names)}. Set {setting}.")
