"""`hf-tinylm export` on model folders: what is written, what is printed before, and what is refused without a trace."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hf_tinylm.cli import main
from hf_tinylm.export import hf
from hf_tinylm.export.hf import add_gguf, export_model
from hf_tinylm.modeling import factory

MakeModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def _never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock model must be exported without loading it."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(factory, "load_model", refuse)


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "100KB"}], ids=["single", "sharded"])
def test_a_stock_folder_is_copied_byte_for_byte_with_gguf_files_and_a_modelfile_in_it(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], save: dict[str, Any]
) -> None:
    folder, out = make_model(chat=True, **save), tmp_path / "out"
    (folder / "training_args.bin").write_bytes(b"not to be handed on")
    assert main(["export", str(folder), "--output_dir", str(out), "--gguf", "bf16", "q4_0", "q4_0"]) == 0
    source = {path.name for path in folder.iterdir()} - {"training_args.bin"}
    assert {path.name for path in out.iterdir()} == source | {"out-BF16.gguf", "out-Q4_0.gguf", "Modelfile"}
    for name in source:
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"plan bf16: {(out / 'out-BF16.gguf').stat().st_size:,} bytes, 16.")
    assert printed[1].startswith(f"plan q4_0: {(out / 'out-Q4_0.gguf').stat().st_size:,} bytes, ")
    assert "LM Studio: copy to models/local/out/out-BF16.gguf in its folder" in printed
    assert "FROM ./out-BF16.gguf" in (out / "Modelfile").read_text(encoding="utf-8")


def test_a_plan_prints_fallbacks_and_writes_nothing(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(heads=(8, 2), head_dim=6)  # rows of 48
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["export", str(folder), "--plan", "--gguf", "q8_0", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["fallbacks"] == {"Q8_0 -> F16": 13}
    assert plan["tensors"]["blk.0.attn_q.weight"] == "F16"
    assert plan["tensors"]["blk.0.ffn_down.weight"] == "Q8_0"
    assert main(["export", str(folder), "--plan", "--gguf", "q8_0"]) == 0
    assert "13 of 20 tensors have rows that are no multiple of the block" in capsys.readouterr().out
    assert main(["export", str(folder), "--plan"]) == 2
    assert main(["export", str(folder), "--gguf", "f16"]) == 2
    assert "--output_dir" in capsys.readouterr().err
    assert not list((tmp_path / "here").iterdir())


def test_a_missing_quantizer_is_told_before_any_work(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = make_model(), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else found(name))
    monkeypatch.setattr(hf, "find_source", lambda model: pytest.fail("work began"))
    assert main(["export", str(folder), "--output_dir", str(tmp_path / "out"), "--gguf", "q4_k_m"]) == 2
    assert "pip install 'hf-tinylm[quantize]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        change(value)
        (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")

    return apply


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1_000])


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing merges": (tokenizer(lambda t: t["model"].pop("merges")), "merges"),
    "duplicate tokens": (tokenizer(lambda t: t["added_tokens"].append({**t["added_tokens"][0], "id": 544})), "two ids"),
    "NFC normalizer": (tokenizer(lambda t: t.update(normalizer={"type": "NFC"})), '"NFC"'),
    "wrong split": (tokenizer(lambda t: t["pre_tokenizer"]["pretokenizers"].pop(0)), "nearest is gpt-2"),
    "prefix space": (
        tokenizer(lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
        "add_prefix_space=true",
    ),
    "missing tensor": (weights(lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), "up_proj"),
    "weights that are not finite": (weights(lambda w: w["model.norm.weight"].fill_(float("inf"))), "not finite"),
    "truncated safetensors": (truncate, "not a whole safetensors file"),
    "no safetensors": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    "an index of nothing": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"),
        "index.json is not valid JSON",
    ),
    "a shard that is not there": (
        lambda folder: (
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
            (folder / "model.safetensors").unlink(),
        ),
        "gone.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_input_is_one_line_and_no_output(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    damage, message = MALFORMED[case]
    folder = make_model(vocab_size=608)
    damage(folder)
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert main(["export", str(folder), "--output_dir", str(tmp_path / "out"), "--gguf", "f16", "q8_0"]) in (1, 2)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["someone/no-such-model", "missing", "./missing/folder", "/missing/folder", "a/b/c"])
def test_a_model_that_is_nowhere_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", name, "--output_dir", str(tmp_path / "out"), "--gguf", "f16"]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert name.removeprefix("./") in error
    assert not (tmp_path / "out").exists()


def test_files_are_verified_against_one_loaded_model(
    make_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    (tmp_path / "text").write_text("It is a truth universally acknowledged. " * 60, encoding="utf-8")
    options = [
        "--output_dir",
        str(tmp_path / "out"),
        "--gguf",
        "f32",
        "q8_0",
        "--verify",
        "--text",
        str(tmp_path / "text"),
    ]
    assert main(["export", str(make_model(chat=True)), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verification"]
    assert [report["ok"] for report in found.values()] == [True, True]
    assert found["f32"]["max_logit_difference"] < 1e-3
    assert found["q8_0"]["quality"]["text"] == str(tmp_path / "text")
    assert found["q8_0"]["quality"]["kl_divergence"] > found["f32"]["quality"]["kl_divergence"]
    gguf = str(tmp_path / "out" / "out-Q8_0.gguf")
    verify = ["verify-gguf", gguf, "--against", str(tmp_path / "out"), "--text", str(tmp_path / "text")]
    assert main([*verify, "--max_kl", "1e-12"]) == 1
    assert "mean KL divergence" in capsys.readouterr().err


@pytest.mark.slow
def test_a_name_on_the_hub_is_fetched(make_model: MakeModel, hub: Any, tmp_path: Path) -> None:
    files = hub.add("tester/tiny", *make_model().iterdir(), kind="models")
    done = hub.cli("export", "tester/tiny", "--output_dir", str(tmp_path / "out"), "--gguf", "f16")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "out-F16.gguf").is_file()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (files / "model.safetensors").read_bytes()


def test_an_output_folder_in_use_is_left_alone(make_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert main(["export", str(make_model()), "--output_dir", str(tmp_path / "out"), "--gguf", "f16"]) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_without_gguf_types_a_stock_folder_is_copied(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model()
    done = export_model(str(folder), tmp_path / "out")
    assert done.lines() == []
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in folder.iterdir()}


def test_the_name_of_a_run_leads_no_file_out_of_its_folder(make_model: MakeModel, tmp_path: Path) -> None:
    folder, run = make_model(), tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    before = sorted(path for path in tmp_path.rglob("*") if run not in path.parents)
    add_gguf(folder, run, "../sweep/first", ["q8_0"], verify=False)
    assert sorted(path.name for path in run.iterdir()) == ["..-sweep-first-Q8_0.gguf", "Modelfile"]
    assert sorted(path for path in tmp_path.rglob("*") if run not in path.parents) == before
    assert "FROM ./..-sweep-first-Q8_0.gguf" in (run / "Modelfile").read_text()
