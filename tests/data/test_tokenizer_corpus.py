"""A tokenizer learns from training documents of every source, and from no validation document."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.config import load_config
from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.data.tokenizer_corpus import audit_from_config, train_from_config, training_texts
from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.files import bundled
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.load import load_tokenizer, tokenizer_sha256

MakeConfig = Callable[..., RunConfig]


def write_lines(path: Path, texts: list[str]) -> SourceSection:
    path.write_text("\n".join(texts), encoding="utf-8")
    return SourceSection(path.stem, str(path), splitter="lines")


def test_the_text_is_that_of_the_training_split_of_the_shards(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path
) -> None:
    config = make_config(write_lines(tmp_path / "a.txt", texts), validation_fraction=0.3)
    learned_from = list(training_texts(config, Skipped(), Counter()))
    prepare(config, progress=False)
    tokenizer = load_tokenizer(tokenizer_path)
    shards = load_shards(tmp_path / "shards")
    in_shards = [
        tokenizer.decode(shard.ids[a + 1 : b].tolist(), clean_up_tokenization_spaces=False)
        for shard in shards.train
        for a, b in zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
    ]
    assert learned_from == in_shards
    assert 100 < len(learned_from) < 180


def test_a_cap_on_the_sample_takes_evenly_from_all_sources(make_config: MakeConfig, tmp_path: Path) -> None:
    long = write_lines(
        tmp_path / "long.txt", [f"{number:04d} a long line of the first source" for number in range(900)]
    )
    short = write_lines(tmp_path / "short.txt", [f"{number:04d} short" for number in range(900)])
    read: Counter[str] = Counter()
    taken = 0
    for text in training_texts(make_config(long, short, validation_fraction=0.0), Skipped(), read):
        taken += len(text)
        if taken >= 10_000:
            break
    assert abs(read["long"] - read["short"]) < 50
    assert read.total() == taken


def test_a_tokenizer_is_trained_and_written_and_reported(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    config = make_config(write_lines(tmp_path / "a.txt", ["", *texts]))
    config.tokenizer.tokenizer_path, config.tokenizer.vocab_size = str(tmp_path / "out"), 290
    report = train_from_config(config, progress=False)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert len(tokenizer) == report["vocab_size"] == 290
    assert report["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    assert report["dropped"] == {"empty": 1}
    assert report["sources"] == {"a": report["bytes"]}
    with pytest.raises(ConfigError, match="not empty"):
        train_from_config(config, progress=False)
    audit = audit_from_config(config)
    assert (audit["ok"], audit["sources"]["a"]["documents"]) == (True, 200)


def test_no_training_text_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(write_lines(tmp_path / "a.txt", ["", " "]))
    config.tokenizer.tokenizer_path = str(tmp_path / "out")
    with pytest.raises(DataError, match="hold no training text"):
        train_from_config(config, progress=False)
    assert not (tmp_path / "out").exists()


def test_the_script_of_the_tokenizer_folder_trains_and_fails_in_one_line(texts: list[str], tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.txt", texts)
    settings = {
        "tokenizer": {"tokenizer_path": str(tmp_path / "out"), "vocab_size": 280},
        "data": {"sources": [{"name": "a", "path": source.path, "splitter": "lines"}]},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    command = [sys.executable, str(bundled("tokenizer", "train.py")), "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run([*command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["vocab_size"] == 280
    assert len(load_tokenizer(tmp_path / "out")) == 280
    failed = subprocess.run(
        [*command, "--vocab_size", "9999", "--tokenizer_path", str(tmp_path / "other")], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "error: vocab_size=9,999 was asked" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_documented_configuration_is_valid() -> None:
    config = load_config(str(bundled("tokenizer", "byte_bpe.yaml")))
    assert config.tokenizer.vocab_size == 4096
    assert [source.name for source in config.data.sources] == ["austen", "kjv"]
