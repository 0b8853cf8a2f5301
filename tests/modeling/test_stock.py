from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_tinylm.data.pack import special_ids
from hf_tinylm.errors import CheckpointError, ConfigError
from hf_tinylm.modeling.factory import load_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.train import train_tokenizer

Make = Callable[..., Any]

# Runs where hf_tinylm cannot be imported: -I leaves out the working folder and the user's site, and the meta path hook
# refuses the name should it be installed.
BARE_PROCESS = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_tinylm":
            raise ImportError("hf_tinylm is not available here")

sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
folder, ids = sys.argv[1], json.loads(sys.argv[2])
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
assert not info["missing_keys"] and not info["unexpected_keys"], info
with torch.no_grad():
    logits = model(torch.tensor(ids)).logits
print(json.dumps({
    "class": type(model).__name__, "logits": logits.tolist(), "tokenizer": type(tokenizer).__name__,
    "ids": tokenizer("Hello  there 12").input_ids, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id,
    "length": tokenizer.model_max_length, "generation": model.generation_config.to_dict(),
    "theta": model.config.rope_parameters["rope_theta"],
}))
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    text = "Hello there, general reader; the number 12 comes before the number 13. " * 30
    return train_tokenizer([text], 290)[0]


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_the_folder_opens_without_this_package_with_equal_logits_and_ids(
    make_model: Make, ids: torch.Tensor, tokenizer: Any, tmp_path: Path, qk_norm: bool
) -> None:
    model = make_model(15, 5, vocab_size=290, qk_norm=qk_norm, rope_theta=250_000.0, pad_vocab_to_multiple_of=64)
    save_stock_model(model, tmp_path / "final", tokenizer)
    done = subprocess.run(
        [sys.executable, "-I", "-c", BARE_PROCESS, str(tmp_path / "final"), json.dumps(ids.tolist())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with torch.no_grad():
        expected = model(ids).logits[..., :290]
    assert (torch.tensor(found["logits"]) - expected).abs().max() <= 1e-5
    assert found["class"] == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert found["ids"] == tokenizer("Hello  there 12").input_ids
    assert (found["eos"], found["pad"], found["length"], found["theta"]) == (0, 3, 32, 250_000.0)


def test_files_hold_one_tied_tensor_plain_names_and_agreeing_ids(
    make_model: Make, tokenizer: Any, tmp_path: Path
) -> None:
    model = make_model(vocab_size=290, rope_theta=77_000.0)
    model.forward = torch.compile(model.forward, backend="eager")
    save_stock_model(model, tmp_path, tokenizer)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.float32}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert not [name for name in names if "_orig_mod" in name or name.startswith("module.")]
    config = json.loads((tmp_path / "config.json").read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    for file in (config, generation):
        assert (file.get("bos_token_id"), file["eos_token_id"], file["pad_token_id"]) == (None, 0, 3)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 77_000.0
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "auto_map" not in config


def test_our_own_loader_reads_the_stock_folder_back_to_equal_logits(
    make_model: Make, ids: torch.Tensor, tmp_path: Path
) -> None:
    for qk_norm in (False, True):
        model = make_model(12, 4, qk_norm=qk_norm)
        save_stock_model(model, tmp_path / str(qk_norm))
        again = load_model(tmp_path / str(qk_norm))
        assert again.config.qk_norm is qk_norm
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda state: state.update({"_orig_mod.x": torch.zeros(1)}), "_orig_mod.x is not expected"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(3)}), "has shape \\(3,\\)"),
    ],
)
def test_a_folder_with_wrong_tensors_is_refused(
    make_model: Make, tmp_path: Path, damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    save_stock_model(make_model(), tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_truncated_weights_file_and_a_folder_without_a_model_are_refused(make_model: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path)
    save_stock_model(make_model(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(tmp_path)


def test_a_bfloat16_folder_is_loaded_in_float32(make_model: Make, tmp_path: Path) -> None:
    save_stock_model(make_model(), tmp_path)
    state = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    assert {parameter.dtype for parameter in load_model(tmp_path).parameters()} == {torch.float32}


def test_models_of_other_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "vocab_size": 100}))
    with pytest.raises(ConfigError, match="opt"):
        load_model(tmp_path)


def test_the_special_ids_of_a_tokenizer_name_no_begin_token(tokenizer: Any) -> None:
    assert special_ids(tokenizer) == {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 3}


def test_a_bfloat16_folder_in_several_files_opens_as_the_rounded_model(
    make_model: Make, ids: torch.Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model()
    save_stock_model(model, tmp_path / "bf16", dtype="bfloat16", max_shard_size="20KB")
    files = sorted((tmp_path / "bf16").glob("model-*.safetensors"))
    assert len(files) > 1
    assert (tmp_path / "bf16" / "model.safetensors.index.json").is_file()
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert {parameter.dtype for parameter in stock.parameters()} == {torch.bfloat16}
    for name, tensor in stock.state_dict().items():
        if name in model.state_dict():
            assert torch.equal(tensor, model.state_dict()[name].bfloat16()), name
    again = load_model(tmp_path / "bf16")
    torch.testing.assert_close(again(ids).logits, stock.float()(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", ["5", "big", "-1GB", "0MB"])
def test_a_size_that_is_none_is_refused_before_anything_is_written(size: str, make_model: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give one such as 500MB"):
        save_stock_model(make_model(), tmp_path / "x", max_shard_size=size)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_transformers_4_opens_model_and_tokenizer_with_equal_ids_and_logits(make_model: Make, tmp_path: Path) -> None:
    """Its last version is installed beside the torch of this environment, and comes first on its import path."""
    packages = tmp_path / "packages"
    wanted = ["transformers>=4.57,<5", "tokenizers>=0.22,<0.23.1", "huggingface_hub>=0.34,<1"]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *wanted]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    text = "It's 12345 naïve\n\n  cafés\t東京🙂"
    code = """
import json, sys
import torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer(sys.argv[2]).input_ids
logits = model(torch.tensor([ids])).logits[0]
found = {"version": transformers.__version__, "ids": ids, "logits": logits.tolist(), "eos": tokenizer.eos_token}
print(json.dumps(found))
"""
    for qk_norm in (False, True):
        tokenizer, _ = train_tokenizer(["It's 12 naïve cafés and other words of a small text. " * 20], 290)
        model = make_model(vocab_size=len(tokenizer), qk_norm=qk_norm, rope_theta=500_000.0)
        model.config.update(special_ids(tokenizer))
        folder = tmp_path / f"qk_norm-{qk_norm}"
        save_stock_model(model, folder, tokenizer)
        environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), text],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["version"].startswith("4.")
        assert found["ids"] == tokenizer(text).input_ids
        assert found["eos"] == tokenizer.eos_token
        ours = model(torch.tensor([found["ids"]])).logits[0]
        torch.testing.assert_close(torch.tensor(found["logits"]), ours, rtol=0, atol=1e-4)
