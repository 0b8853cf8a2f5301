"""Token shards: Arrow files that `datasets.load_from_disk` opens and whose ids are one flat, memory-mapped stream.

    SHARDS/ dataset_dict.json  manifest.json (written last)
            train/       data-00000-of-00002.arrow ... dataset_info.json state.json
            validation/  the same

Each file is an Arrow stream of exactly one record batch, one row per document: `input_ids` (list of uint16, or uint32
when the vocabulary has more than 65,536 tokens) and `source` (string). A row begins with the separator id. One batch
makes the flat values buffer of `input_ids` the token stream of the file, readable without a copy. A document that is
longer than a file continues in the next one as a row that has no separator; no other document is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ConfigError, DataError
from ..files import read_json, sha256_of_file, sha256_of_json

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
UINT16_VOCABULARY = 2**16


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 while every id below `vocab_size` fits in it, else uint32."""
    return np.dtype(np.uint32 if vocab_size > UINT16_VOCABULARY else np.uint16)


def shard_name(split: str, index: int, count: int) -> str:
    """`train/data-00000-of-00002.arrow`: the spelling of `Dataset.save_to_disk`."""
    return f"{split}/data-{index:05d}-of-{count:05d}.arrow"


@dataclass(frozen=True, eq=False)
class Shard:
    """One file: `ids` (L,) is its read-only token stream, row r is `ids[offsets[r]:offsets[r + 1]]`.

    `documents` counts the rows that begin with the separator; a row without one continues a document.
    """

    name: str
    path: Path
    ids: np.ndarray
    offsets: np.ndarray
    sources: pa.Array
    documents: int

    @property
    def rows(self) -> int:
        """Rows of the file: whole documents and pieces of long ones."""
        return len(self.offsets) - 1

    def row_at(self, positions: np.ndarray) -> np.ndarray:
        """Row that holds each position (any shape) of the token stream."""
        # in the type of the offsets: another one would convert all of them at each call
        return np.searchsorted(self.offsets, positions.astype(self.offsets.dtype), side="right") - 1


@dataclass(frozen=True, eq=False)
class Shards:
    """A pack on disk: its manifest and its files, memory-mapped."""

    path: Path
    manifest: dict[str, Any]
    manifest_sha256: str
    train: list[Shard]
    validation: list[Shard]

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer that wrote the pack; every id is below it."""
        return int(self.manifest["vocab_size"])

    @property
    def shards_sha256(self) -> str:
        """Hash of the names, counts and contents of all shards: the same when a pack is prepared again elsewhere."""
        return sha256_of_json({split: self.manifest["splits"][split]["shards"] for split in SPLITS})

    @property
    def documents(self) -> dict[str, int]:
        """Documents of each split."""
        return {
            split: sum(entry["documents"] for entry in self.manifest["splits"][split]["shards"]) for split in SPLITS
        }

    @property
    def tokenizer_sha256(self) -> str:
        """Hash of the tokenizer that wrote the pack, as `tokenization.load.tokenizer_sha256` gives it."""
        return str(self.manifest["tokenizer_sha256"])


def load_shards(path: str | Path, verify: bool = False, splits: Sequence[str] = SPLITS) -> Shards:
    """Open a pack without reading its ids.

    Names, sizes, types and counts are always checked against the manifest. `verify=True` also reads every byte:
    SHA-256 of each file, ids below the vocabulary size, one separator per document. Of a split that is not among
    `splits` no file is looked for.

    Raises:
        DataError: the folder is no pack, or a file differs from the manifest; the message names the file.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    opened: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    for split in splits:
        entries = manifest["splits"][split]["shards"]
        if verify:  # before anything interprets the bytes
            for entry in entries:
                _verify_bytes(folder, entry)
        opened[split] = [_open_shard(folder, entry, manifest) for entry in entries]
        if verify:
            for shard in opened[split]:
                _verify_ids(folder, shard, manifest)
    return Shards(folder, manifest, sha256_of_file(folder / "manifest.json"), opened["train"], opened["validation"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    remake = "Write the pack again: hf-tinylm prepare --config NAME.yaml."
    try:
        manifest = read_json(folder / "manifest.json")
    except ConfigError as error:
        raise DataError(f"{folder} is not a folder of token shards: {error} {remake}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{folder}/manifest.json has format_version {version}; {FORMAT_VERSION} is needed. {remake}")
    expected = id_dtype(manifest["vocab_size"]).name
    if manifest["dtype"] != expected:
        raise DataError(
            f"{folder}/manifest.json says {manifest['dtype']} for {manifest['vocab_size']:,} tokens; {expected} is "
            f"needed. {remake}"
        )
    return dict(manifest)


def _open_shard(folder: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> Shard:
    name, path = entry["name"], folder / entry["name"]
    _verify_size(folder, entry)
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        batches = list(reader)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(folder, name, f"is not a readable Arrow stream ({error})") from error
    if len(batches) != 1:
        raise _damaged(folder, name, f"holds {len(batches)} record batches; exactly one makes a token stream")
    expected = pa.list_(pa.from_numpy_dtype(np.dtype(manifest["dtype"])))
    types = {field.name: field.type for field in reader.schema}
    if types.get("input_ids") != expected or types.get("source") != pa.string():
        raise _damaged(folder, name, f"has columns {types}; input_ids {expected} and source string are needed")
    rows = batches[0].column("input_ids")
    ids, offsets = rows.values.to_numpy(zero_copy_only=True), rows.offsets.to_numpy(zero_copy_only=True)
    if rows.null_count or offsets[0] != 0 or offsets[-1] != len(ids):
        raise _damaged(folder, name, "has rows that do not cover its token stream")
    if len(ids) != entry["ids"] or len(rows) != entry["rows"]:
        raise _damaged(
            folder,
            name,
            f"holds {len(ids):,} ids in {len(rows):,} rows; the manifest says {entry['ids']:,} in {entry['rows']:,}",
        )
    return Shard(name, path, ids, offsets, batches[0].column("source"), entry["documents"])


def _verify_size(folder: Path, entry: dict[str, Any]) -> None:
    path = folder / entry["name"]
    if not path.is_file():
        raise _damaged(folder, entry["name"], "does not exist")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise _damaged(folder, entry["name"], f"has {size:,} bytes; the manifest says {entry['bytes']:,}")


def _verify_bytes(folder: Path, entry: dict[str, Any]) -> None:
    _verify_size(folder, entry)
    digest = sha256_of_file(folder / entry["name"])
    if digest != entry["sha256"]:
        expected = entry["sha256"][:12]
        raise _damaged(folder, entry["name"], f"has SHA-256 {digest[:12]}...; the manifest says {expected}...")


def _verify_ids(folder: Path, shard: Shard, manifest: dict[str, Any]) -> None:
    highest = int(shard.ids.max(initial=0))
    if highest >= manifest["vocab_size"]:
        raise _damaged(folder, shard.name, f"holds id {highest:,}; ids below {manifest['vocab_size']:,} are possible")
    separators = int(np.count_nonzero(shard.ids == manifest["separator"]["id"]))
    if separators != shard.documents:
        raise _damaged(
            folder, shard.name, f"holds {separators:,} separators; the manifest says {shard.documents:,} documents"
        )


def _damaged(folder: Path, name: str, what: str) -> DataError:
    return DataError(f"shard {name} of {folder} {what}. Write the pack again: hf-tinylm prepare --config NAME.yaml.")
