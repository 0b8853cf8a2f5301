"""Datasets by name, from a Hub on the loopback interface: the pack of local files, one commit, one line of error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hf_tinylm.data.hub import pinned
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.data.sources import read_chunks
from hf_tinylm.data.staging import stage_key
from hf_tinylm.files import read_json, sha256_of_file
from hf_tinylm.sections import RunConfig, SourceSection

if TYPE_CHECKING:
    from tests.conftest import Hub

MakeConfig = Callable[..., RunConfig]
CARD = """---
configs:
- {config_name: default, data_files: "data/*.parquet"}
- {config_name: sample, data_files: [{split: train, path: "sample/*.parquet"}, {split: test, path: "test/*.parquet"}]}
---
"""


@pytest.fixture
def write_yaml(tmp_path: Path, tokenizer_path: Path) -> Callable[..., Path]:
    """A configuration file with these sources that writes `tmp_path/NAME`."""

    def write(name: str, *sources: dict[str, Any]) -> Path:
        data = {"shards": str(tmp_path / name), "validation_fraction": 0.1, "sources": list(sources)}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"tokenizer": {"tokenizer_path": str(tokenizer_path)}, "data": data}))
        return path

    return write


def shard_hashes(folder: Path) -> list[str]:
    return [sha256_of_file(path) for path in sorted(folder.rglob("*.arrow"))]


def write_parquet(folder: Path, texts: list[str], files: int) -> None:
    folder.mkdir(parents=True)
    for number in range(files):
        part = texts[number * len(texts) // files : (number + 1) * len(texts) // files]
        languages = ["ko" if "소리" in text else "en" for text in part]
        table = pa.table({"id": list(range(len(part))), "text": part, "language": languages})
        pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=17)


def test_datasets_by_name_give_the_shards_of_the_same_local_files(
    hub: Hub, make_config: MakeConfig, write_yaml: Callable[..., Path], texts: list[str], tmp_path: Path
) -> None:
    """Parquet with a configuration, a split and a filter, and JSONL of a private repository, mixed by budgets."""
    local = tmp_path / "local"
    write_parquet(local / "data", texts[:20], 1)
    write_parquet(local / "sample", texts[20:140], 3)
    write_parquet(local / "test", texts[:5], 1)
    (local / "README.md").write_text(CARD)
    (local / "rows.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in [*texts[140:], ""]))
    hub.add("lab/web", local / "README.md", local / "data", local / "sample", local / "test")
    hub.add("lab/notes", local / "rows.jsonl", private=True)
    filters = {"language_column": "language", "allowed_languages": ["en"], "weight": 2.0}
    path = write_yaml(
        "by_name",
        {"name": "web", "path": "lab/web", "config": "sample", "licence": "odc-by", **filters},
        {"name": "notes", "path": "lab/notes", "format": "datasets", "text_column": "body", "weight": 1.0},
    )
    done = hub.cli("prepare", "--config", str(path), "--json")
    assert done.returncode == 0, done.stderr
    config = make_config(
        SourceSection("web", str(local / "sample"), licence="odc-by", **filters),
        SourceSection("notes", str(local / "rows.jsonl"), text_column="body", weight=1.0),
        shards="by_path",
    )
    expected = prepare(config, progress=False)
    assert shard_hashes(tmp_path / "by_name") == shard_hashes(tmp_path / "by_path")
    manifest = read_json(tmp_path / "by_name" / "manifest.json")
    assert manifest["dropped"] == expected["dropped"]
    assert manifest["dropped"].keys() == {"language", "empty"}
    revision = manifest["sources"]["web"].pop("revision")
    assert len(revision) == 40
    assert manifest["sources"]["web"] == expected["sources"]["web"]


READ = """
import json, os, sys
from hf_tinylm.data.sources import read_chunks
from hf_tinylm.errors import DataError
from hf_tinylm.sections import SourceSection
for settings in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"] = settings.pop("token", "hf_x")
    try:
        print(len(list(read_chunks(SourceSection("web", **settings)))))
    except DataError as error:
        print(error)
