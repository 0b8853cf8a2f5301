"""`verify-run` on a copy of a finished run, and on copies of which one thing was changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
import yaml

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.data.prepare import prepare
from hf_tinylm.files import bundled, sha256_of_json
from hf_tinylm.locks import FileLock
from hf_tinylm.preflight import moved_run


@pytest.fixture(scope="module")
def moved(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished `run` and its `shards`, whose originals nothing points at any more."""
    folder = tmp_path_factory.mktemp("moved")
    away = tmp_path_factory.mktemp("away")
    shutil.copytree(tiny_config.parent / "tokenizer", away / "tokenizer")
    shutil.copytree(tiny_config.parent / "shards", folder / "shards")
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    settings = ["--tokenizer_path", str(away / "tokenizer"), "--save_steps", "3", "--gguf", "[]", "--verify", "false"]
    assert recipe(["--config", str(tiny_config), "--output_dir", str(away / "run"), *settings]) == 0
    shutil.move(away / "run", folder / "run")
    shutil.rmtree(away)
    return folder


Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """`hf-tinylm verify-run` on a folder: the exit code, and the checks that failed with what they found."""

    def run(folder: Path, *options: str, shards: Path | None = None) -> tuple[int, dict[str, Any]]:
        where = ["--shards", str(shards or folder / "shards")]
        code = main(["verify-run", str(folder / "run"), *where, "--json", *options])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return code, {check["name"]: check["value"] for check in checks if check["ok"] is False}

    return run


@pytest.fixture
def copy(moved: Path, tmp_path: Path) -> Path:
    """A copy of `moved`, to change."""
    return Path(shutil.copytree(moved, tmp_path / "copy"))


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_moved_run_passes_with_the_same_loss_to_the_last_bit(copy: Path, verify: Verify) -> None:
    before = (copy / "run" / "events.jsonl").read_text()
    assert verify(copy) == (0, {})
    events = [json.loads(line) for line in (copy / "run" / "events.jsonl").read_text().splitlines()]
    assert (copy / "run" / "events.jsonl").read_text().startswith(before)
    assert len(events) == len(before.splitlines()) + 1
    verified = events[-1]
    assert (verified["event"], verified["step"], verified["ok"], verified["failures"]) == ("verified", 6, True, {})
    assert set(verified["checks"]) == {each.name for each in moved_run.RULES}
    assert not (copy / "run" / "run.lock").exists()
    assert main(["verify-run", str(copy / "run"), "--shards", str(copy / "shards"), "--checkpoint", "3"]) == 0
    assert main(["verify-run", str(copy / "run"), "--shards", str(copy / "shards"), "--checkpoint", "4"]) == 1


