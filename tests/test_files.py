"""Files are whole or absent, and their hashes are those of other tools."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from hf_tinylm import files
from hf_tinylm.errors import ConfigError
from hf_tinylm.files import (
    atomic_file,
    atomic_folder,
    bundled,
    read_json,
    read_record,
    read_rows,
    refuse_folder_in_use,
    replace_link,
    sha256_of_file,
    sha256_of_json,
    write_json,
    write_text,
)


class Stopped(Exception):
    """The process dies here."""


def write_and_stop(path: Path) -> None:
    path.write_text("half")
    raise Stopped


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "a.txt"
    with atomic_file(target) as temporary:
        temporary.write_text("half")
        assert not target.exists()
        assert temporary.parent == target.parent
    assert target.read_text() == "half"
    assert names_in(target.parent) == ["a.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(Stopped), atomic_file(target) as temporary:
        write_and_stop(temporary)
    assert target.read_text() == "old"
    assert names_in(tmp_path) == ["a.txt"]


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = files.fsync_path, os.replace
    monkeypatch.setattr(files, "fsync_path", lambda path: (order.append(f"fsync {Path(path).name[:5]}"), fsync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b)))
    write_text(tmp_path / "a.txt", "x")
    assert order == ["fsync .tmp-", "rename", f"fsync {tmp_path.name[:5]}"]


def test_a_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "run"
    with atomic_folder(target) as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "a").write_text("x")
        assert not target.exists()
    assert (target / "inner" / "a").read_text() == "x"
    assert names_in(target.parent) == ["run"]


def test_every_file_of_a_folder_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    fsync, rename = files.fsync_path, os.rename
    monkeypatch.setattr(files, "fsync_path", lambda path: (order.append(Path(path).name), fsync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b)))
    with atomic_folder(tmp_path / "run") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "a").write_text("x")
    assert order == ["a", "inner", temporary.name, "rename", tmp_path.name]


def test_a_failed_folder_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "old").write_text("x")
    with pytest.raises(Stopped), atomic_folder(target, replace=True) as temporary:
        write_and_stop(temporary / "new")
    assert names_in(target) == ["old"]
    assert names_in(tmp_path) == ["run"]


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "old").write_text("x")
    rename = os.rename

    def fail_for_the_new_one(source: Path, destination: Path) -> None:
        if (Path(source) / "new").exists():
            raise OSError(28, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="No space left"), atomic_folder(target, replace=True) as temporary:
        (temporary / "new").write_text("y")
    assert names_in(target) == ["old"]
    assert names_in(tmp_path) == ["run"]


def test_replacing_a_folder_keeps_nothing_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "run"
    for name in ("old", "new"):
        with atomic_folder(target, replace=True) as temporary:
            (temporary / name).write_text("x")
    assert names_in(target) == ["new"]
    assert names_in(tmp_path) == ["run"]


def test_a_folder_in_use_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    with atomic_folder(target) as temporary:  # empty: free to use
        (temporary / "a").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"), atomic_folder(target):
        raise AssertionError("the block must not run")
    file = tmp_path / "file"
    file.write_text("x")
    for replace in (False, True):
        with pytest.raises(ConfigError, match="is a file"), atomic_folder(file, replace=replace):
            raise AssertionError("the block must not run")
    refuse_folder_in_use(tmp_path / "missing")
    assert names_in(tmp_path) == ["file", "run"]


def test_a_link_stays_a_link_and_what_it_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    (tmp_path / "a.txt").symlink_to(tmp_path / "disk" / "a.txt")
    for text in ("one", "two"):
        write_text(tmp_path / "a.txt", text)
        with atomic_folder(tmp_path / "run", replace=True) as temporary:
            (temporary / text).write_text(text)
    assert (tmp_path / "run").is_symlink()
    assert (tmp_path / "a.txt").is_symlink()
    assert names_in(tmp_path / "disk" / "run") == ["two"]
    assert (tmp_path / "disk" / "a.txt").read_text() == "two"


def test_text_is_written_as_utf8_with_plain_line_ends(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "Zürich\r\n🙂\n")
    assert (tmp_path / "a.txt").read_bytes() == "Zürich\r\n🙂\n".encode()


def test_json_reads_back_in_the_same_order(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None, True], "a": {"ü": "🙂"}}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert read_json(tmp_path / "a.json") == json.loads(text) == value
    assert list(json.loads(text)) == ["b", "a"]
    assert "🙂" in text
    assert text.endswith("}\n")


def test_a_number_that_json_does_not_have_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5_000], ids=lambda c: str(c[:4]))
def test_a_damaged_json_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.json is not valid JSON"):
        read_json(tmp_path / "a.json")


def test_a_missing_json_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"b\.json does not exist"):
        read_json(tmp_path / "b.json")


def test_hashes_are_those_of_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    large = os.urandom(3_000_000)
    (tmp_path / "b").write_bytes(large)
    assert sha256_of_file(tmp_path / "b") == hashlib.sha256(large).hexdigest()


def test_the_hash_of_a_value_ignores_the_order_of_keys_and_nothing_else() -> None:
    expected = hashlib.sha256('{"a":[1,"ü"],"b":null}'.encode()).hexdigest()
    assert sha256_of_json({"b": None, "a": [1, "ü"]}) == sha256_of_json({"a": [1, "ü"], "b": None}) == expected
    assert sha256_of_json({"a": ["ü", 1], "b": None}) != expected
    assert sha256_of_json("\ud800") != sha256_of_json("?")


def test_bundled_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled("recipes", "corpora", "austen.txt.xz").stat().st_size > 1_000_000
    with pytest.raises(ConfigError, match="recipes/nothing is not part of this installation"):
        bundled("recipes", "nothing")


def test_a_link_is_moved_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "old").mkdir(parents=True)
    (tmp_path / "models" / "new").mkdir()
    link = tmp_path / "current"
    link.symlink_to("models/old")
    replace_link(link, tmp_path / "models" / "new")
    assert os.readlink(link) == "models/new"

    def fail(*arguments: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no"):
            replace_link(link, tmp_path / "models" / "old")
    assert os.readlink(link) == "models/new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "models"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[]", "does not hold an obj"),
        ("null", "does not hold an obj"),
        ('{"a": 1}', "has no b"),
        ("{", "not valid JSON"),
    ],
)
def test_a_record_that_lacks_what_it_is_read_for_is_named(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"run\.json .*{told}"):
        read_record(tmp_path / "run.json", "a", "b")
    (tmp_path / "run.json").write_text('{"a": 1, "b": null}')
    assert read_record(tmp_path / "run.json", "a", "b") == {"a": 1, "b": None}


def test_rows_of_a_file_that_are_no_objects_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n3\nnull\n[1]\n"x"\n{"step": 2}\n{"ste')
    assert read_rows(tmp_path / "rows.jsonl") == [{"step": 1}, {"step": 2}]
