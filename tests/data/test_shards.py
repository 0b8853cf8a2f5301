"""The format: `load_from_disk` opens it, the ids of a file are one stream, and no damage goes unnoticed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from hf_tinylm.data.shard_writer import ShardWriter
from hf_tinylm.data.shards import id_dtype, load_shards
from hf_tinylm.errors import DataError
from hf_tinylm.files import sha256_of_file

SEPARATOR = {"token": "<|endoftext|>", "id": 0, "policy": "first id of each document"}


def write(
    folder: Path, documents: Sequence[Sequence[int]], vocab_size: int = 300, shard_ids: int = 2**24
) -> dict[str, Any]:
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size, separator_id=0, shard_ids=shard_ids)
    for number, document in enumerate(documents):
        writer.add("train", f"source{number % 2}", np.array(document))
    writer.add("validation", "source0", np.array([9, 9]))
    return writer.finish({"tokenizer_sha256": "t", "separator": SEPARATOR, "sources": {"source0": {"licence": "MIT"}}})


def rewrite_manifest(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_one_separator_stands_before_each_document_across_shard_borders(tmp_path: Path) -> None:
    """Documents a, b, c in shards of 4 ids: SEP a SEP b | SEP c."""
    manifest = write(tmp_path / "pack", [[5], [6], [7]], shard_ids=4)
    shards = load_shards(tmp_path / "pack", verify=True)
    assert [shard.ids.tolist() for shard in shards.train] == [[0, 5, 0, 6], [0, 7]]
    assert [shard.documents for shard in shards.train] == [2, 1]
    assert manifest["splits"]["train"]["documents"] == 3
    assert manifest["documents"] == sum(int((shard.ids == 0).sum()) for shard in shards.train + shards.validation)


def test_a_document_that_fits_in_a_shard_is_never_cut(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5, 6], [7, 8], [1]], shard_ids=4)
    assert [s.ids.tolist() for s in load_shards(tmp_path / "pack").train] == [[0, 5, 6], [0, 7, 8], [0, 1]]


def test_a_document_longer_than_a_shard_goes_on_without_a_separator(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [11, 12, 13, 14, 15, 16, 17], [6]], shard_ids=4)
    shards = load_shards(tmp_path / "pack", verify=True)
    assert [s.ids.tolist() for s in shards.train] == [[0, 5, 0, 11], [12, 13, 14, 15], [16, 17, 0, 6]]
    assert [(s.documents, s.rows) for s in shards.train] == [(2, 2), (0, 1), (1, 2)]
    assert np.concatenate([s.ids for s in shards.train]).tolist() == [0, 5, 0, *range(11, 18), 0, 6]


def test_load_from_disk_gives_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [6, 7, 8], [9, 10, 11, 12, 13]], shard_ids=4)
    loaded = datasets.load_from_disk(str(tmp_path / "pack"))
    assert isinstance(loaded, datasets.DatasetDict)
    assert list(loaded) == ["train", "validation"]
    assert loaded["train"]["input_ids"][:] == [[0, 5], [0, 6, 7, 8], [0, 9, 10, 11], [12, 13]]
    assert loaded["train"]["source"][:] == ["source0", "source1", "source0", "source0"]
    assert loaded["validation"][:] == {"input_ids": [[0, 9, 9]], "source": ["source0"]}
    assert loaded["train"].features["input_ids"].feature.dtype == "uint16"


def test_each_file_is_one_record_batch_of_the_arrow_stream_format(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[n] * 3 for n in range(1, 200)])
    (shard,) = load_shards(tmp_path / "pack").train
    with pa.memory_map(str(shard.path)) as source:
        assert len(list(pa.ipc.open_stream(source))) == 1
    assert shard.path.name == "data-00000-of-00001.arrow"


def test_ids_are_read_in_place_and_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path / "pack", [list(range(1, 200))])
    before = pa.total_allocated_bytes()
    (shard,) = load_shards(tmp_path / "pack").train
    assert pa.total_allocated_bytes() - before < shard.ids.nbytes
    assert not shard.ids.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        shard.ids[0] = 1


def test_the_row_of_any_position_is_known(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [6, 7], [8]])
    (shard,) = load_shards(tmp_path / "pack").train
    assert shard.row_at(np.array([0, 1, 2, 4, 5, 6])).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    assert id_dtype(vocab_size).name == dtype
    manifest = write(tmp_path / "pack", [[vocab_size - 1]], vocab_size=vocab_size)
    shards = load_shards(tmp_path / "pack", verify=True)
    assert manifest["dtype"] == dtype
    assert shards.train[0].ids.dtype == dtype
    assert shards.train[0].ids.tolist() == [0, vocab_size - 1]


def test_ids_above_65535_do_not_wrap(tmp_path: Path) -> None:
    ids = [65_535, 65_536, 70_000]
    write(tmp_path / "wide", [ids], vocab_size=70_001)
    assert load_shards(tmp_path / "wide", verify=True).train[0].ids.tolist() == [0, *ids]
    with pytest.raises(DataError, match=r"id 70,000; ids from 0 to 65,535"):
        write(tmp_path / "narrow", [ids], vocab_size=65_536)


def test_a_separator_inside_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="separator id 0"):
        write(tmp_path / "pack", [[5, 0, 6]])


def test_the_manifest_accounts_for_every_id(tmp_path: Path) -> None:
    manifest = write(tmp_path / "pack", [[5], [6, 7, 8], [9, 10, 11, 12, 13]], shard_ids=4)
    assert manifest == json.loads((tmp_path / "pack" / "manifest.json").read_text())
    assert manifest["sources"] == {
        "source0": {"ids": 2 + 6 + 3, "documents": 3, "licence": "MIT"},
        "source1": {"ids": 4, "documents": 1},
    }
    assert (manifest["ids"], manifest["documents"], manifest["vocab_size"]) == (15, 4, 300)
    for split in ("train", "validation"):
        for entry in manifest["splits"][split]["shards"]:
            path = tmp_path / "pack" / entry["name"]
            assert (entry["sha256"], entry["bytes"]) == (sha256_of_file(path), path.stat().st_size)
    shards = load_shards(tmp_path / "pack")
    assert shards.manifest_sha256 == sha256_of_file(tmp_path / "pack" / "manifest.json")


def test_the_same_documents_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, [[5], [6, 7, 8], [9, 10, 11, 12, 13]], shard_ids=4)
    assert load_shards(tmp_path / "one").manifest_sha256 == load_shards(tmp_path / "two").manifest_sha256


def test_any_changed_byte_is_noticed_and_its_shard_named(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [6, 7, 8]], shard_ids=4)
    path = tmp_path / "pack" / "train" / "data-00001-of-00002.arrow"
    content = path.read_bytes()
    for position in range(0, len(content), 5):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(DataError, match=r"train/data-00001-of-00002\.arrow"):
            load_shards(tmp_path / "pack", verify=True)
    path.write_bytes(content)
    load_shards(tmp_path / "pack", verify=True)


def test_a_missing_or_shortened_shard_is_named_without_reading_bytes(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [6, 7, 8]], shard_ids=4)
    path = tmp_path / "pack" / "train" / "data-00001-of-00002.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow .* has .* bytes"):
        load_shards(tmp_path / "pack")
    path.unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow .* does not exist"):
        load_shards(tmp_path / "pack")


def test_a_shard_of_several_batches_or_another_width_is_named(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [6]])
    path = tmp_path / "pack" / "train" / "data-00000-of-00001.arrow"

    def replace(ids: pa.DataType, batches: int) -> None:
        rows = pa.array([[0, 5]], type=pa.list_(ids))
        batch = pa.record_batch([rows, pa.array(["source0"])], names=["input_ids", "source"])
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            for _ in range(batches):
                writer.write_batch(batch)
        size = path.stat().st_size
        rewrite_manifest(tmp_path / "pack", lambda m: m["splits"]["train"]["shards"][0].update(bytes=size))

    for ids, batches, message in (
        (pa.uint16(), 2, "2 record batches"),
        (pa.uint32(), 1, "columns"),
        (pa.uint16(), 1, "ids in"),
    ):
        replace(ids, batches)
        with pytest.raises(DataError, match=rf"data-00000-of-00001\.arrow .*{message}"):
            load_shards(tmp_path / "pack")


def test_ids_beyond_the_vocabulary_are_noticed(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[299]])
    rewrite_manifest(tmp_path / "pack", lambda manifest: manifest.update(vocab_size=299))
    with pytest.raises(DataError, match=r"holds id 299; ids below 299"):
        load_shards(tmp_path / "pack", verify=True)


def test_a_wrong_count_of_documents_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "pack", [[5], [6]])
    rewrite_manifest(tmp_path / "pack", lambda m: m["splits"]["train"]["shards"][0].update(documents=3))
    with pytest.raises(DataError, match=r"2 separators; the manifest says 3 documents"):
        load_shards(tmp_path / "pack", verify=True)


def test_a_folder_that_is_no_pack_is_told_how_to_become_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json does not exist.*hf-tinylm prepare"):
        load_shards(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(DataError, match="format_version 99; 1 is needed"):
        load_shards(tmp_path)
    write(tmp_path / "pack", [[5]])
    rewrite_manifest(tmp_path / "pack", lambda manifest: manifest.update(vocab_size=70_000))
    with pytest.raises(DataError, match="uint16 for 70,000 tokens; uint32 is needed"):
        load_shards(tmp_path / "pack")


def test_a_shard_that_cannot_hold_a_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="shard_ids=1"):
        write(tmp_path / "pack", [[5]], shard_ids=1)
