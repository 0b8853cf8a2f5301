"""Worker processes: the same bytes as one process, a death that is told at once, and a run that goes on after one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hf_tinylm.data import prepare as prepare_module
from hf_tinylm.data import readers, splitters, staging
from hf_tinylm.data import workers as workers_module
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.errors import ContractError, DataError, PreparationError
from hf_tinylm.files import sha256_of_file
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.load import load_tokenizer

MakeConfig = Callable[..., RunConfig]


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): sha256_of_file(path) for path in files}


def worker_processes(parent: int | None = None) -> list[psutil.Process]:
    found = psutil.Process(parent or os.getpid()).children(recursive=True)
    return [process for process in found if "hf_tinylm.data.encoding" in process.cmdline()]


@pytest.fixture
def prose(tmp_path: Path, texts: list[str]) -> Path:
    """6 MB in one file: each word a different one now and then, so that no paragraph is a copy."""
    lines = [f"{number} {texts[number % 200]}" for number in range(40_000)]
    (tmp_path / "prose.txt").write_text("\n\n".join(lines), encoding="utf-8")
    return tmp_path / "prose.txt"


def test_large_and_small_documents_are_the_same_in_one_process_and_in_three(
    make_config: MakeConfig, texts: list[str], tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document comes in pieces, between others that do not; three files, so several chunks."""
    monkeypatch.setattr(splitters, "CHUNK_BYTES", 700)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2000)
    large = " ".join(texts[:40])
    (tmp_path / "a.txt").write_text("\n\n".join([*texts[40:80], large, *texts[80:]]), encoding="utf-8")
    (tmp_path / "b.txt").write_text(" \n".join(texts), encoding="utf-8")
    sources = [
        SourceSection("a", str(tmp_path / "a.txt"), splitter="paragraphs_1"),
        SourceSection("b", str(tmp_path / "b.txt")),
    ]
    found = []
    for workers in (1, 3):
        monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 100)
        config = make_config(*sources, shards=f"shards{workers}", validation_fraction=0.2)
        config.data.num_workers, config.data.shard_ids = workers, 2000
        prepare(config, progress=False)
        found.append(hashes(tmp_path / f"shards{workers}"))
    assert found[0] == found[1]
    tokenizer = load_tokenizer(tokenizer_path)
    shards = load_shards(tmp_path / "shards1", verify=True)
    rows = []
    for shard in shards.train + shards.validation:
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            ids = shard.ids[start:end].tolist()
            if ids[0] == 0:
                rows.append(ids)
            else:
                rows[-1] += ids
    assert sorted(rows) == sorted([0, *tokenizer(t).input_ids] for t in [*texts[40:], large, " \n".join(texts)])


def test_an_error_in_a_worker_is_that_of_one_process(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 10)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "bad \xff"}\n')
    config = make_config(SourceSection("a", str(tmp_path / "a.jsonl")))
    config.data.num_workers = 2
    with pytest.raises(DataError, match=r"a\.jsonl is not valid UTF-8: byte 0xff at offset 31"):
        prepare(config, progress=False)
    assert worker_processes() == []


