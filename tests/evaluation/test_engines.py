"""What can be opened, and how each failure reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_tinylm.errors import CheckpointError, ConfigError, MissingExtraError, TokenizerError
from hf_tinylm.evaluation.engines import load_causal_lm, open_engine, resolve_model, special_beginning, weights_sha256
from hf_tinylm.evaluation.likelihood import Span
from hf_tinylm.evaluation.likelihood_gguf import LlamaCppEngine
from hf_tinylm.files import sha256_of_file
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.load import save_tokenizer


@pytest.fixture
def folder(byte_model: TinyLMForCausalLM, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A stock folder of the byte model with its tokenizer."""
    save_stock_model(byte_model, tmp_path / "model", byte_tokenizer)
    return tmp_path / "model"


def test_a_stock_folder_a_checkpoint_of_ours_and_another_architecture_open_and_score(
    folder: Path, byte_model: TinyLMForCausalLM, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    byte_model.save_pretrained(tmp_path / "ours")
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    span = Span((5, 9, 30, 100, 7), 2)
    totals = {}
    for name in ("model", "ours", "gpt2"):
        engine = open_engine(tmp_path / name, str(folder), device="cpu")
        totals[name] = engine.score([[span]])[0][0].total
        facts = engine.facts()
        assert facts["model_sha256"] == weights_sha256(tmp_path / name)
        assert facts["precision"] == "float32"
    assert totals["model"] == pytest.approx(totals["ours"], abs=1e-4)
    assert abs(totals["gpt2"] - totals["ours"]) > 1e-2
    assert weights_sha256(folder) == sha256_of_file(folder / "model.safetensors")  # the hash that DONE.json names


def test_a_tensor_that_is_missing_unknown_or_damaged_is_never_filled_at_random(folder: Path) -> None:
    weights, state = folder / "model.safetensors", load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({key: value for key, value in state.items() if key != name}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"missing keys of the weights, first {name}"):
        load_causal_lm(folder)
    save_file({**state, "model.extra": torch.zeros(2)}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected keys of the weights, first model\.extra"):
        load_causal_lm(folder)
    weights.write_bytes(b"\x00" * 100)
    with pytest.raises((CheckpointError, ConfigError), match=str(folder)):
        load_causal_lm(folder)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    folder: Path, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "larger")
    file = tmp_path / "larger" / "tokenizer.json"
    backend = json.loads(file.read_text())
    backend["model"]["vocab"]["extra"] = 260
    file.write_text(json.dumps(backend))
    with pytest.raises(TokenizerError, match=r"has 261 tokens and the model .* 260.*--tokenizer DIR"):
        open_engine(folder, str(tmp_path / "larger"), device="cpu")


def test_what_is_no_model_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file.txt").touch()
    for name in (str(tmp_path / "file.txt"), "./missing", "/missing/folder", "a/b/c"):
        with pytest.raises(ConfigError, match=f"{name} is no model folder"):
            resolve_model(name)
    with pytest.raises(ConfigError, match="nobody/nothing is neither a folder here nor a model that the Hub gave"):
        resolve_model("nobody/nothing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_causal_lm(tmp_path)
    (folder / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match="cannot be opened as a model"):
        load_causal_lm(folder)


def test_a_device_that_is_not_there_is_one_line(folder: Path) -> None:
    with pytest.raises(ConfigError, match="device=nonsense cannot be used"):
        open_engine(folder, str(folder), device="nonsense")


def test_a_text_begins_after_what_the_tokenizer_says(byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    assert special_beginning(byte_tokenizer) == ((), 0)
    backend = Tokenizer(WordLevel({"<s>": 0, "a": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    save_tokenizer(other, tmp_path / "other")
    assert special_beginning(other) == ((0,), 0)
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b")))
    with pytest.raises(TokenizerError, match="no begin or end token"):
        special_beginning(bare)


def test_a_gguf_file_without_llama_cpp_python_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.gguf"
    path.touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"llama-cpp-python.*hf-tinylm\[quantize\]"):
        LlamaCppEngine(path)
