from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.export.hub import collect
from hf_tinylm.files import sha256_of_file
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.load import load_tokenizer

READ = """
import json, sys, torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = AutoTokenizer.from_pretrained(sys.argv[1])("It is a truth", return_tensors="pt").input_ids
print(json.dumps({"logits": model(ids).logits.double().sum().item(), "folder": snapshot_download(sys.argv[1])}))
"""


@pytest.fixture(scope="module")
def run(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder: final model and tokenizer, a file beside it that passes for GGUF, and private things."""
    config = load_config(str(tiny_config))
    folder = tmp_path_factory.mktemp("run")
    tokenizer = load_tokenizer(str(config.tokenizer.tokenizer_path))
    save_stock_model(new_model(config.model, 512, 32, seed=1), folder / "final", tokenizer)
    (folder / "final" / "README.md").write_text("---\nlibrary_name: transformers\n---\n# mine\n")
    (folder / "run-F16.gguf").write_bytes(b"GGUF" + bytes(100_000))
    (folder / "checkpoint-00000002").mkdir()
    (folder / "checkpoint-00000002" / "optimizer.safetensors").write_bytes(b"x")
    (folder / "run.json").write_text("{}")
    return folder


def pushed(hub: Any, run: Path, name: str, *more: str, **env: str) -> tuple[int, str, dict[str, Any]]:
    done = hub.cli("push", str(run), "--repo_id", name, "--json", *more, **env)
    return done.returncode, done.stderr, json.loads(done.stdout) if done.returncode == 0 else {}


def test_a_pushed_run_is_private_and_comes_back_with_equal_files_and_logits(hub: Any, run: Path) -> None:
    code, errors, found = pushed(hub, run, "tester/equal")
    assert code == 0, errors
    assert found["private"]
    assert hub.is_private("tester/equal", "models")
    again = pushed(hub, run, "tester/equal")
    assert again[0] == 0, again[1]
    read = hub.run("-c", READ, "tester/equal")
    assert read.returncode == 0, read.stderr
    back = json.loads(read.stdout.splitlines()[-1])
    local = hub.run("-c", READ.replace(', "folder": snapshot_download(sys.argv[1])', ""), str(run / "final"))
    assert back["logits"] == json.loads(local.stdout.splitlines()[-1])["logits"]
    files = {p.relative_to(back["folder"]).as_posix(): p for p in Path(back["folder"]).rglob("*") if p.is_file()}
    assert set(files) - {".gitattributes"} == set(found["files"])
    assert {"model.safetensors", "tokenizer.json", "README.md", "run-F16.gguf"} <= set(files)
    assert not any("optimizer" in name or name == "run.json" for name in files)
    for name, path in files.items():
        source = run / "final" / name
        assert path.read_bytes() == (source if source.exists() else run / name).read_bytes()


def test_a_private_push_stops_at_a_public_repository_and_a_public_one_goes_on(hub: Any, run: Path) -> None:
    hub.add("tester/open", kind="models", private=False)
    code, errors, _ = pushed(hub, run, "tester/open")
    assert code == 2
    assert "tester/open exists and is public" in errors
    assert not any(hub.files("tester/open", "models").iterdir())
    code, errors, found = pushed(hub, run, "tester/open", "--public")
    assert code == 0, errors
    assert found["private"] is False


@pytest.mark.parametrize(
    ("faults", "code", "said"),
    [
        ([{"match": "GET /api/whoami", "status": 401}], 2, "the Hub answered 401"),
        ([{"match": "POST /api/repos/create", "status": 403}], 2, "the Hub answered 403"),
        ([{"match": "POST /api/models/.*/commit", "status": 403}], 2, "try again: hf-tinylm push"),
        ([{"match": "POST /api/models/.*/commit", "status": 503, "times": 2}], 0, "the Hub answered 503; next try"),
        ([{"match": "POST /api/models/.*/commit", "break_after": 10, "times": 1}], 0, "the connection failed"),
    ],
)
def test_a_fault_of_the_hub_is_waited_out_or_told_in_one_line(
    hub: Any, run: Path, faults: list[dict[str, Any]], code: int, said: str
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with hub.faults(*faults):
        found, errors, _ = pushed(hub, run, "tester/faults")
    assert found == code, errors
    assert said in errors
    assert "Traceback" not in errors
    assert "hf_x" not in errors
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_without_a_token_or_right_the_push_says_what_to_do(hub: Any, run: Path) -> None:
    code, errors, _ = pushed(hub, run, "tester/none", HF_TOKEN="", HF_TOKEN_PATH="/nowhere")
    assert code == 2
    assert "hf auth login" in errors
    code, errors, _ = pushed(hub, run, "stranger/model")
    assert code == 2
    assert "stranger/model belongs to stranger" in errors


def test_a_pack_is_published_with_a_card_and_loads_with_the_same_tokens(hub: Any, tiny_config: Path) -> None:
    shards = Path(str(load_config(str(tiny_config)).data.shards))
    before = sorted(path.name for path in shards.iterdir())
    code, errors, found = pushed(hub, shards, "tester/pack")
    assert code == 0, errors
    assert found["kind"] == "dataset"
    assert sorted(path.name for path in shards.iterdir()) == before
    read = """
import sys
from datasets import load_dataset, load_from_disk
here, there = load_from_disk(sys.argv[1]), load_dataset("tester/pack")
assert set(here) == set(there), (here, there)
for split in here:
    assert list(here[split]["input_ids"]) == list(there[split]["input_ids"]), split
"""
    done = hub.run("-c", read, str(shards))
    assert done.returncode == 0, done.stderr


def test_a_file_with_an_access_token_is_never_published(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    card = copy / "final" / "README.md"
    card.write_text(f"my token is hf_{'A' * 34}\n")
    with pytest.raises(ConfigError, match=r"README.md holds an access token"):
        collect(copy)


@pytest.mark.parametrize("what", ["missing", "empty", "checkpoint"])
def test_what_cannot_be_published_is_named(what: str, tmp_path: Path) -> None:
    folder = tmp_path / what
    if what != "missing":
        folder.mkdir()
    if what == "checkpoint":
        for name in ("config.json", "model.safetensors", "manifest.json"):
            (folder / name).write_text("{}")
    with pytest.raises(ConfigError, match="hf-tinylm export" if what == "checkpoint" else "Give one of these"):
        collect(folder)


@pytest.mark.slow
def test_a_recipe_finds_out_before_its_first_update_and_publishes_after_its_last(
    hub: Any, tiny_config: Path, tmp_path: Path
) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "pretrain.py")
    common = (recipe, "--config", str(tiny_config), "--push_to_hub", "--output_dir", str(tmp_path / "run"))
    hub.add("tester/trained-open", kind="models", private=False)
    refused = hub.run(*common, "--hub_model_id", "tester/trained-open")
    assert refused.returncode == 2, refused.stderr
    assert "exists and is public" in refused.stderr
    assert not (tmp_path / "run").exists()
    with hub.faults({"match": "POST /api/models/.*/commit", "status": 403}):
        failed = hub.run(*common, "--hub_model_id", "tester/trained")
    assert failed.returncode == 2, failed.stderr
    assert f"try again: hf-tinylm push {tmp_path / 'run'} --repo_id tester/trained" in failed.stderr
    assert (tmp_path / "run" / "DONE.json").is_file()
    code, errors, found = pushed(hub, tmp_path / "run", "tester/trained")
    assert code == 0, errors
    assert {"model.safetensors", "README.md", "curves.png"} <= set(found["files"])


def test_a_damaged_pack_or_model_is_never_published(run: Path, tiny_config: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(str(load_config(str(tiny_config)).data.shards), tmp_path / "pack"))
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    weights = copy / "final" / "model.safetensors"
    (copy / "DONE.json").write_text(json.dumps({"final_weights_sha256": {weights.name: sha256_of_file(weights)}}))
    assert (collect(pack).kind, collect(copy).kind) == ("dataset", "model")
    for file in (next((pack / "train").glob("*.arrow")), weights):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"train/data-00000-of-00001.arrow"):
        collect(pack)
    with pytest.raises(ConfigError, match=r"model.safetensors is not what the run recorded in DONE.json"):
        collect(copy)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"model.safetensors is not what the run recorded in DONE.json"):
        collect(copy)