def test_a_killed_worker_is_an_error_with_its_input_and_the_next_run_goes_on(
    make_config: MakeConfig, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PART_IDS", 2**18)
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 2**20)
    config = make_config(SourceSection("prose", str(prose), splitter="paragraphs_500"), validation_fraction=0.01)
    config.data.num_workers = 2
    work = tmp_path / ".prepare-shards"

    def kill_one() -> None:
        while not list(work.glob("source-*/*.json")):
            time.sleep(0.01)
        os.kill(worker_processes()[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    began = time.monotonic()
    with pytest.raises(PreparationError, match=r"killed by signal 9 while it encoded .*prose\.txt from byte [\d,]+ on"):
        prepare(config, progress=False)
    assert time.monotonic() - began < 60
    killer.join()
    assert worker_processes() == []
    assert not (tmp_path / "shards").exists()
    kept = {path: path.stat().st_mtime_ns for path in work.glob("source-*/*.json")}
    assert kept
    first_part = next(work.glob("source-*/00000.ids"))
    inode = first_part.stat().st_ino
    untouched = prepare_module.Stage.close_part
    closed: list[str] = []
    monkeypatch.setattr(
        prepare_module.Stage,
        "close_part",
        lambda self, done=False: (closed.append(self._path().name), untouched(self, done))[1],
    )
    assert first_part.stat().st_ino == inode
    prepare(config, progress=False)
    assert min(closed) == f"{len(kept):05d}"
    config.data.shards, config.data.num_workers = str(tmp_path / "whole"), 1
    prepare(config, progress=False)
    assert hashes(tmp_path / "shards") == hashes(tmp_path / "whole")


def test_a_worker_that_hangs_is_an_error_with_its_input(
    make_config: MakeConfig, prose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert workers_module.HANG_SECONDS + 2 * workers_module.LOOK_SECONDS < 60
    monkeypatch.setattr(workers_module, "HANG_SECONDS", 2.0)
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 2**20)
    config = make_config(SourceSection("prose", str(prose), splitter="paragraphs_500"), validation_fraction=0.01)
    config.data.num_workers = 2

    def stop_one() -> None:
        while len(found := worker_processes()) < 2:
            time.sleep(0.01)
        os.kill(found[0].pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop_one)
    stopper.start()
    began = time.monotonic()
    with pytest.raises(
        PreparationError, match=r"did nothing for 2 s.* while it encoded .*prose\.txt from byte [\d,]+ on"
    ):
        prepare(config, progress=False)
    assert time.monotonic() - began < 20
    stopper.join()
    assert worker_processes() == []


def test_a_worker_that_takes_long_over_a_document_is_left_to_work(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word of two million letters, which takes longer than a worker may do nothing."""
    monkeypatch.setattr(workers_module, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(workers_module, "LOOK_SECONDS", 0.1)
    word = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=2_000_000))
    (tmp_path / "word.txt").write_text("".join(f"line {number}\n" for number in range(20)) + word)
    config = make_config(SourceSection("word", str(tmp_path / "word.txt"), splitter="lines"), validation_fraction=0.5)
    config.data.num_workers, config.data.shard_ids = 2, 2**23
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 2**20)
    took: list[float] = []
    encode = workers_module.Workers._encode_there

    def timed(self: workers_module.Workers, *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return encode(self, *arguments)
        finally:
            took.append(time.monotonic() - began)

    monkeypatch.setattr(workers_module.Workers, "_encode_there", timed)
    assert prepare(config, progress=False)["documents"] == 21
    assert max(took) > 0.5


def test_two_runs_do_not_write_one_pack(make_config: MakeConfig, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    config = make_config(SourceSection("a", str(tmp_path / "a.txt"), splitter="paragraphs_1"))
    lock = prepare_module.FileLock(tmp_path / ".prepare-shards.lock", tmp_path, "")
    lock.acquire()
    with pytest.raises(ContractError, match=rf"shards is being written by process {os.getpid()} .*another folder"):
        prepare(config, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".prepare-shards.lock", "a.txt"]
    lock.release()
    prepare(config, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "shards"]


def test_a_killed_run_leaves_no_process_and_no_pack_and_the_next_gives_the_same_hashes(
    prose: Path, tokenizer_path: Path, tmp_path: Path
) -> None:
    settings = {
        "tokenizer": {"tokenizer_path": str(tokenizer_path)},
        "data": {
            **{"num_workers": 2, "validation_fraction": 0.01},
            "sources": [{"name": "prose", "path": str(prose), "splitter": "paragraphs_500"}],
        },
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "hf_tinylm.cli", "prepare", "--config", str(tmp_path / "c.yaml"), "--shards"]
    # Parts of this size are not closed before the end, so some work is lost and some is done again.
    running = subprocess.Popen([*command, str(tmp_path / "shards")], stderr=subprocess.DEVNULL)
    while not (list((tmp_path / ".prepare-shards").glob("source-*/00000.ids")) and worker_processes(running.pid)):
        assert running.poll() is None
        time.sleep(0.01)
    workers = worker_processes(running.pid)
    running.kill()
    running.wait()
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert not (tmp_path / "shards").exists()
    for name in ("shards", "whole"):
        subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True)
    assert hashes(tmp_path / "shards") == hashes(tmp_path / "whole")
    assert not (tmp_path / ".prepare-shards").exists()