"""


def outcomes(hub: Hub, *sources: dict[str, str], **env: str) -> list[str]:
    """What reading each source gives: the number of its chunks, or the line of its error."""
    done = hub.run("-c", READ, json.dumps(sources), **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_dataset_that_cannot_be_read_is_one_line_that_says_why(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    hub.add("lab/open", tmp_path / "rows.jsonl")
    hub.add("lab/closed", tmp_path / "rows.jsonl", private=True)
    cases = [
        ({"path": "lab/open"}, "1"),
        ({"path": "lab/absent"}, r"source web: lab/absent is no file here, .* no dataset of that name .*\(HTTP 404\)"),
        ({"path": "lab/closed", "token": ""}, r"lab/closed is .*\(HTTP 401\).*private, log in with `hf auth login`"),
        ({"path": "lab/closed"}, "1"),
        ({"path": "lab/open", "revision": "v9"}, "lab/open has no revision v9"),
        ({"path": "lab/open", "config": "nope"}, "'nope' not found. Available: .*Correct path, config or split"),
        ({"path": "lab/open", "split": "nope"}, "lab/open could not be read: Bad split: nope"),
        ({"path": "lab/open", "text_column": "body"}, "lab/open has no column body; its columns are text"),
    ]
    found = outcomes(hub, *(source for source, _ in cases))
    assert len(found) == len(cases)
    for line, (_, words) in zip(found, cases, strict=True):
        assert re.search(words, line), line


def test_all_of_a_dataset_is_read_at_the_commit_that_its_branch_had_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def dataset_info(self: huggingface_hub.HfApi, path: str, revision: str | None = None) -> SimpleNamespace:
        asked.append((path, revision))
        return SimpleNamespace(sha="c0ffee")

    def load_dataset(path: str, config: str | None, **named: Any) -> datasets.IterableDataset:
        asked.append((path, config, named["split"], named["revision"], named["streaming"]))
        return datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = SourceSection("web", "lab/web", config="small", split="test", revision="v1")
    (chunk,) = read_chunks(source)
    assert chunk.payload.splitlines() == [b'{"text": "a"}', b'{"text": "b"}']
    assert asked == [("lab/web", "v1"), ("lab/web", "small", "test", "c0ffee", True)]
    assert stage_key(pinned(source), "tokenizer", "tiktoken") != stage_key(source, "tokenizer", "tiktoken")


@pytest.mark.slow
def test_a_hub_that_is_busy_once_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    hub.add("lab/open", tmp_path / "rows.jsonl")
    with hub.faults({"match": r"GET .*rows\.jsonl", "status": 503, "times": 1}):
        assert outcomes(hub, {"path": "lab/open"}) == ["1"]
    with hub.faults({"match": "GET /api/datasets/lab/open", "status": 503}):
        assert "it answers HTTP 503. Run the same command again later" in outcomes(hub, {"path": "lab/open"})[0]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "lab/open is no file here, and the Hub is not asked .*offline mode. Unset HF_HUB"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1:9 cannot be asked .*Check the network and HF_ENDPOINT"),
    ],
    ids=["offline", "unreachable"],
)
def test_without_the_hub_a_dataset_name_is_one_line_at_once(hub: Hub, env: dict[str, str], words: str) -> None:
    (line,) = outcomes(hub, {"path": "lab/open"}, **env)
    assert re.search(words, line), line


PUSH = """
import sys
from datasets import load_dataset, load_from_disk
load_from_disk(sys.argv[1]).push_to_hub("lab/pack", private=True)
pushed = load_dataset("lab/pack")
for split in ("train", "validation"):
    streamed = load_dataset("lab/pack", split=split, streaming=True)
    assert [row["input_ids"] for row in streamed] == pushed[split]["input_ids"]
    print(sum(len(ids) for ids in pushed[split]["input_ids"]))
pushed.save_to_disk(sys.argv[2])
"""


@pytest.mark.slow
def test_a_pack_pushed_and_loaded_from_the_hub_has_the_same_tokens(
    hub: Hub, make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = make_config(SourceSection("notes", str(tmp_path / "rows.jsonl")))
    config.data.shard_ids = 2_000
    prepare(config, progress=False)
    done = hub.run("-c", PUSH, str(tmp_path / "shards"), str(tmp_path / "back"))
    assert done.returncode == 0, done.stderr
    shards, back = load_shards(tmp_path / "shards"), datasets.load_from_disk(str(tmp_path / "back"))
    for split, parts in (("train", shards.train), ("validation", shards.validation)):
        column = back[split].data.column("input_ids").combine_chunks()
        assert str(column.type.value_type) == "uint16"
        assert np.array_equal(column.flatten().to_numpy(), np.concatenate([shard.ids for shard in parts]))
        assert set(back[split]["source"]) == {"notes"}
    assert [int(n) for n in done.stdout.split()] == [
        sum(len(s.ids) for s in p) for p in (shards.train, shards.validation)
    ]
