"""GPT-2 all the way: its kind of tokenizer, shards, preflight, a run with a resume, stock folder, GGUF, llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.contract import list_checkpoints
from hf_tinylm.data.prepare import prepare
from hf_tinylm.errors import RunStopped
from hf_tinylm.export.gguf import GGUFSource
from hf_tinylm.export.parity import verify_gguf
from hf_tinylm.files import bundled
from hf_tinylm.gguf_plan import GGUF_TYPES, file_bytes, plan_shape
from hf_tinylm.modeling.factory import load_model


@pytest.fixture(scope="module")
def config(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 on the tiny prose, with a tokenizer of GPT-2's split whose one special token has the last id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=498, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(tiny_config.parent / "prose.txt")], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "tokenizer")
    values = yaml.safe_load(tiny_config.read_text())
    values["model"] = {
        **{"architecture": "gpt2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 128, "max_position_embeddings": 64, "pad_vocab_to_multiple_of": 64},
    }
    values["tokenizer"] = {"tokenizer_path": str(folder / "tokenizer"), "vocab_size": 499}
    values["data"]["shards"] = str(folder / "shards")
    path = folder / "gpt2.yaml"
    path.write_text(yaml.safe_dump(values))
    prepare(load_config(str(path)), progress=False)
    return path


@pytest.fixture(scope="module")
def run(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that preflight let through, and that was stopped and resumed."""
    folder = tmp_path_factory.mktemp("run") / "gpt2"
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    command = ["--config", str(config), "--output_dir", str(folder), "--learning_rate", "3e-3", "--gguf", "f32"]
    with pytest.raises(RunStopped):
        recipe([*command, "--preflight", "true", "--stop_after_updates", "3"])
    assert recipe([*command, "--resume_from_checkpoint", "auto", "--verify"]) == 0
    return folder


def test_a_stopped_and_resumed_run_ends_with_the_bits_of_one_that_was_not(
    config: Path, run: Path, tmp_path: Path
) -> None:
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    whole = tmp_path / "whole"
    assert recipe(["--config", str(config), "--output_dir", str(whole), "--learning_rate", "3e-3", "--gguf", "[]"]) == 0
    for name in ("model", "optimizer"):
        one, two = (load_file(list_checkpoints(each)[-1] / f"{name}.safetensors") for each in (run, whole))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    contract = json.loads((run / "run.json").read_text())
    assert contract["identity"]["model"]["architecture"] == "gpt2"
    assert contract["identity"]["model"]["vocab_size"] == 512
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 6.1 < losses[0]


def test_the_final_folder_is_stock_gpt2_and_its_file_passed_the_gate(config: Path, run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

    stock = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    assert type(stock) is GPT2LMHeadModel
    assert (stock.config.vocab_size, stock.config.eos_token_id) == (499, 498)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert tokenizer("Emma", add_special_tokens=False)["input_ids"] != [498]
    assert (tokenizer.eos_token_id, len(tokenizer)) == (498, 499)
    ids = torch.randint(0, 499, (2, 64))
    ours = load_model(list_checkpoints(run)[-1])
    assert float((ours(ids).logits[..., :499] - stock(ids).logits).detach().abs().max()) < 1e-5
    assert next(run.glob("*.gguf")).is_file()


def test_eval_sample_plan_and_a_branch_take_it_as_any_other(
    config: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run / "final"), "--config", str(config), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["results"]["loss"]["value"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert loss == pytest.approx([row["eval_loss"] for row in rows if "eval_loss" in row][-1], abs=1e-5)
    assert main(["sample", str(list_checkpoints(run)[-1]), "--prompt", "Emma was", "--max_new_tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("Emma was")
    assert main(["plan", "--config", str(config), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == sum(p.numel() for p in load_model(run / "final").parameters()) + 13 * 32
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    branch = ["--config", str(config), "--output_dir", str(tmp_path / "branch"), "--pad_vocab_to_multiple_of", "1"]
    branch += ["--init_from", str(list_checkpoints(run)[-1]), "--train_tokens", "512", "--gguf", "[]"]
    assert recipe([*branch, "--warmup_steps", "0", "--learning_rate", "1e-9", "--eval_steps", "1"]) == 0
    first = json.loads((tmp_path / "branch" / "metrics.jsonl").read_text().splitlines()[1])
    assert first["eval_loss"] == pytest.approx(loss, abs=1e-5)


Changed = Callable[[str, Callable[[np.ndarray], Any]], Path]


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> Changed:
    """A function that writes the final folder with one tensor changed, as an F32 file; its path."""

    def write(name: str, change: Callable[[np.ndarray], Any]) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir()
        for path in (run / "final").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = torch.from_numpy(np.ascontiguousarray(change(tensors[name].numpy())))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        GGUFSource(folder).write(tmp_path / "changed.gguf", "f32")
        return tmp_path / "changed.gguf"

    return write


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("transformer.h.0.attn.c_proj.weight", lambda weight: weight.T),  # not transposed on the way
        pytest.param("transformer.wpe.weight", lambda weight: weight[::-1], marks=pytest.mark.slow),
        pytest.param("transformer.h.1.ln_2.bias", lambda bias: bias + 0.1, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_tensor_fails_the_gate(run: Path, changed: Changed, name: str, change: Any) -> None:
    report = verify_gguf(changed(name, change), run / "final", random_strings=50, threads=1)
    assert report.logit_limit == 2e-2
    assert any("logit" in failure or "log-prob" in failure for failure in report.failures), report.failures


@pytest.mark.slow
def test_f16_and_quantized_files_pass_and_keep_positions_in_float32(run: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    source = GGUFSource(run / "final")
    for kind in ("f16", "q8_0"):
        path = tmp_path / f"{kind}.gguf"
        report = source.write(path, kind)  # type: ignore[arg-type]
        assert report.bytes == path.stat().st_size == source.plan(kind).bytes  # type: ignore[arg-type]
        kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
        assert kinds["position_embd.weight"] == "F32"
        assert kinds["blk.0.attn_qkv.weight"] == kind.upper()
        verified = verify_gguf(path, run / "final", random_strings=200, threads=1)
        assert verified.failures == [], verified.failures
        assert verified.token_mismatches == 0


def test_the_estimate_of_a_file_is_its_plan_for_every_type(run: Path) -> None:
    shape = load_model(run / "final").config.shape
    for kind in GGUF_TYPES:
        assert file_bytes(shape, kind) == plan_shape(shape, kind).bytes