def test_the_loss_that_is_computed_again_is_exact_and_has_a_tolerance_elsewhere(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify-run", str(copy / "run"), "--shards", str(copy / "shards"), "--json"]

    def loss_check() -> dict[str, Any]:
        main(command)
        return next(c for c in json.loads(capsys.readouterr().out)["checks"] if c["name"] == "validation loss")

    exact = loss_check()
    recorded = json.loads((copy / "run" / "checkpoint-00000006" / "trainer_state.json").read_text())["eval_loss"]
    assert exact["value"].startswith(repr(recorded))
    assert (exact["ok"], exact["expected"], exact["detail"]) == (True, f"{recorded!r}, exactly", [])
    plain = moved_run.validate
    monkeypatch.setattr(moved_run, "validate", lambda *args: {"loss": plain(*args)["loss"] + 2e-6})
    assert loss_check()["ok"] is False
    monkeypatch.setattr(moved_run, "device_name", lambda device: "another CPU")
    elsewhere = loss_check()
    assert (elsewhere["ok"], elsewhere["expected"]) == (True, f"{recorded!r}, within 1e-05")
    assert elsewhere["detail"][0].startswith("device_name: ")
    monkeypatch.setattr(moved_run, "validate", lambda *args: {"loss": plain(*args)["loss"] + 2e-5})
    assert loss_check()["ok"] is False


@pytest.mark.parametrize("name", ["model", "optimizer", "rng-00000"])
def test_a_changed_byte_in_a_checkpoint_is_named(copy: Path, verify: Verify, name: str) -> None:
    flip(copy / "run" / "checkpoint-00000003" / f"{name}.safetensors")
    code, failed = verify(copy)
    assert (code, set(failed)) == (1, {"checkpoints"})
    assert failed["checkpoints"] == f"checkpoint-00000003: the SHA-256 of {name}.safetensors differs from the manifest"
    last = json.loads((copy / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["ok"], set(last["failures"])) == (False, {"checkpoints"})
    assert last["checks"]["validation loss"] is None


def test_a_manifest_that_was_made_to_fit_is_found_by_what_the_run_wrote_last(copy: Path, verify: Verify) -> None:
    checkpoint = copy / "run" / "checkpoint-00000006"
    edit(checkpoint / "manifest.json", lambda manifest: manifest.update(note="harmless"))
    code, failed = verify(copy)
    assert (code, set(failed)) == (1, {"checkpoints"})
    assert "checkpoint-00000006" in failed["checkpoints"]


def test_a_changed_byte_in_a_shard_is_named(copy: Path, verify: Verify) -> None:
    shard = next((copy / "shards" / "train").glob("*.arrow"))
    flip(shard, shard.stat().st_size // 2)
    code, failed = verify(copy)
    assert (code, set(failed)) == (1, {"shards"})
    assert f"train/{shard.name}" in failed["shards"]


def test_a_changed_byte_in_the_tokenizer_or_the_final_model_is_named(copy: Path, verify: Verify) -> None:
    def swap(value: Any) -> None:
        vocabulary = value["model"]["vocab"]
        a, b = list(vocabulary)[300:302]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]

    edit(copy / "run" / "final" / "tokenizer.json", swap)
    flip(copy / "run" / "final" / "model.safetensors")
    code, failed = verify(copy)
    assert (code, set(failed)) == (1, {"final", "tokenizer"})
    assert failed["final"] == "final/model.safetensors, final/tokenizer.json differ"
    assert str(copy / "run" / "final") in failed["tokenizer"]


def test_another_tokenizer_given_by_path_fails(copy: Path, verify: Verify) -> None:
    other = shutil.copytree(copy / "run" / "final", copy / "other")
    edit(other / "tokenizer.json", lambda value: value["model"]["merges"].pop())
    code, failed = verify(copy, "--tokenizer", str(other))
    assert (code, set(failed)) == (1, {"tokenizer"})


def test_a_changed_seed_is_named_even_where_the_checkpoints_were_made_to_fit(copy: Path, verify: Verify) -> None:
    def reseed(run: Any) -> None:
        run["identity"]["training"]["seed"] = run["config"]["training"]["seed"] = 43

    edit(copy / "run" / "run.json", reseed)
    code, failed = verify(copy)
    assert (code, set(failed)) == (1, {"seed", "identity", "windows"})
    assert failed["seed"] == "43"
    assert (
        failed["windows"] == "update 1: other ids and text; update 4: other ids and text; update 6: other ids and text"
    )


def test_a_seed_changed_in_the_configuration_alone_is_named(copy: Path, verify: Verify) -> None:
    edit(copy / "run" / "run.json", lambda run: run["config"]["training"].update(seed=43))
    assert verify(copy) == (1, {"seed": "42 and 43"})


def test_any_other_edit_of_what_the_run_is_is_found(copy: Path, verify: Verify) -> None:
    edit(copy / "run" / "run.json", lambda run: run["identity"]["training"].update(learning_rate=2e-3))
    code, failed = verify(copy)
    assert (code, set(failed)) == (1, {"identity"})
    assert failed["identity"] == "not of this run.json: checkpoint-00000003, checkpoint-00000006"


def test_a_pack_prepared_again_passes_and_one_of_more_text_does_not(
    tiny_config: Path, copy: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    again = copy / "again"
    tokenizer = ["--tokenizer_path", str(tiny_config.parent / "tokenizer")]
    prepare(load_config(str(tiny_config), [*tokenizer, "--shards", str(again)]), progress=False)
    manifest = again / "manifest.json"
    edit(manifest, lambda value: value.update(command=["elsewhere"]))  # written by another invocation
    assert verify(copy, shards=again) == (0, {})
    values = yaml.safe_load(tiny_config.read_text())
    more = copy / "more.txt"
    more.write_text((tiny_config.parent / "prose.txt").read_text() + "\n\nOne more paragraph.\n" * 60)
    values["data"]["sources"][0]["path"] = str(more)
    (copy / "more.yaml").write_text(yaml.safe_dump(values))
    prepare(load_config(str(copy / "more.yaml"), [*tokenizer, "--shards", str(copy / "more")]), progress=False)
    code, failed = verify(copy, shards=copy / "more")
    assert code == 1
    assert "shards" in failed


def test_what_is_no_run_ends_with_one_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error_of(*arguments: str) -> tuple[int, str]:
        code = main(["verify-run", *arguments])
        return code, capsys.readouterr().err

    code, line = error_of(str(copy / "shards"), "--shards", str(copy / "shards"))
    assert (code, "run.json does not exist" in line) == (2, True)
    code, line = error_of(str(copy / "run"), "--shards", str(copy / "shards"), "--checkpoint", "5")
    assert (code, "the checkpoints are of updates 3, 6" in line) == (1, True)
    edit(copy / "run" / "run.json", lambda run: run["identity"].update(data={"conversations_sha256": "ab"}))
    code, line = error_of(str(copy / "run"), "--shards", str(copy / "shards"))
    assert (code, "run on conversations" in line) == (2, True)
    assert line.count("\n") == 1


def test_a_run_that_is_being_written_is_left_alone_and_a_trace_of_a_crash_stays(copy: Path, verify: Verify) -> None:
    lock = copy / "run" / "run.lock"
    trace = {"host": "elsewhere", "pid": 7, "started": 1.0}
    lock.write_text(json.dumps(trace))
    command = ["verify-run", str(copy / "run"), "--shards", str(copy / "shards")]
    assert main(command) == 2  # it spoke a moment ago
    os.utime(lock, (1.0, 1.0))
    assert verify(copy) == (0, {})
    assert json.loads(lock.read_text()) == trace


def test_the_hash_of_an_identity_is_what_checkpoints_carry(copy: Path) -> None:
    run = json.loads((copy / "run" / "run.json").read_text())
    state = json.loads((copy / "run" / "checkpoint-00000006" / "trainer_state.json").read_text())
    assert state["identity_sha256"] == sha256_of_json(run["identity"])
    assert (state["seed"], run["execution"]["device"]) == (42, torch.device("cpu").type)


def test_an_archive_that_may_not_be_written_to_is_verified_and_left_as_it_is(
    copy: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copy / "run" / "events.jsonl").read_bytes()
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != copy / "run" and writable(path, mode))
    monkeypatch.setattr(FileLock, "acquire", lambda self: pytest.fail("a lock needs a file"))
    assert verify(copy) == (0, {})
    assert (copy / "run" / "events.jsonl").read_bytes() == before
    flip(copy / "run" / "checkpoint-00000006" / "model.safetensors")
    code, failed = verify(copy)
    assert (code, "checkpoints" in failed) == (1, True)
    assert main(["verify-run", str(copy / "run"), "--shards", str(copy / "shards")]) == 1
    assert "may not be written to" in capsys.readouterr().err
