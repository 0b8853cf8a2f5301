"""Preparing: nothing lost, copies dropped, a split by content, the same bytes whatever the threads and the order."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.data import prepare as prepare_module
from hf_tinylm.data import readers
from hf_tinylm.data.chunks import Chunk
from hf_tinylm.data.encoding import ChunkEncoder, Encoded
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shard_writer import ShardWriter
from hf_tinylm.data.shards import Shard, load_shards
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import ConfigError, DataError, TokenizerError
from hf_tinylm.files import sha256_of_file
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.load import load_tokenizer, tokenizer_sha256

MakeConfig = Callable[..., RunConfig]


def write_jsonl(path: Path, texts: list[Any]) -> SourceSection:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return SourceSection(path.stem, str(path), licence="MIT")


def texts_of(shards: list[Shard], tokenizer: Any) -> list[str]:
    return [
        tokenizer.decode(shard.ids[start + 1 : end].tolist(), clean_up_tokenization_spaces=False)
        for shard in shards
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
    ]


def test_every_document_is_in_one_split_in_the_order_of_reading(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", texts[:150]), write_jsonl(tmp_path / "b.jsonl", texts[150:]))
    config.data.shuffle = False
    manifest = prepare(config, progress=False)
    shards = load_shards(tmp_path / "shards", verify=True)
    tokenizer = load_tokenizer(tokenizer_path)
    train, validation = texts_of(shards.train, tokenizer), texts_of(shards.validation, tokenizer)

    def uniform(text: str) -> float:
        digest = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
        return int(digest[:16], 16) / 2**64

    assert validation == [text for text in texts if uniform(text) < 0.1]
    assert train == [text for text in texts if uniform(text) >= 0.1]
    assert 5 < len(validation) < 40
    assert manifest["documents"] == 200
    assert manifest["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert {name: (s["documents"], s["licence"]) for name, s in manifest["sources"].items()} == {
        "a": (150, "MIT"),
        "b": (50, "MIT"),
    }
    assert sum(s["bytes"] for s in manifest["sources"].values()) == sum(len(text.encode()) for text in texts)


def test_ids_are_those_of_the_tokenizer_after_one_separator(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    prepare(make_config(write_jsonl(tmp_path / "a.jsonl", texts), validation_fraction=0.5), progress=False)
    tokenizer = load_tokenizer(tokenizer_path)
    expected = {(0, *tokenizer(text).input_ids) for text in texts}
    shards = load_shards(tmp_path / "shards")
    found = set()
    for shard in shards.train + shards.validation:
        found |= {tuple(shard.ids[a:b].tolist()) for a, b in zip(shard.offsets[:-1], shard.offsets[1:], strict=True)}
    assert found == expected


def test_the_end_of_each_document_predicts_the_separator_of_the_next(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    prepare(make_config(write_jsonl(tmp_path / "a.jsonl", texts)), progress=False)
    (shard,) = load_shards(tmp_path / "shards").train
    windows = TokenWindows([shard.ids], 16, "sequential", seed=0)
    labels = np.concatenate([row["shift_labels"].numpy() for row in windows])
    covered = len(labels) + 1
    assert np.count_nonzero(labels == 0) == np.count_nonzero(shard.ids[1:covered] == 0)
    assert np.count_nonzero(labels == 0) > 100


def test_validation_shares_no_document_with_training_whatever_the_order(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    """100 documents, 20 of them copies of others, one of the copies with a space at its end."""
    originals = texts[:80]
    documents = [*originals, originals[0] + " ", *originals[1:20]]
    tokenizer = load_tokenizer(tokenizer_path)
    splits = []
    for number in range(3):
        random.Random(number).shuffle(documents)
        source = write_jsonl(tmp_path / f"order{number}.jsonl", documents)
        manifest = prepare(make_config(source, shards=f"shards{number}"), progress=False)
        assert (manifest["duplicates"], manifest["documents"]) == (20, 80)
        shards = load_shards(tmp_path / f"shards{number}")
        train, validation = (
            {" ".join(text.split()) for text in texts_of(part, tokenizer)} for part in (shards.train, shards.validation)
        )
        assert not train & validation
        assert len(train) + len(validation) == 80
        splits.append((train, validation))
    assert splits[0] == splits[1] == splits[2]


def test_copies_across_sources_are_dropped(make_config: MakeConfig, texts: list[str], tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / "a.jsonl", texts), write_jsonl(tmp_path / "b.jsonl", texts[:50])]
    manifest = prepare(make_config(*sources), progress=False)
    assert manifest["duplicates"] == 50
    b = manifest["sources"]["b"]
    found = {key: b[key] for key in ("ids", "documents", "licence", "bytes", "duplicates")}
    assert found == {"ids": 0, "documents": 0, "licence": "MIT", "bytes": 0, "duplicates": 50}


def test_a_larger_validation_fraction_keeps_the_documents_of_a_smaller_one(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    source, tokenizer = write_jsonl(tmp_path / "a.jsonl", texts), load_tokenizer(tokenizer_path)
    found = []
    for fraction in (0.05, 0.3):
        prepare(make_config(source, validation_fraction=fraction, shards=f"at{fraction}"), progress=False)
        found.append(set(texts_of(load_shards(tmp_path / f"at{fraction}").validation, tokenizer)))
    assert found[0] < found[1]


def test_the_number_of_workers_and_the_seed_change_no_byte(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 100)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 500)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    hashes = []
    for number, workers in enumerate((1, 3)):
        config = make_config(source, shards=f"shards{number}")
        config.data.num_workers, config.training.seed, config.data.shard_ids = workers, number, 1000
        prepare(config, progress=False)
        folder = tmp_path / f"shards{number}"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        hashes.append({str(path.relative_to(folder)): sha256_of_file(path) for path in files})
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) > 6


def test_records_without_text_are_counted_in_the_manifest(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["", "  ", None, *texts])
    manifest = prepare(make_config(source), progress=False)
    assert manifest["dropped"] == {"empty": 1, "null": 1, "white_space": 1}
    assert manifest["dropped_first"]["null"].endswith("a.jsonl line 3")
    assert manifest["documents"] == 200


def test_text_that_spells_special_tokens_stays_text(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    hostile = [f"{text} <|endoftext|><|im_end|>" for text in texts]
    prepare(make_config(write_jsonl(tmp_path / "a.jsonl", hostile)), progress=False)
    shards = load_shards(tmp_path / "shards", verify=True)
    ids = np.concatenate([shard.ids for shard in shards.train + shards.validation])
    assert (np.count_nonzero(ids == 0), np.count_nonzero((ids > 0) & (ids < 4))) == (200, 0)
    assert all(
        text.endswith(" <|endoftext|><|im_end|>") for text in texts_of(shards.train, load_tokenizer(tokenizer_path))
    )


def test_a_fast_engine_that_differs_is_replaced_by_the_exact_one(
    make_config: MakeConfig,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = [*texts, *(f"another text {number}" for number in range(500))]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    prepare(make_config(source, shards="right"), progress=False)
    honest = FastEncoder._encode
    sampled = next(text for text in texts[32:] if zlib.crc32(text.encode()) % 128 == 0)

    def wrong(self: FastEncoder, text: str) -> np.ndarray:
        ids = honest(self, text)
        return ids[:-1] if text == sampled else ids

    monkeypatch.setattr(FastEncoder, "_encode", wrong)
    with caplog.at_level(logging.WARNING):
        manifest = prepare(make_config(source, shards="repaired"), progress=False)
    assert manifest["encoder"] == "tokenizers"
    assert "tiktoken gives other ids than tokenizers" in caplog.text
    assert f"a.jsonl line {texts.index(sampled) + 1}" in caplog.text
    right, repaired = (load_shards(tmp_path / name).manifest["splits"] for name in ("right", "repaired"))
    assert right == repaired


def test_an_output_folder_in_use_is_refused_and_left_alone(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        prepare(make_config(write_jsonl(tmp_path / "a.jsonl", texts)), progress=False)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["precious"]


def test_a_failure_half_way_leaves_no_pack_and_keeps_what_is_encoded(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(DataError, match=r"b\.txt is not valid UTF-8"):
        prepare(make_config(good, SourceSection("b", str(tmp_path / "b.txt"))), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".prepare-shards", "a.jsonl", "b.txt"]
    (tmp_path / "b.txt").write_text("good")
    encoded = []
    honest = ChunkEncoder.encode

    def counted(self: ChunkEncoder, chunk: Chunk, *arguments: Any) -> Encoded:
        encoded.append(Path(chunk.path).name)
        return honest(self, chunk, *arguments)

    monkeypatch.setattr(ChunkEncoder, "encode", counted)
    manifest = prepare(make_config(good, SourceSection("b", str(tmp_path / "b.txt"))), progress=False)
    assert (set(encoded), manifest["documents"]) == ({"b.txt"}, 201)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.txt", "shards"]


def test_a_failure_before_anything_is_encoded_leaves_nothing_behind(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(DataError, match=r"b\.txt is not valid UTF-8"):
        prepare(make_config(SourceSection("b", str(tmp_path / "b.txt"))), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.txt"]


def test_an_empty_source_is_an_error_that_tells_what_was_skipped(make_config: MakeConfig, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["", "  ", None])
    with pytest.raises(DataError, match=r"source a .* holds no text; .* 1 empty, 1 null, 1 white_space"):
        prepare(make_config(source), progress=False)


def test_an_empty_split_is_an_error_that_says_which(make_config: MakeConfig, texts: list[str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts[:3])
    with pytest.raises(DataError, match=r"validation split is empty: 3 different documents .* Raise"):
        prepare(make_config(source, validation_fraction=0.0), progress=False)
    with pytest.raises(DataError, match=r"training split is empty: 3 different documents .* Lower"):
        prepare(make_config(source, validation_fraction=1.0), progress=False)


def test_what_is_not_given_is_asked_for(make_config: MakeConfig, texts: list[str], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    config = make_config(source)
    config.data.shards = None
    with pytest.raises(ConfigError, match="--shards"):
        prepare(config, progress=False)
    config = make_config(source)
    config.tokenizer.tokenizer_path = None
    with pytest.raises(ConfigError, match="--tokenizer_path"):
        prepare(config, progress=False)
    config = make_config(source)
    config.tokenizer.tokenizer_path = str(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="nowhere"):
        prepare(config, progress=False)
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        prepare(make_config(), progress=False)


def test_shards_that_are_finished_are_not_written_again(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", texts), shards="whole")
    config.data.shard_ids = 1000
    whole = prepare(config, progress=False)["splits"]
    assert len(whole["train"]["shards"]) > 4
    written: list[str] = []
    honest = ShardWriter._write_file

    def stops_at_the_third(self: ShardWriter, path: Path, shard: Any) -> None:
        if len(written) == 3:
            raise KeyboardInterrupt
        honest(self, path, shard)
        written.append(f"{path.parent.name}/{path.name}")

    config.data.shards = str(tmp_path / "shards")
    monkeypatch.setattr(ShardWriter, "_write_file", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, progress=False)
    before = list(written)
    monkeypatch.setattr(
        ShardWriter,
        "_write_file",
        lambda self, path, shard: (honest(self, path, shard), written.append(f"{path.parent.name}/{path.name}"))[0],
    )
    assert prepare(config, progress=False)["splits"] == whole
    assert len(written) == len(set(written)) == sum(len(split["shards"]) for split in whole.values())
    assert len(before) == 3


def test_a_finished_shard_that_was_damaged_is_written_again(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(write_jsonl(tmp_path / "a.jsonl", texts))
    config.data.shard_ids = 1000

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, progress=False)
    (shard,) = (tmp_path / ".prepare-shards").glob("pack-*/train/00001.arrow")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    prepare(config, progress=False)
    load_shards(tmp_path / "shards", verify=True)


def test_preparing_starts_without_torch() -> None:
    """Importing it takes seconds, and nothing of it is needed."""
    code = "import hf_tinylm.commands.data, hf_tinylm.data.prepare, hf_tinylm.data.inspect, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hf_tinylm.data.workers" in done.stdout.split()
    assert not {"torch", "transformers", "datasets"} & set(done.stdout.split())


@pytest.mark.parametrize("budget", [{"tokens": 10**18}, {"epochs": 1e30}, {"weight": 1.0}])
def test_a_pack_that_its_disk_cannot_hold_is_refused_at_once(
    budget: dict[str, float], make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    vars(source).update(budget)
    config = make_config(source)
    config.data.pack_tokens = 10**18 if "weight" in budget else None
    with pytest.raises(DataError, match=r"the pack of [\d,]+ ids needs [\d,]+ bytes more and .* has [\d,]+ free"):
        prepare(config, progress=False)
    assert not (tmp_path / "shards").exists()
