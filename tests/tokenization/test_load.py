"""Saving, loading and identifying tokenizers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_tinylm.errors import ConfigError, TokenizerError
from hf_tinylm.tokenization.load import (
    load_backend,
    load_tokenizer,
    save_tokenizer,
    token_byte_lengths,
    tokenizer_sha256,
    write_tokenizer_files,
)
from hf_tinylm.tokenization.train import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_saved_class_is_one_that_older_programs_know(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (config["eos_token"], config["pad_token"], config.get("bos_token")) == ("<|endoftext|>", "<|pad|>", None)
    assert "backend" not in config


def test_a_saved_tokenizer_gives_the_same_ids_by_every_way_of_loading(
    folder: Path, tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> None:
    texts = [*documents[:3], documents[-1], "a <|im_end|> b", "", " x"]
    expected = [tokenizer(text).input_ids for text in texts]
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for loaded in (AutoTokenizer.from_pretrained(folder), load_tokenizer(folder), load_tokenizer(str(folder))):
        assert [loaded(text).input_ids for text in texts] == expected
    assert [plain.encode(text).ids for text in texts] == expected


def test_saving_refuses_a_folder_in_use_and_replaces_only_when_told(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        save_tokenizer(tokenizer, folder)
    save_tokenizer(tokenizer, folder, replace=True)
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]


def test_files_can_be_added_to_a_folder_that_holds_a_model(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_tokenizer_files(tokenizer, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("missing", ["/nowhere/tokenizer", "./nothing", "a/b/c", "nobody/no-such-tokenizer"])
def test_a_missing_tokenizer_is_named(missing: str) -> None:
    with pytest.raises(TokenizerError, match=missing.removeprefix("./")):
        load_tokenizer(missing)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=f"{tmp_path} holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(TokenizerError, match="could not be loaded"):
        load_tokenizer(tmp_path)


def test_the_hash_survives_saving_loading_and_the_older_spelling_of_merges(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = tokenizer_sha256(tokenizer)
    assert tokenizer_sha256(load_tokenizer(folder)) == expected
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["pre_tokenizer"]["pretokenizers"][1]["trim_offsets"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_sha256(load_tokenizer(folder)) == expected


@pytest.mark.parametrize("change", ["merges", "split", "vocabulary", "specials", "normalizer"])
def test_the_hash_changes_with_all_that_decides_ids(change: str, tokenizer: PreTrainedTokenizerFast) -> None:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if change == "merges":
        content["model"]["merges"][10], content["model"]["merges"][11] = (
            content["model"]["merges"][11],
            content["model"]["merges"][10],
        )
    elif change == "split":
        content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    elif change == "vocabulary":
        vocabulary = content["model"]["vocab"]
        vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    elif change == "specials":
        content["added_tokens"][1]["special"] = False
    else:
        content["normalizer"] = {"type": "NFC"}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    assert tokenizer_sha256(other) != tokenizer_sha256(tokenizer)


def test_token_byte_lengths_add_up_to_the_bytes_of_the_text(
    tokenizer: PreTrainedTokenizerFast, documents: list[str]
) -> None:
    lengths = token_byte_lengths(tokenizer)
    assert lengths.dtype == np.int64
    assert lengths.shape == (len(tokenizer),)
    assert lengths[:4].tolist() == [0, 0, 0, 0]
    assert (lengths[4:] >= 1).all()
    for text in (documents[0], documents[-1], "é", "<|pad|>x"):
        ids = tokenizer(text).input_ids
        specials = 7 if "<|pad|>" in text else 0
        assert lengths[ids].sum() == len(text.encode()) - specials


def test_bytes_of_tokens_that_are_not_bytes_are_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(TokenizerError, match="not a byte-level BPE"):
        token_byte_lengths(PreTrainedTokenizerFast(tokenizer_object=words))


def test_different_texts_make_different_hashes() -> None:
    first, second = (train_tokenizer([text] * 9, 262)[0] for text in ("abc abd", "xyz xyw"))
    assert tokenizer_sha256(first) != tokenizer_sha256(second)


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_the_two_files_of_gpt2_are_a_tokenizer(names: tuple[str, str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = "It's 1984 and they'll say  I'm wrong;\n\n\tnaïve café, 안녕하세요 🙂 "
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator([text] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    trained.model.save(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": len(vocabulary)}))
    for old, new in zip(("vocab.json", "merges.txt"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    loaded = load_tokenizer(tmp_path)
    assert (len(loaded), loaded.eos_token_id) == (len(vocabulary) + 1, len(vocabulary))
    for each in (text, "<|endoftext|", " ", "1234 don't\r\n", "\x00é"):
        ids = loaded(each, add_special_tokens=False)["input_ids"]
        assert ids == trained.encode(each).ids
        assert loaded.decode(ids) == each
    assert len(trained.encode(text).ids) < len(text.encode())  # merges take part
    save_tokenizer(loaded, tmp_path / "saved")
    assert tokenizer_sha256(load_tokenizer(tmp_path / "saved")) == tokenizer_sha256(loaded)
    assert load_backend(tmp_path).get_vocab() == loaded.get_vocab()
    merges = tmp_path / names[1]
    merges.write_text(merges.read_text() + "xx yy\n")
    with pytest.raises(TokenizerError, match="'xx yy', which makes no token"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "[]", "null", '{"version": 1', '{"eos_token": 3, "added_tokens": 7}'])
def test_a_damaged_tokenizer_is_an_error_that_names_its_folder(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content)
    for load in (load_tokenizer, load_backend):
        with pytest.raises(ConfigError, match=re.escape(str(folder))):
            load(folder)
