"""Write token shards in the format that `shards.py` describes and reads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError
from ..files import sha256_of_file, sha256_of_json, write_json
from .shards import FORMAT_VERSION, SPLITS, id_dtype, shard_name


@dataclass
class _OpenShard:
    """Ids and rows of the file being filled, and the entries of the files already written, of one split."""

    values: np.ndarray
    used: int = 0
    documents: int = 0
    offsets: list[int] = field(default_factory=lambda: [0])
    sources: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def free(self) -> int:
        return len(self.values) - self.used


class ShardWriter:
    """Fill `folder` (new, empty) with a pack, document by document; nothing reads it before `finish`.

    Memory: one file's ids per split.

    Args:
        folder: an empty folder; the caller makes it appear atomically.
        vocab_size: decides the width of an id.
        separator_id: first id of each document.
        shard_ids: most ids of one file.
        sources: names that the manifest lists, those without a document too.
    """

    def __init__(
        self, folder: Path, vocab_size: int, separator_id: int, shard_ids: int, sources: Sequence[str] = ()
    ) -> None:
        if shard_ids < 2:
            raise DataError(f"shard_ids={shard_ids} cannot hold a document; give 2 or more, such as {2**24}.")
        self.folder = folder
        self.vocab_size = vocab_size
        self.separator_id = separator_id
        self.shard_ids = shard_ids
        self.dtype = id_dtype(vocab_size)
        self.sources: dict[str, dict[str, int]] = {name: {"ids": 0, "documents": 0} for name in sources}
        self._splits = {split: _OpenShard(np.empty(shard_ids, self.dtype)) for split in SPLITS}
        for split in SPLITS:
            (folder / split).mkdir()

    def add(self, split: str, source: str, ids: np.ndarray) -> None:
        """Append one document: the separator and `ids` (n,), which hold no separator themselves.

        Raises:
            DataError: an id is outside the vocabulary (a narrowing cast would turn it into another token), or is the
                separator.
        """
        row = np.empty(len(ids) + 1, dtype=np.int64)
        row[0] = self.separator_id
        row[1:] = ids
        self._check(row, source)
        shard = self._splits[split]
        if shard.free < len(row) <= self.shard_ids:
            self._close(split)
        while len(row):
            piece, row = row[: shard.free], row[shard.free :]
            if len(piece):
                self._append(shard, source, piece)
            if len(row):
                self._close(split)
        counts = self.sources.setdefault(source, {"ids": 0, "documents": 0})
        counts["ids"] += len(ids) + 1
        counts["documents"] += 1

    def documents(self, split: str) -> int:
        """Documents added to a split so far."""
        shard = self._splits[split]
        return shard.documents + sum(entry["documents"] for entry in shard.entries)

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write what is buffered, the files that `load_from_disk` reads, and last the manifest, which is returned.

        `facts` are further manifest entries; `facts["sources"]` extends the counts of each source.
        """
        splits: dict[str, Any] = {}
        for split in SPLITS:
            if self._splits[split].offsets[-1]:
                self._close(split)
            entries = self._name_files(split)
            splits[split] = {
                "ids": sum(entry["ids"] for entry in entries),
                "documents": sum(entry["documents"] for entry in entries),
                "shards": entries,
            }
            self._write_state(split, entries)
        write_json(self.folder / "dataset_dict.json", {"splits": list(SPLITS)})
        described = facts.get("sources", {})
        manifest = {
            "format_version": FORMAT_VERSION,
            "ids": sum(splits[split]["ids"] for split in SPLITS),
            "documents": sum(splits[split]["documents"] for split in SPLITS),
            "vocab_size": self.vocab_size,
            "dtype": self.dtype.name,
            **{key: value for key, value in facts.items() if key != "sources"},
            "sources": {name: counts | described.get(name, {}) for name, counts in self.sources.items()},
            "shard_ids": self.shard_ids,
            "splits": splits,
        }
        write_json(self.folder / "manifest.json", manifest)
        return manifest

    def _check(self, row: np.ndarray, source: str) -> None:
        lowest, highest = int(row.min()), int(row.max())
        if lowest < 0 or highest >= self.vocab_size:
            raise DataError(
                f"a document of source {source} has id {lowest if lowest < 0 else highest:,}; ids from 0 to "
                f"{self.vocab_size - 1:,} are possible. Use the tokenizer that this vocabulary size belongs to."
            )
        if np.count_nonzero(row == self.separator_id) != 1:
            raise DataError(
                f"a document of source {source} holds the separator id {self.separator_id}; only the first id of a "
                f"document may be the separator. Encode its text without special tokens."
            )

    def _append(self, shard: _OpenShard, source: str, row: np.ndarray) -> None:
        shard.values[shard.used : shard.used + len(row)] = row
        shard.used += len(row)
        shard.offsets.append(shard.used)
        shard.sources.append(source)
        shard.documents += int(row[0] == self.separator_id)

    def _close(self, split: str) -> None:
        """Write the buffered rows as the next file of the split, under a name that does not know the count yet."""
        shard = self._splits[split]
        path = self.folder / split / f"{len(shard.entries):05d}.arrow"
        rows = pa.ListArray.from_arrays(pa.array(shard.offsets, type=pa.int32()), pa.array(shard.values[: shard.used]))
        batch = pa.record_batch([rows, pa.array(shard.sources, type=pa.string())], schema=self._schema())
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        shard.entries.append(
            {
                "name": path.name,
                "sha256": sha256_of_file(path),
                "bytes": path.stat().st_size,
                "ids": shard.used,
                "documents": shard.documents,
                "rows": len(shard.sources),
            }
        )
        shard.used, shard.documents, shard.offsets, shard.sources = 0, 0, [0], []

    def _name_files(self, split: str) -> list[dict[str, Any]]:
        """Give each file its final name, now that their number is known."""
        entries = self._splits[split].entries
        for index, entry in enumerate(entries):
            final = shard_name(split, index, len(entries))
            os.replace(self.folder / split / entry["name"], self.folder / final)
            entry["name"] = final
        return entries

    def _write_state(self, split: str, entries: list[dict[str, Any]]) -> None:
        """`dataset_info.json` and `state.json`, as `Dataset.save_to_disk` writes them."""
        info = {"citation": "", "description": "", "features": self._features(), "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": Path(entry["name"]).name} for entry in entries],
            "_fingerprint": sha256_of_json([entry["sha256"] for entry in entries])[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        write_json(self.folder / split / "dataset_info.json", info)
        write_json(self.folder / split / "state.json", state)

    def _features(self) -> dict[str, Any]:
        """The columns in the words of `datasets.Features.to_dict`."""
        ids = {"feature": {"dtype": self.dtype.name, "_type": "Value"}, "_type": "List"}
        return {"input_ids": ids, "source": {"dtype": "string", "_type": "Value"}}

    def _schema(self) -> pa.Schema:
        fields = [("input_ids", pa.list_(pa.from_numpy_dtype(self.dtype))), ("source", pa.string())]
        metadata = {"huggingface": json.dumps({"info": {"features": self._features()}})}
        return pa.schema(fields, metadata=metadata)
