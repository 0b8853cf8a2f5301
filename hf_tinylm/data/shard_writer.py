"""Write token shards in the format that `shards.py` describes and reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError
from ..files import atomic_file, read_json, sha256_of_file, sha256_of_json, write_json
from .shards import FORMAT_VERSION, SPLITS, id_dtype, shard_name


@dataclass
class _OpenShard:
    """Ids and rows of the file being filled, and the entries of the files already written, of one split.

    `kept` is the entry of a file that an earlier run finished: it is counted through, not filled again.
    """

    values: np.ndarray
    used: int = 0
    documents: int = 0
    offsets: list[int] = field(default_factory=lambda: [0])
    sources: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Any] | None = None

    @property
    def free(self) -> int:
        return len(self.values) - self.used


class ShardWriter:
    """Fill `folder` with a pack, document by document; nothing reads it before `finish`.

    A folder in which a writer was stopped may be given again with the same documents: files that are whole are kept.
    Memory: one file's ids per split.

    Args:
        folder: a folder of its own; the caller makes it appear atomically.
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
            (folder / split).mkdir(exist_ok=True)
            self._splits[split].kept = self._finished_file(split, 0)

    def add(self, split: str, source: str, ids: np.ndarray) -> None:
        """Append one document: the separator and `ids` (n,), which hold no separator themselves.

        Raises:
            DataError: an id is outside the vocabulary (a narrowing cast would turn it into another token), or is the
                separator.
        """
        self.add_read(split, source, len(ids), lambda: ids)

    def add_read(self, split: str, source: str, count: int, read: Callable[[], np.ndarray]) -> None:
        """Append one document of `count` ids, which are read only when no earlier run has written them.

        Raises:
            DataError: as `add`.
        """
        shard, length = self._splits[split], count + 1
        if shard.free < length <= self.shard_ids:
            self._close(split)
        row, done = None, 0
        while done < length:
            size = min(shard.free, length - done)
            if size and shard.kept is None:
                row = self._row(source, read()) if row is None else row
                shard.values[shard.used : shard.used + size] = row[done : done + size]
            if size:
                self._count(shard, source, size, begins=done == 0)
            done += size
            if done < length:
                self._close(split)
        counts = self.sources.setdefault(source, {"ids": 0, "documents": 0})
        counts["ids"] += length
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

    def _row(self, source: str, ids: np.ndarray) -> np.ndarray:
        row = np.empty(len(ids) + 1, dtype=np.int64)
        row[0] = self.separator_id
        row[1:] = ids
        self._check(row, source)
        return row

    def _count(self, shard: _OpenShard, source: str, size: int, begins: bool) -> None:
        shard.used += size
        shard.offsets.append(shard.used)
        shard.sources.append(source)
        shard.documents += int(begins)

    def _finished_file(self, split: str, index: int) -> dict[str, Any] | None:
        """The entry of a file that an earlier run finished, or None."""
        path = self.folder / split / f"{index:05d}.arrow"
        journal = path.with_suffix(".json")
        if not (path.is_file() and journal.is_file()):
            return None
        entry: dict[str, Any] = read_json(journal)
        return entry if path.stat().st_size == entry["bytes"] and sha256_of_file(path) == entry["sha256"] else None

    def _close(self, split: str) -> None:
        """Write the buffered rows as the next file of the split, under a name that does not know the count yet."""
        shard = self._splits[split]
        path = self.folder / split / f"{len(shard.entries):05d}.arrow"
        counts = {"ids": shard.used, "documents": shard.documents, "rows": len(shard.sources)}
        if shard.kept is None:
            self._write_file(path, shard)
            digest, size = sha256_of_file(path), path.stat().st_size
            entry = {"name": path.name, "sha256": digest, "bytes": size, **counts}
            write_json(path.with_suffix(".json"), entry)
        else:
            entry = shard.kept
            assert {name: entry[name] for name in counts} == counts, f"{path} was written from other documents"
        shard.entries.append(entry)
        shard.used, shard.documents, shard.offsets, shard.sources = 0, 0, [0], []
        shard.kept = self._finished_file(split, len(shard.entries))

    def _write_file(self, path: Path, shard: _OpenShard) -> None:
        # From buffers: pa.array would import pandas, which takes longer than writing the file.
        ids = pa.Array.from_buffers(
            pa.from_numpy_dtype(self.dtype), shard.used, [None, pa.py_buffer(shard.values[: shard.used])]
        )
        offsets = pa.py_buffer(np.array(shard.offsets, np.int32))
        rows = pa.Array.from_buffers(pa.list_(ids.type), len(shard.sources), [None, offsets], children=[ids])
        batch = pa.record_batch([rows, _string_array(shard.sources)], schema=self._schema())
        with (
            atomic_file(path) as temporary,
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_stream(sink, batch.schema) as writer,
        ):
            writer.write_batch(batch)

    def _name_files(self, split: str) -> list[dict[str, Any]]:
        """Give each file its final name, now that their number is known."""
        entries = self._splits[split].entries
        for journal in (self.folder / split).glob("[0-9]*.json"):
            journal.unlink()
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


def _string_array(values: Sequence[str]) -> pa.Array:
    encoded = [value.encode("utf-8") for value in values]
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in encoded])]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.string(), len(encoded), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    )
