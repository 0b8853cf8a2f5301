"""Files of token ids as a source: the same pack as from their text, and ids of another tokenizer are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hf_tinylm.data import readers
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.errors import DataError
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.load import load_tokenizer, save_tokenizer
from hf_tinylm.tokenization.train import train_tokenizer

MakeConfig = Callable[..., RunConfig]


def write_bin(path: Path, documents: list[list[int]], place: str) -> SourceSection:
    ids = [id_ for document in documents for id_ in ([0, *document] if place == "front" else [*document, 0])]
    np.array(ids, "<u2").tofile(path)
    return SourceSection("tokens", str(path), licence="MIT")


@pytest.mark.parametrize("place", ["front", "behind"])
@pytest.mark.parametrize("block", [2**20, 50])
def test_token_files_give_the_pack_of_their_text(
    place: str,
    block: int,
    make_config: MakeConfig,
    texts: list[str],
    tokenizer_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    source = write_bin(tmp_path / "a.bin", [*tokenizer(texts).input_ids, [], tokenizer("   ").input_ids], place)
    source.encoded_with = str(tokenizer_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(make_config(SourceSection("tokens", str(tmp_path / "a.jsonl")), shards="text"), progress=False)
    monkeypatch.setattr(readers, "BLOCK_BYTES", block)
    manifest = prepare(make_config(source, shards="bin"), progress=False)
    assert manifest["splits"] == load_shards(tmp_path / "text").manifest["splits"]
    assert manifest["dropped"] == {"white_space": 1}


def test_copies_of_text_in_token_files_are_found(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    source = write_bin(tmp_path / "a.bin", load_tokenizer(tokenizer_path)(texts[:50]).input_ids, "front")
    source.encoded_with = str(tokenizer_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = prepare(make_config(SourceSection("text", str(tmp_path / "a.jsonl")), source), progress=False)
    assert manifest["duplicates"] == 50


def test_ids_of_another_tokenizer_or_of_none_are_refused(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    source = write_bin(tmp_path / "a.bin", [[5, 6]], "front")
    with pytest.raises(DataError, match="nothing says whose"):
        prepare(make_config(source), progress=False)
    save_tokenizer(train_tokenizer(texts, 290)[0], tmp_path / "other")
    source.encoded_with = str(tmp_path / "other")
    with pytest.raises(DataError, match="Use that tokenizer for the pack"):
        prepare(make_config(source), progress=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([0, 5, 300], "<u2").tobytes(), "id 300; ids from 0 to 299"),
        (np.array([5, 6], "<u2").tobytes(), "holds no separator id 0"),
        (b"abc", "3 bytes, which is no whole number of uint16 ids"),
    ],
)
def test_ids_are_checked(
    content: bytes, message: str, make_config: MakeConfig, tokenizer_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    source = SourceSection("a", str(tmp_path / "a.bin"), encoded_with=str(tokenizer_path))
    with pytest.raises(DataError, match=message):
        prepare(make_config(source), progress=False)
