from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_tinylm.config import load_config
from hf_tinylm.data.pack import open_pack
from hf_tinylm.errors import ConfigError, DataError, TokenizerError
from hf_tinylm.sections import RunConfig
from hf_tinylm.tokenization.load import save_tokenizer
from hf_tinylm.tokenization.train import train_tokenizer


def test_a_pack_gives_windows_of_its_own_tokenizer(tiny_config: Path) -> None:
    pack = open_pack(load_config(str(tiny_config)))
    assert pack.train.sequence_length == pack.validation.sequence_length == 32
    text = pack.tokenizer.decode(pack.validation.gather([0])[0])
    assert text.replace("<|endoftext|>", "").strip() in (tiny_config.parent / "prose.txt").read_text(encoding="utf-8")
    assert set(pack.identity) == {"tokenizer_sha256", "manifest_sha256", "shards_sha256", "documents"}


def test_document_attention_gives_positions_and_is_off_unless_asked_for(tiny_config: Path) -> None:
    assert "position_ids" not in open_pack(load_config(str(tiny_config))).train.batch([0])
    pack = open_pack(load_config(str(tiny_config), ["--document_attention"]))
    for windows in (pack.train, pack.validation):
        batch = windows.batch(range(20))
        begins = (batch["input_ids"] == 0) | (torch.arange(32) == 0)
        assert torch.equal(batch["position_ids"] == 0, begins)
        assert int(begins.sum()) > 20


def test_bytes_of_tokens_are_those_of_the_text(tiny_config: Path) -> None:
    pack = open_pack(load_config(str(tiny_config)))
    assert pack.token_bytes is not None
    ids = np.concatenate([shard.ids for shard in (*pack.shards.train, *pack.shards.validation)])
    assert pack.token_bytes[ids].sum() == pack.shards.manifest["sources"]["prose"]["bytes"]
    assert pack.token_bytes[0] == 0


def test_shards_of_another_tokenizer_are_refused(tiny_config: Path, tmp_path: Path) -> None:
    other, _ = train_tokenizer(["other words make other merges, and other merges make other ids. " * 20], 280)
    save_tokenizer(other, tmp_path / "other")
    with pytest.raises(TokenizerError, match="was written with the tokenizer"):
        open_pack(load_config(str(tiny_config), ["--tokenizer_path", str(tmp_path / "other")]))


def with_set(config: Path, shards: Path, name: str = "old") -> RunConfig:
    return load_config(str(config), ["--eval_sets", json.dumps([{"name": name, "shards": str(shards)}])])


def test_the_held_out_text_of_another_pack_is_read_without_its_training_files(
    tiny_config: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_config.parent / "shards", tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / "train")
    pack = open_pack(with_set(tiny_config, tmp_path / "old"))
    assert list(pack.eval_sets) == ["old"]
    assert np.array_equal(pack.eval_sets["old"].gather(range(20)), pack.validation.gather(range(20)))
    assert pack.identity["eval_sets"] == {"old": pack.identity["shards_sha256"]}


def test_another_pack_must_be_whole_of_the_same_tokenizer_and_have_held_out_text(
    tiny_config: Path, tmp_path: Path
) -> None:
    for name in ("damaged", "foreign", "empty"):
        shutil.copytree(tiny_config.parent / "shards", tmp_path / name)
    shard = next((tmp_path / "damaged" / "validation").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    for name, change in (("foreign", {"tokenizer_sha256": "f" * 64}), ("empty", {})):
        manifest = json.loads((tmp_path / name / "manifest.json").read_text()) | change
        if name == "empty":
            manifest["splits"]["validation"]["shards"] = []
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    for name, error, told in (
        ("damaged", DataError, "has SHA-256"),
        ("foreign", TokenizerError, "foreign was written with the tokenizer ffffffffffff"),
        ("empty", DataError, "empty has no validation shards"),
        ("nowhere", DataError, "nowhere is not a folder of token shards"),
    ):
        with pytest.raises(error, match=told):
            open_pack(with_set(tiny_config, tmp_path / name))


@pytest.mark.parametrize("sets", ['[{name: "a b", shards: x}]', "[{name: a, shards: x}, {name: a, shards: y}]"])
def test_sets_need_names_of_their_own(tiny_config: Path, sets: str) -> None:
    with pytest.raises(ConfigError, match="eval_sets has the name 'a"):
        load_config(str(tiny_config), ["--eval_sets", sets])


@pytest.mark.parametrize(("key", "message"), [("shards", r"data\.shards is missing"), ("tokenizer_path", "is missing")])
def test_a_path_that_is_not_given_is_named(tiny_config: Path, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_pack(load_config(str(tiny_config), [f"--{key}", "null"]))
