"""Encoded documents of a source on disk, in parts that are whole or absent, so that a second run goes on.

    WORK/NAME-KEY/ 00000.ids   token ids of the part's documents, one after the other, without separators
                   00000.rows  one `encoding.ROW` per document
                   00000.json  written last: counts, and where the source was when the part ended

KEY is a hash of all that decides the ids: the settings of the source, its files, the tokenizer. Parts do not depend on
the mixture, the split or the seed, so changing those encodes nothing again.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import DataError
from ..files import atomic_file, fsync_path, read_json, sha256_of_json, write_json
from ..sections import SourceSection
from .chunks import Chunk, Skipped
from .encoding import ROW, SAMPLE_EVERY, SAMPLE_FIRST, Encoded, halves
from .pipeline_parts import TASK_FILE, task_files
from .records import why_length
from .sources import source_files
from .split import RunningDigest

STAGING_VERSION = 1
# Ids of a part before it is closed: what a killed run may have to encode again.
PART_IDS = 2**22
# What a source is called and how much of it is taken does not change its ids.
_NOT_IN_KEY = ("licence", "tokens", "weight", "epochs")


@dataclass
class Part:
    """A closed part: its files without ending, and its counts."""

    path: Path
    ids: int
    rows: int

    def read_rows(self) -> np.ndarray:
        """The rows (n,) of type `ROW`."""
        return np.fromfile(self.path.with_suffix(".rows"), ROW)


@dataclass
class _LongDocument:
    """A document that arrives in pieces: what is known of it so far."""

    digest: RunningDigest = field(default_factory=RunningDigest)
    place: str = ""
    checksum: int = 0
    ids: int = 0
    bytes: int = 0
    characters: int = 0


class Stage:
    """The parts of one source; opening one that exists goes on after its last whole part.

    `chunks` counts the chunks that are in parts, `documents` the documents (copies included), `skipped` what was not
    used, `done` says that the source has been read to its end.
    """

    def __init__(self, folder: Path, dtype: np.dtype[Any], source: SourceSection) -> None:
        self.folder, self.dtype, self.source = folder, dtype, source
        self.parts: list[Part] = []
        self.chunks = self.documents = self.ids = 0
        self.skipped = Skipped()
        self.done = False
        self._rows: list[np.ndarray] = []
        self._open_ids = 0
        self._file: IO[bytes] | None = None
        self._long: _LongDocument | None = None
        folder.mkdir(parents=True, exist_ok=True)
        while (facts := self._closed_part(len(self.parts))) is not None:
            self.parts.append(Part(self._path(), facts["ids"], facts["rows"]))
            self.chunks, self.documents, self.done = facts["chunks"], facts["documents"], facts["done"]
            self.ids += facts["ids"]
            self.skipped = Skipped.from_json(facts["skipped"])

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Append what a chunk became; chunks come in the order of reading."""
        if self._file is None:
            self._file = open(self._path().with_suffix(".ids"), "wb")  # noqa: SIM115  closed with the part
        self._file.write(encoded.ids.tobytes())
        self._open_ids += len(encoded.ids)
        self.skipped.merge(encoded.skipped)
        rows = self._add_piece(chunk, encoded) if chunk.part else encoded.rows
        self._rows.append(rows)
        self.documents += int(np.count_nonzero(rows["used"]))
        self.chunks += 1
        if self._open_ids >= PART_IDS and not chunk.continues:
            self.close_part()

    def close_part(self, done: bool = False) -> None:
        """Write what is open as a part; `done` when the source is at its end."""
        if self._file is None:
            self._file = open(self._path().with_suffix(".ids"), "wb")  # noqa: SIM115
        path = self._path()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        rows = np.concatenate([np.empty(0, ROW), *self._rows])
        with atomic_file(path.with_suffix(".rows")) as temporary:
            rows.tofile(temporary)
        facts = {
            **{"ids": self._open_ids, "rows": len(rows), "chunks": self.chunks, "documents": self.documents},
            **{"done": done, "skipped": self.skipped.to_json()},
        }
        fsync_path(self.folder)
        write_json(path.with_suffix(".json"), facts)
        self.parts.append(Part(path, self._open_ids, len(rows)))
        self.ids += self._open_ids
        self._file, self._rows, self._open_ids, self.done = None, [], 0, done

    def abandon(self) -> None:
        """Close what is open without making it a part."""
        if self._file is not None:
            self._file.close()

    def _add_piece(self, chunk: Chunk, encoded: Encoded) -> np.ndarray:
        """Count a piece of a long document; its one row comes with its last piece."""
        content = chunk.payload
        text = content.decode("utf-8")
        if self._long is None:
            self._long = _LongDocument(place=f"{chunk.path} at byte {chunk.pieces[0][0]:,}")
        document = self._long
        document.digest.update(text)
        document.checksum = zlib.crc32(content, document.checksum)
        document.ids += len(encoded.ids)
        document.bytes += len(content)
        document.characters += len(text)
        if chunk.continues:
            return np.empty(0, ROW)
        self._long = None
        reason = "white_space" if document.digest.empty else why_length(document.characters, self.source)
        if reason is not None:
            self.skipped.add(reason, document.place)
        row = (*halves(document.digest.digest()), document.checksum, document.ids, document.bytes, reason is None)
        return np.array([row], ROW)

    def _path(self) -> Path:
        return self.folder / f"{len(self.parts):05d}"

    def _closed_part(self, number: int) -> dict[str, Any] | None:
        """The facts of a part that is whole, or None."""
        path = self.folder / f"{number:05d}"
        if not path.with_suffix(".json").is_file():
            return None
        facts: dict[str, Any] = read_json(path.with_suffix(".json"))
        sizes = {".ids": facts["ids"] * self.dtype.itemsize, ".rows": facts["rows"] * ROW.itemsize}
        for suffix, size in sizes.items():
            file = path.with_suffix(suffix)
            if not file.is_file() or file.stat().st_size != size:
                return None
        return facts


