from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hf_tinylm.contract import check_contract, difference, environment, new_contract, write_contract
from hf_tinylm.errors import ContractError


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_clean_checkout_gives_its_commit_and_a_dirty_one_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "recipe.py").write_text("rate = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    monkeypatch.chdir(tmp_path)
    clean = environment()
    assert len(clean["git_commit"]) == 40
    assert (clean["git_dirty"], clean["git_diff"]) == (False, None)
    (tmp_path / "recipe.py").write_text("rate = 2\n")
    dirty = environment()
    assert dirty["git_dirty"] is True
    assert "-rate = 1" in dirty["git_diff"]
    assert "+rate = 2" in dirty["git_diff"]
    (tmp_path / "recipe.py").write_bytes(b"name = 'M\xfcller'\n")  # Latin-1, which is not UTF-8
    assert "+name = 'M\ufffdller'" in environment()["git_diff"]
    git(tmp_path, "checkout", "-q", ".")
    (tmp_path / "untracked.py").write_text("x = 1\n")
    untracked = environment()
    assert (untracked["git_dirty"], untracked["git_diff"]) == (True, None)


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment()["git_commit"] is None


def test_differences_name_every_leaf_with_both_values() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "gone": 3}
    new = {"a": {"b": 2, "c": [1, 2]}, "new": None, "fresh": 4}
    assert difference(old, new) == ["a.b: 1 -> 2", "gone: 3 -> None", "fresh: None -> 4"]
    assert difference(old, old) == []


def test_identity_must_match_and_execution_may_differ(tmp_path: Path) -> None:
    recorded = new_contract({"seed": 1}, {"processes": 1}, None, {})
    write_contract(tmp_path, recorded)
    assert check_contract(tmp_path, new_contract({"seed": 1}, {"processes": 2}, None, {})) == ["processes: 1 -> 2"]
    with pytest.raises(ContractError, match="seed: 1 -> 2"):
        check_contract(tmp_path, new_contract({"seed": 2}, {"processes": 1}, None, {}))


def test_a_folder_without_a_record_and_a_finished_one_are_refused(tmp_path: Path) -> None:
    contract = new_contract({}, {}, None, {})
    with pytest.raises(ContractError, match="no run to resume"):
        check_contract(tmp_path, contract)
    write_contract(tmp_path, contract)
    (tmp_path / "DONE.json").write_text("{}")
    with pytest.raises(ContractError, match="finished run"):
        check_contract(tmp_path, contract)
