"""`hf-tinylm inspect`: what it says of a pack is what plain counting says, and its windows are those of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.data.inspect import inspection
from hf_tinylm.data.pack import Pack, open_pack
from hf_tinylm.data.shard_writer import ShardWriter


@pytest.fixture(scope="module")
def pack(tiny_config: Path) -> Pack:
    return open_pack(load_config(str(tiny_config)))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Documents of known lengths of two sources in shards of 32 ids, one longer than a shard, and an empty source."""
    (tmp_path / "mixed").mkdir()
    writer = ShardWriter(tmp_path / "mixed", 300, separator_id=0, shard_ids=32, sources=["web", "code", "none"])
    for length in (3, 9, 70, 5):
        writer.add("train", "web", np.arange(1, length + 1))
    for length in (4, 8, 6):
        writer.add("train", "code", np.arange(100, 100 + length))
    writer.add("validation", "code", np.arange(100, 111))
    separator = {"token": "<|endoftext|>", "id": 0, "policy": "first id of each document"}
    writer.finish({"tokenizer_sha256": "t", "separator": separator, "sources": {}, "dropped": {"empty": 2}})
    return tmp_path / "mixed"


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_lengths_are_those_of_whole_documents_with_their_separator(mixed: Path) -> None:
    found = inspection(str(mixed))["lengths"]
    assert (found["web"]["documents"], found["web"]["mean"]) == (4, (4 + 10 + 71 + 6) / 4)
    assert list(found["web"]["quantiles"]) == ["0", "5", "25", "50", "75", "95", "100"]
    assert [found["web"]["quantiles"][q] for q in ("0", "50", "100")] == [4, 6, 71]
    assert [found["code"]["quantiles"][q] for q in ("0", "50", "100")] == [5, 7, 12]
    assert found["none"] == {"documents": 0}


def test_the_tables_tell_sources_splits_drops_and_shards(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown([str(mixed)], capsys).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.split()}
    assert rows["web"][1:] == ["4", "22.8", "4", "4", "4", "6", "10", "10", "71"]
    first = next(line.split() for line in lines if line.split()[:1] == ["web"])
    assert first[1:] == ["91", "73.4%", "4", "0", "none", "1x", "unknown"]
    assert rows["dropped"] == ["dropped", "2", "empty"]
    assert rows["validation"][1:5] == ["12", "ids,", "1", "documents"]
    named = {line.split()[0] for line in lines if line.split()}
    assert {path.relative_to(mixed).as_posix() for path in mixed.rglob("*.arrow")} < named


def test_a_window_by_number_is_the_one_that_training_takes(
    tiny_config: Path, pack: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(str(tiny_config))
    shards, tokenizer = str(config.data.shards), str(config.tokenizer.tokenizer_path)
    options = ["--sequence_length", "32", "--seed", str(config.training.seed), "--tokenizer", tokenizer]
    ks = [0, 7, 5 * len(pack.train) + 3]
    found = json.loads(shown([shards, *options, "--json", "--window", *map(str, ks)], capsys))["windows"]
    expected = pack.train.gather(ks).tolist()
    assert [window["ids"] for window in found] == expected
    for window, ids in zip(found, expected, strict=True):
        assert window["input"] == pack.tokenizer.decode(ids[:-1])
        assert window["target"] == pack.tokenizer.decode(ids[1:])
        assert window["pairs"][5] == [pack.tokenizer.decode([ids[5]]), pack.tokenizer.decode([ids[6]])]
        assert window["sources"] == ["prose"]
    text = shown([shards, *options, "--window", "7"], capsys)
    assert f"target: {found[1]['target']!r}" in text
    assert "window 7 in the order of training (train/data-" in text


def test_windows_with_given_ids_are_found_wherever_they_begin(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1, 2 begins each of four documents; a window is the one whose input holds the first of the ids."""
    arguments = [str(mixed), "--sequence_length", "8", "--windows", "9", "--json", "--find"]
    found = json.loads(shown([*arguments, "1", "2"], capsys))
    assert found["find"]["occurrences"] == len(found["find"]["places"]) == 4
    streams = {shard["name"]: shard for shard in found["splits"]["train"]["shards"]}
    for place in found["find"]["places"]:
        assert place["source"] == "web"
        assert place["shard"] in streams
    assert found["windows"]
    for window in found["windows"]:
        assert 1 in window["ids"][:-1]
    assert json.loads(shown([*arguments, "103"], capsys))["find"]["occurrences"] == 3
    assert json.loads(shown([*arguments, "299"], capsys))["windows"] == []
    assert json.loads(shown([*arguments, "2", "1"], capsys))["find"]["occurrences"] == 0


def test_a_search_over_several_blocks_misses_nothing(
    pack: Pack, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_tinylm.data.inspect._BLOCK", 7)
    ids = [int(token) for token in pack.shards.train[0].ids[100:102]]
    stream = pack.shards.train[0].ids.tolist()
    expected = [place for place in range(len(stream) - 1) if stream[place : place + 2] == ids]
    found = inspection(str(pack.shards.path), find=ids, count=10**6)["find"]
    assert [place["position"] for place in found["places"]] == expected


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_lengths_are_drawn_for_each_source(mixed: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    picture = mixed.parent / f"lengths.{kind}"
    assert f"histogram of lengths: {picture}" in shown([str(mixed), "--plot", str(picture)], capsys)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    if kind == "svg":
        assert [f"<!-- {name}: {count} documents, median" in content.decode() for name, count in
                (("web", 4), ("code", 4), ("none", 0))] == [True, True, False]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--find", "300"], "--find 300: SHARDS has a vocabulary of 300 tokens; give ids from 0 to 299"),
        (["--find", "-1"], "--find -1"),
        (["--window", "-1", "--sequence_length", "8"], "window -1 does not exist"),
        (["--window", "0", "--sequence_length", "64"], "65 are needed"),
        (["--window", "0", "--sequence_length", "0"], "sequence_length=0"),
        (["--plot", "lengths.gif"], "use .png, .pdf, .svg"),
        (["--tokenizer", "missing/tokenizer/folder"], "missing/tokenizer/folder"),
    ],
)
def test_what_does_not_exist_is_one_line_and_exit_code_2(
    mixed: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(mixed), *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message.replace("SHARDS", str(mixed)) in line


def test_another_tokenizer_than_that_of_the_pack_is_refused(
    mixed: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = load_config(str(tiny_config)).tokenizer.tokenizer_path
    assert main(["inspect", str(mixed), "--tokenizer", tokenizer]) == 2
    assert "another tokenizer" in capsys.readouterr().err
