"""Pipelines of datatrove that end in our shards: the bits of one process, with its executors; and clear refusals."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.sources import read_documents
from hf_tinylm.errors import DataError, MissingExtraError
from hf_tinylm.files import read_json, sha256_of_file
from hf_tinylm.sections import RunConfig, SourceSection

executors = pytest.importorskip("datatrove.executor")
steps = pytest.importorskip("hf_tinylm.data.datatrove_steps")
filters = pytest.importorskip("datatrove.pipeline.filters")
readers = pytest.importorskip("datatrove.pipeline.readers")

MakeConfig = Callable[..., RunConfig]
FILES = 5


def shard_hashes(folder: Path) -> list[str]:
    return [sha256_of_file(path) for path in sorted(folder.rglob("*.arrow"))]


def is_short(document: Any) -> bool:
    return len(document.text) < 250


@pytest.fixture
def crawl(tmp_path: Path, texts: list[str]) -> Path:
    """200 documents, 10 of them twice and 3 of white space, in five files."""
    folder = tmp_path / "crawl"
    folder.mkdir()
    for number in range(FILES):
        part = [*texts[number::FILES], *texts[:10][number::FILES], *(["   "] if number < 3 else [])]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


@pytest.fixture
def expected(make_config: MakeConfig, crawl: Path, texts: list[str], tmp_path: Path) -> list[str]:
    """Hashes of the shards that one process writes of the short documents and a second source."""
    (tmp_path / "more.txt").write_text("\n".join(f"more {text}" for text in texts[:20]))
    config = make_config(
        SourceSection("web", str(crawl), max_characters=249), more(tmp_path), shards="expected", validation_fraction=0.1
    )
    prepare(config, progress=False)
    return shard_hashes(tmp_path / "expected")


def more(folder: Path) -> SourceSection:
    return SourceSection("more", str(folder / "more.txt"), splitter="lines", epochs=2)


def pipeline(crawl: Path, tokenizer_path: Path) -> list[Any]:
    """Read, filter, encode."""
    reader = readers.JsonlReader(str(crawl), default_metadata={"language": "en"})
    return [reader, filters.LambdaFilter(is_short), steps.WriteParts(str(crawl.parent / "parts"), str(tokenizer_path))]


def write_config(folder: Path, tokenizer_path: Path) -> Path:
    source = {"name": "more", "path": str(folder / "more.txt"), "splitter": "lines", "epochs": 2}
    web = {"name": "web", "path": str(folder / "parts"), "format": "parts"}
    data = {"shards": str(folder / "shards"), "validation_fraction": 0.1, "sources": [web, source]}
    (folder / "pack.yaml").write_text(
        yaml.safe_dump({"tokenizer": {"tokenizer_path": str(tokenizer_path)}, "data": data})
    )
    return folder / "pack.yaml"


@pytest.mark.parametrize("tasks", [1, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_a_pipeline_gives_the_shards_of_one_process_however_tasks_share_the_files(
    crawl: Path, expected: list[str], tokenizer_path: Path, tmp_path: Path, tasks: int
) -> None:
    """Seven tasks for five files leave two without a document; they run in two processes."""
    workers = 2 if tasks == 7 else 1
    executors.LocalPipelineExecutor(
        pipeline(crawl, tokenizer_path), tasks=tasks, workers=workers, logging_dir=str(tmp_path / "logs")
    ).run()
    path = write_config(tmp_path, tokenizer_path)
    executors.LocalPipelineExecutor(
        [steps.WritePack(str(path))], tasks=1, logging_dir=str(tmp_path / "logs_of_pack")
    ).run()
    assert shard_hashes(tmp_path / "shards") == expected
    assert len(list((tmp_path / "parts").iterdir())) == tasks
    manifest = read_json(tmp_path / "shards" / "manifest.json")
    plain = read_json(tmp_path / "expected" / "manifest.json")
    assert manifest["duplicates"] == plain["duplicates"] > 0
    assert manifest["sources"]["more"] == plain["sources"]["more"]
    assert manifest["dropped"]["white_space"] == plain["dropped"]["white_space"] == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_ray_too(crawl: Path, expected: list[str], tokenizer_path: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        executors.RayPipelineExecutor(
            pipeline(crawl, tokenizer_path), tasks=3, workers=2, logging_dir=str(tmp_path / "logs"), mem_per_cpu_gb=0.5
        ).run()
    finally:
        ray.shutdown()
    steps.WritePack(str(write_config(tmp_path, tokenizer_path))).run()
    assert shard_hashes(tmp_path / "shards") == expected


@pytest.fixture
def parts(crawl: Path, tokenizer_path: Path, tmp_path: Path) -> Path:
    """The folder that three tasks wrote."""
    for rank in range(3):
        step, data = pipeline(crawl, tokenizer_path)[-1], readers.JsonlReader(str(crawl)).run(None, rank, 3)
        step.run(data, rank, 3)
    return tmp_path / "parts"


def test_parts_that_are_not_all_there_or_of_another_tokenizer_are_refused(
    make_config: MakeConfig, parts: Path, tmp_path: Path
) -> None:
    source = SourceSection("web", str(parts), format="parts")
    facts = read_json(parts / "task-00001-of-00003" / "task.json")

    def refusal(source: SourceSection) -> str:
        with pytest.raises(DataError) as refused:
            prepare(make_config(source), progress=False)
        return str(refused.value)

    assert "min_characters is for text" in refusal(SourceSection("web", str(parts), format="parts", min_characters=3))
    assert "holds no parts of a pipeline" in refusal(SourceSection("web", str(tmp_path / "nowhere"), format="parts"))
    with pytest.raises(DataError, match="encoded already; only prepare can use it"):
        next(read_documents(source, Skipped()))
    (parts / "task-00001-of-00003" / "task.json").write_text(json.dumps({**facts, "tokenizer_sha256": "0" * 64}))
    assert "task-00001-of-00003 was encoded with the tokenizer 000000000000..." in refusal(source)
    (parts / "task-00001-of-00003" / "task.json").write_text(json.dumps(facts))
    ids = next((parts / "task-00001-of-00003").glob("*.ids"))
    ids.write_bytes(ids.read_bytes()[:-2])
    assert "task-00001-of-00003 is damaged" in refusal(source)
    shutil.rmtree(parts / "task-00001-of-00003")
    assert "lacks task 1 of 3" in refusal(source)
    (parts / "task-00000-of-00004").mkdir()
    assert "tasks of pipelines of different sizes" in refusal(source)


def test_a_task_that_fails_leaves_nothing_and_one_that_is_run_again_replaces_its_parts(
    crawl: Path, parts: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()}
    step = steps.WriteParts(str(parts), str(tokenizer_path))

    def broken() -> Any:
        yield from readers.JsonlReader(str(crawl)).run(None, 1, 3)
        raise RuntimeError("the network went away")

    with pytest.raises(RuntimeError):
        step.run(broken(), 1, 3)
    step.run(readers.JsonlReader(str(crawl)).run(None, 1, 3), 1, 3)
    assert {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()} == before


def test_a_pack_is_written_by_one_task(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="written by one task, and this pipeline has 2"):
        steps.WritePack(str(tmp_path / "pack.yaml")).run(None, 0, 2)


@pytest.mark.parametrize("module", ["datatrove_steps", "near_duplicates"])
def test_without_the_extra_the_error_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"hf_tinylm.data.{module}", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "datatrove"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with pytest.raises(
        MissingExtraError, match=r"datatrove, which is not installed. Run: pip install 'hf-tinylm\[scale\]'"
    ):
        importlib.import_module(f"hf_tinylm.data.{module}")