class PipelineParts:
    """All parts of a source in the order of tasks, in the place of a finished `Stage`.

    Raises:
        DataError: a task was encoded with another tokenizer, or its files are damaged.
    """

    done = True

    def __init__(self, source: SourceSection, tokenizer_sha256: str, dtype: np.dtype[Any]) -> None:
        self.parts: list[Part] = []
        self.skipped = Skipped()
        self.documents = self.ids = 0
        for path in [path for path in task_files(source) if path.name == TASK_FILE]:
            facts = read_json(path)
            if facts["version"] != STAGING_VERSION or facts["tokenizer_sha256"] != tokenizer_sha256:
                raise DataError(
                    f"source {source.name}: {path.parent} was encoded with the tokenizer "
                    f"{facts['tokenizer_sha256'][:12]}..., the pack is encoded with {tokenizer_sha256[:12]}.... Use "
                    f"that tokenizer for the pack, or run the pipeline again with this one."
                )
            stage = Stage(path.parent, dtype, source)
            if not stage.done:
                raise DataError(f"source {source.name}: {path.parent} is damaged. Run its task of the pipeline again.")
            self.parts += stage.parts
            self.skipped.merge(stage.skipped)
            self.documents += stage.documents
            self.ids += stage.ids

    def abandon(self) -> None:
        """Nothing is open."""


def task_facts(tokenizer_sha256: str, engine: str) -> dict[str, Any]:
    """What `task.json` beside the parts of a pipeline's task says."""
    return {"version": STAGING_VERSION, "tokenizer_sha256": tokenizer_sha256, "engine": engine}


def stage_key(source: SourceSection, tokenizer_sha256: str, engine: str) -> str:
    """A name for all that decides the ids of a source; 16 hexadecimal digits.

    Files are told apart by path, size and time of change.
    """
    settings = {name: value for name, value in dataclasses.asdict(source).items() if name not in _NOT_IN_KEY}
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path, _ in source_files(source)]
    facts = {
        **{"version": STAGING_VERSION, "source": settings, "files": files, "tokenizer": tokenizer_sha256},
        **{"engine": engine, "sample": [SAMPLE_FIRST, SAMPLE_EVERY]},
    }
    return sha256_of_json(facts)[:16]
