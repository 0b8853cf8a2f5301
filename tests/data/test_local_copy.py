"""A staged folder is copied once, verified at every start, and replaced when it or its source is not what it was."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.config import load_config
from hf_tinylm.data import local_copy as module
from hf_tinylm.data.local_copy import local_copy
from hf_tinylm.data.pack import open_pack
from hf_tinylm.data.shard_writer import ShardWriter
from hf_tinylm.data.shards import load_shards
from hf_tinylm.errors import ConfigError, DataError, TrainingError


def write_pack(folder: Path, first_id: int = 5) -> None:
    """Several shards of 64 ids."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, 300, separator_id=0, shard_ids=64)
    for number in range(20):
        writer.add("train", "web", np.full(15, first_id + number))
    writer.add("validation", "web", np.array([9, 9]))
    separator = {"token": "<|endoftext|>", "id": 0, "policy": "first id of each document"}
    writer.finish({"tokenizer_sha256": "t", "separator": separator, "sources": {}})


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    write_pack(tmp_path / "far" / "pack")
    return tmp_path / "far" / "pack"


@pytest.fixture
def stage(tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Stages the pack as another start would, which trusts nothing that was verified before it began."""

    def run() -> Path:
        began = time.time()
        monkeypatch.setattr(module.psutil.Process, "create_time", lambda _: began)
        return local_copy(pack, tmp_path / "near", "shards")

    return run


def places(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_copy_is_a_whole_pack_and_is_used_again_without_copying(pack: Path, stage: Callable[[], Path]) -> None:
    copy = stage()
    found, expected = load_shards(copy, verify=True), load_shards(pack)
    assert copy != pack
    assert found.manifest_sha256 == expected.manifest_sha256
    assert [s.ids.tolist() for s in found.train] == [s.ids.tolist() for s in expected.train]
    before = places(copy)
    os.utime(pack / "manifest.json")
    assert stage() == copy
    assert places(copy) == before


@pytest.mark.parametrize("damage", ["flipped byte", "shorter", "missing", "record"])
def test_a_damaged_copy_is_replaced_and_told(
    stage: Callable[[], Path], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = stage()
    expected = {path.name: path.read_bytes() for path in (copy / "train").iterdir()}
    victim = copy / "train" / "data-00002-of-00005.arrow"
    if damage == "flipped byte":
        content = bytearray(victim.read_bytes())
        content[-100] ^= 1
        victim.write_bytes(content)
    elif damage == "shorter":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "missing":
        victim.unlink()
    else:
        (copy.parent / "staged.json").write_text("{")
    assert stage() == copy
    assert {path.name: path.read_bytes() for path in (copy / "train").iterdir()} == expected
    told = capsys.readouterr().err
    assert ("staged.json is damaged" if damage == "record" else f"{victim.name} is damaged") in told


def test_a_pack_that_was_written_again_replaces_its_old_copy(pack: Path, stage: Callable[[], Path]) -> None:
    copy = stage()
    shutil.rmtree(pack)
    write_pack(pack, first_id=100)
    assert stage() == copy
    assert load_shards(copy, verify=True).train[0].ids[1] == 100
    assert len([path for path in copy.parent.parent.iterdir() if path.is_dir()]) == 1


def test_a_damaged_source_is_an_error_with_its_shard_and_leaves_no_copy(pack: Path, stage: Callable[[], Path]) -> None:
    victim = pack / "train" / "data-00001-of-00005.arrow"
    content = bytearray(victim.read_bytes())
    content[200] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DataError, match=r"train/data-00001-of-00005\.arrow of .*pack is damaged"):
        stage()
    assert not any(path.is_dir() for path in pack.parents[1].joinpath("near").iterdir())
    victim.unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00005\.arrow of .*pack does not exist"):
        stage()


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"files": {"a": {}}}', '{"files": {"../a": {"bytes": 1, "sha256": "0"}}}']
)
def test_a_manifest_that_makes_no_sense_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        local_copy(tmp_path / "pack", tmp_path / "near", "shards")


def test_too_little_room_is_refused_before_the_copy_with_both_numbers(
    pack: Path, stage: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(path.stat().st_size for path in pack.rglob("data-*")) + (pack / "manifest.json").stat().st_size
    usage = shutil.disk_usage(pack)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    monkeypatch.setattr(module, "atomic_folder", None)
    with pytest.raises(ConfigError, match=rf"{(needed - 1) / 1e9:.3f} GB free and .* needs {needed / 1e9:.3f} GB"):
        stage()


def test_of_several_processes_one_copies_and_the_others_wait(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads stand for processes: each opens the lock for itself."""
    copies, verified, found = [], [], []
    copy, fault = module._copy, module._fault

    def slow(*arguments: Any) -> None:
        copies.append(arguments)
        time.sleep(0.5)
        copy(*arguments)

    monkeypatch.setattr(module, "_copy", slow)
    monkeypatch.setattr(module, "_fault", lambda *arguments: (verified.append(1), fault(*arguments))[1])
    threads = [
        threading.Thread(target=lambda: found.append(local_copy(pack, tmp_path / "near", "shards"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (len(copies), len(verified), len(set(found)), len(found)) == (1, 1, 1, 4)
    assert capsys.readouterr().err.count("waiting for another process to copy") == 3


def test_waiting_for_a_process_that_is_stuck_ends_with_a_line(
    stage: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.5)
    lock = Path(f"{stage().parent}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match=r"has made no progress for 1 s\. Look for it"):
            stage()


def test_what_a_killed_copy_left_is_removed(pack: Path, stage: Callable[[], Path]) -> None:
    slot = stage().parent
    slot.rename(slot.with_name(f".tmp-{slot.name}-0a1b2c3d"))
    Path(f"{slot}.lock").write_text('{"wanted": "cut off')
    assert load_shards(stage(), verify=True)
    assert [path.name for path in slot.parent.iterdir() if path.is_dir()] == [slot.name]


def test_a_model_folder_without_a_manifest_is_copied_again_when_it_changed(tmp_path: Path) -> None:
    model = tmp_path / "final"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = local_copy(model, tmp_path / "near", "init_from")
    before = places(first)
    assert places(local_copy(model, tmp_path / "near", "init_from")) == before
    (model / "config.json").write_text('{"a": 1}')
    assert json.loads((local_copy(model, tmp_path / "near", "init_from") / "config.json").read_text()) == {"a": 1}


def test_a_folder_of_something_else_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    with pytest.raises(ConfigError, match=r"neither manifest\.json nor config\.json"):
        local_copy(tmp_path / "photos", tmp_path / "near", "init_from")
    assert not (tmp_path / "near").exists()


def test_folders_that_appear_when_they_are_opened_are_found(
    tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An automounter: what is under a mount point exists once the mount point itself was opened, after a moment."""
    mount, asked = tmp_path / "net", []
    mount.mkdir()
    plain = os.open

    def opened(path: Any, *arguments: Any, **keys: Any) -> int:
        if Path(path) == mount:
            asked.append(path)
        if Path(path) == mount / "share" and asked and not (mount / "share").exists():
            asked.append(path)
            if len(asked) == 3:
                shutil.copytree(pack.parent, mount / "share")
        return plain(path, *arguments, **keys)

    monkeypatch.setattr(module.os, "open", opened)
    monkeypatch.setattr(module, "_PROBE_SECONDS", 0.01)
    assert load_shards(local_copy(mount / "share" / "pack", tmp_path / "near", "shards"), verify=True)
    with pytest.raises(ConfigError, match=r"other/pack does not exist: .*net/other is not in .*net\."):
        local_copy(mount / "other" / "pack", tmp_path / "near", "shards")


def test_a_pack_opened_from_its_copy_is_the_same_pack(tiny_config: Path, tmp_path: Path) -> None:
    far = open_pack(load_config(str(tiny_config)))
    near = open_pack(load_config(str(tiny_config), ["--stage_dir", str(tmp_path / "near")]))
    assert near.identity == far.identity
    assert near.shards.path.is_relative_to(tmp_path / "near")
    assert near.train.gather(range(9)).tolist() == far.train.gather(range(9)).tolist()
