from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_tinylm.config import load_config
from hf_tinylm.data.pack import open_pack
from hf_tinylm.errors import ConfigError, TokenizerError
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


@pytest.mark.parametrize(("key", "message"), [("shards", r"data\.shards is missing"), ("tokenizer_path", "is missing")])
def test_a_path_that_is_not_given_is_named(tiny_config: Path, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_pack(load_config(str(tiny_config), [f"--{key}", "null"]))
