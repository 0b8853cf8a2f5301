"""Files are read back with gguf's own reader and compared with what the model folder holds."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_tinylm.errors import ExportError
from hf_tinylm.export import gguf as gguf_module
from hf_tinylm.export.gguf import GGUFSource, write_gguf
from hf_tinylm.export.gguf_tokenizer import strip_generation_markers
from hf_tinylm.gguf_plan import FILE_TYPE_NUMBERS, GGUF_TYPES, GGUFType, needs_llamacpp

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHAPES = [
    {"heads": (8, 2), "head_dim": 8},
    {"heads": (12, 4), "head_dim": 8, "tied": False},
    {"heads": (15, 5), "head_dim": 8, "theta": 500_000.0},
    {"heads": (8, 2), "head_dim": 16, "hidden_size": 64},
    {"architecture": "qwen3", "heads": (8, 2), "head_dim": 32, "hidden_size": 64, "tied": False, "theta": 500_000.0},
    {"architecture": "qwen3", "heads": (15, 5), "head_dim": 8},
]


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    return {t.name: t.data.reshape([int(n) for n in reversed(t.shape)]) for t in gguf.GGUFReader(path).tensors}


def fields_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def name_in_file(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return outer.get(name, "output.weight")


def interleaved(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Row by row: within each head, row i of the first half goes to 2i and of the second half to 2i + 1."""
    result = np.empty_like(weight)
    for row in range(len(weight)):
        head, place = divmod(row, head_dim)
        half, index = divmod(place, head_dim // 2)
        result[head * head_dim + 2 * index + half] = weight[row]
    return result


@pytest.mark.parametrize("file_type", ["f32", "f16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_of_the_file_holds_the_numbers_of_the_folder(
    make_model: Callable[..., Path], tmp_path: Path, shape: dict[str, Any], file_type: str
) -> None:
    folder = make_model(**shape)
    report = write_gguf(folder, tmp_path / "model.gguf", file_type)
    written = tensors_of(tmp_path / "model.gguf")
    source = load_file(folder / "model.safetensors")
    assert written.keys() == {name_in_file(name) for name in source}
    assert ("output.weight" in written) == (shape.get("tied") is False)
    for name, tensor in source.items():
        expected = tensor.numpy()
        if shape.get("architecture") != "qwen3" and ("q_proj" in name or "k_proj" in name):
            expected = interleaved(expected, shape["head_dim"])
        dtype = np.float16 if file_type == "f16" and expected.ndim == 2 else np.float32
        stored = written[name_in_file(name)]
        assert stored.dtype == dtype, name
        np.testing.assert_array_equal(stored, expected.astype(dtype), err_msg=name)
    assert report.parameters == sum(tensor.numel() for tensor in source.values())
    assert report.bytes == (tmp_path / "model.gguf").stat().st_size
    bits = {"f32": 32.0, "f16": 16.0}[file_type]
    assert bits <= report.bits_per_weight <= bits * 1.02
    one_dimensional = sum(tensor.dim() == 1 for tensor in source.values())
    assert report.tensor_types["F32"] == (one_dimensional if file_type == "f16" else len(source))


@pytest.mark.parametrize("rope_form", ["rope_parameters", "rope_theta"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_metadata_states_the_model_whichever_form_the_rope_settings_have(
    make_model: Callable[..., Path], tmp_path: Path, edit_json: Callable[..., None], architecture: str, rope_form: str
) -> None:
    folder = make_model(architecture, heads=(8, 2), head_dim=16, hidden_size=64, theta=500_000.0, context=192)
    if rope_form == "rope_theta":
        edit_json(
            folder / "config.json",
            lambda c: c.update(rope_theta=c.pop("rope_parameters")["rope_theta"], rope_scaling=None),
        )
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nmodel_name: Tiny One\n---\n# Card\n", encoding="utf-8")
    write_gguf(folder, tmp_path / "model.gguf", "f16")
    fields = fields_of(tmp_path / "model.gguf")
    expected = {
        "general.architecture": architecture,
        "general.name": "Tiny One",
        "general.license": "apache-2.0",
        "general.type": "model",
        "general.file_type": 1,
        "general.quantization_version": 2,
        f"{architecture}.vocab_size": 544,
        f"{architecture}.context_length": 192,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 160,
        f"{architecture}.block_count": 2,
        f"{architecture}.attention.head_count": 8,
        f"{architecture}.attention.head_count_kv": 2,
        f"{architecture}.attention.key_length": 16,
        f"{architecture}.attention.value_length": 16,
        f"{architecture}.rope.dimension_count": 16,
        f"{architecture}.rope.freq_base": 500_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert {key: fields.get(key) for key in expected} == expected
    assert fields[f"{architecture}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert fields["general.size_label"] == "138K"
    assert "tokenizer.ggml.eot_token_id" not in fields
    assert "tokenizer.chat_template" not in fields


def test_name_and_licence_can_be_given_and_default_to_the_folder(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model()
    write_gguf(folder, tmp_path / "a.gguf")
    write_gguf(folder, tmp_path / "b.gguf", name="Mine", licence="mit")
    plain, given = fields_of(tmp_path / "a.gguf"), fields_of(tmp_path / "b.gguf")
    assert plain["general.name"] == folder.name
    assert "general.license" not in plain
    assert (given["general.name"], given["general.license"]) == ("Mine", "mit")


def test_tokens_types_and_merges_are_those_of_the_tokenizer(
    make_model: Callable[..., Path], tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    folder = make_model(vocab_size=545)
    added = {"id": 544, "content": "<tool>", "special": False, "normalized": False}
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    edit_json(folder / "tokenizer.json", lambda t: t["added_tokens"].append({**added, **flags}))
    write_gguf(folder, tmp_path / "model.gguf", "f32")
    fields = fields_of(tmp_path / "model.gguf")
    source = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {token_id: text for text, token_id in source["model"]["vocab"].items()}
    assert fields["tokenizer.ggml.tokens"] == [*(by_id[i] for i in range(544)), "<tool>"]
    assert fields["tokenizer.ggml.token_type"] == [3] * 4 + [1] * 540 + [4]
    assert fields["tokenizer.ggml.merges"] == [f"{left} {right}" for left, right in source["model"]["merges"]]


@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_are_trimmed_and_counted(make_model: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    folder = make_model(vocab_size=608, tied=tied)
    report = write_gguf(folder, tmp_path / "model.gguf", "f32")
    source = load_file(folder / "model.safetensors")
    written = tensors_of(tmp_path / "model.gguf")
    assert report.trimmed_rows == 64
    assert fields_of(tmp_path / "model.gguf")["llama.vocab_size"] == 544
    np.testing.assert_array_equal(written["token_embd.weight"], source["model.embed_tokens.weight"].numpy()[:544])
    if not tied:
        np.testing.assert_array_equal(written["output.weight"], source["lm_head.weight"].numpy()[:544])


def test_a_sharded_folder_gives_the_same_file_as_a_single_one(make_model: Callable[..., Path], tmp_path: Path) -> None:
    single, sharded = make_model(), make_model(max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    write_gguf(single, tmp_path / "single.gguf", name="same")
    write_gguf(sharded, tmp_path / "sharded.gguf", name="same")
    assert (tmp_path / "single.gguf").read_bytes() == (tmp_path / "sharded.gguf").read_bytes()


def test_bfloat16_weights_are_widened_exactly(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model()
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(narrow, folder / "model.safetensors")
    write_gguf(folder, tmp_path / "model.gguf", "f32")
    expected = narrow["model.layers.1.mlp.up_proj.weight"].float().numpy()
    np.testing.assert_array_equal(tensors_of(tmp_path / "model.gguf")["blk.1.ffn_up.weight"], expected)


def test_a_chat_model_names_its_end_of_turn_and_its_template_without_generation_markers(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(chat=True)
    write_gguf(folder, tmp_path / "model.gguf")
    fields = fields_of(tmp_path / "model.gguf")
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert fields["tokenizer.ggml.eot_token_id"] == 2
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    expected = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert fields["tokenizer.chat_template"] == expected != template


@pytest.mark.parametrize(
    "assistant",
    [
        "{% generation %}{{ m.content }}{% endgeneration %}!",
        "x \n {%- generation -%} \n {{ m.content }} \n {%- endgeneration -%} \n y",
        "\n  {% generation %}\n  {{ m.content }}\n  {% endgeneration %}\n  tail",
        "x {% generation %}\n\n{{ m.content }} {%- endgeneration %}\r\n y",
        "\n  {%+ generation +%}\n{{ m.content }}\n {%+ endgeneration +%}\n",
        "\n {%generation%}\n {%- endgeneration %}\n {% generation %}\n  {% endgeneration %}\n{{ m.content }}",
    ],
)
def test_a_template_renders_the_same_without_generation_markers(assistant: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = "{% for m in messages %}[{{ m.role }}]" + assistant + "{% endfor %}{{ 'end' }}\n"
    conversation = [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b"}]
    stripped = strip_generation_markers(template)
    assert "generation" not in stripped
    rendered = [render_jinja_template([conversation], chat_template=text)[0][0] for text in (template, stripped)]
    assert rendered[0] == rendered[1]


@pytest.mark.parametrize("file_type", ["f32", "f16", "q8_0", "q4_0"])
def test_memory_stays_below_the_largest_tensor(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_type: GGUFType
) -> None:
    monkeypatch.setattr(gguf_module, "CHUNK_NUMBERS", 2**14)
    folder = make_model(heads=(16, 4), head_dim=32, layers=3, tied=False, max_shard_size="2MB")
    source = GGUFSource(folder)
    source.write(tmp_path / "warm.gguf", file_type)
    largest = 544 * 512 * 4
    tracemalloc.start()
    report = source.write(tmp_path / "model.gguf", file_type)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.parameters * 4 > 5 * largest
    assert peak < 0.9 * largest


def test_a_file_written_in_small_pieces_is_the_same_file(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GGUFSource(make_model(heads=(12, 4), vocab_size=608, tied=False))
    for file_type in ("f32", "f16", "q5_1"):
        source.write(tmp_path / "whole.gguf", file_type)
        with monkeypatch.context() as patched:
            patched.setattr(gguf_module, "CHUNK_NUMBERS", 1_000)
            source.write(tmp_path / "pieces.gguf", file_type)
        assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "pieces.gguf").read_bytes()


@pytest.mark.parametrize("file_type", [kind for kind in GGUF_TYPES if not needs_llamacpp(kind)])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (8, 2), "layers": 9, "vocab_size": 608},
        {"architecture": "qwen3", "heads": (15, 5), "head_dim": 16, "tied": False},
    ],
)
def test_a_plan_is_kept_to_the_byte_and_every_tensor_has_its_type(
    make_model: Callable[..., Path], tmp_path: Path, shape: dict[str, Any], file_type: GGUFType
) -> None:
    source = GGUFSource(make_model(**shape))
    plan = source.plan(file_type)
    report = source.write(tmp_path / "model.gguf", file_type)
    written = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert written == plan.to_json()["tensors"]
    assert report.bytes == plan.bytes == (tmp_path / "model.gguf").stat().st_size
    assert fields_of(tmp_path / "model.gguf")["general.file_type"] == FILE_TYPE_NUMBERS[file_type]


def test_q8_0_is_scale_and_rounded_bytes_of_blocks_of_32(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model("qwen3")
    write_gguf(folder, tmp_path / "model.gguf", "q8_0")
    stored = next(t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "blk.1.ffn_up.weight")
    blocks = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].numpy().reshape(-1, 32)
    stored_blocks = stored.data.reshape(-1, 34)
    scales = stored_blocks[:, :2].copy().view(np.float16)
    np.testing.assert_array_equal(scales, (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16))
    exact = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64) / 127
    assert np.abs(stored_blocks[:, 2:].view(np.int8) - blocks / exact).max() < 0.5001


def vocabulary(change: Callable[[dict[str, int]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda tokenizer: change(tokenizer["model"]["vocab"])


def rename(vocab: dict[str, int], token_id: int, text: str) -> None:
    old = next(key for key, value in vocab.items() if value == token_id)
    vocab[text] = vocab.pop(old)


def added_flag(flag: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tokenizer: tokenizer["added_tokens"][1].update({flag: True})


def ordinary_end(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"]["</s>"] = 544
    tokenizer["model"]["vocab"]["</"] = 545
    tokenizer["model"]["vocab"]["s>"] = 546


TOKENIZER_FAULTS = [
    ("a normalizer", lambda t: t.update(normalizer={"type": "NFC"}), '"NFC"'),
    ("no split", lambda t: t.update(pre_tokenizer=t["pre_tokenizer"]["pretokenizers"][1]), "nearest is gpt-2"),
    (
        "another regex",
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\p{N}{1,3}|\p{L}+"}),
        r"by Split\(\\p\{N\}\{1,3\}\|\\p\{L\}\+, .* nearest is [a-z2-]+: Split\(\(\?i:'s",
    ),
    (
        "a plain-text split",
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(pattern={"String": " "}),
        "plain text",
    ),
    (
        "another behaviour",
        lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(behavior="MergedWithNext"),
        "MergedWithNext",
    ),
    (
        "a prefix space",
        lambda t: t["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        "add_prefix_space",
    ),
    ("another decoder", lambda t: t.update(decoder={"type": "Fuse"}), "ByteLevel"),
    (
        "a bos template",
        lambda t: t.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
            }
        ),
        "post_processor",
    ),
    ("another model", lambda t: t["model"].update(type="Unigram"), "Unigram"),
    ("no merges", lambda t: t["model"].update(merges=[]), "merges"),
    ("whole words first", lambda t: t["model"].update(ignore_merges=True), "ignore_merges"),
    ("byte fallback", lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
    ("an unknown merge", lambda t: t["model"]["merges"].append(["zzzz", "qqqq"]), "zzzz"),
    ("a merge twice", lambda t: t["model"]["merges"].append(t["model"]["merges"][0]), "twice"),
    (
        "a gap in the ids",
        vocabulary(lambda v: v.update({"zzab": 600})),
        "gap",
    ),
    ("one id for two tokens", vocabulary(lambda v: v.update(zz=530)), "two tokens"),
    (
        "one token with two ids",
        lambda t: t["added_tokens"].append({**t["added_tokens"][0], "id": 544}),
        "two ids",
    ),
    ("a missing byte", vocabulary(lambda v: rename(v, v["Ā"], "zzqq")), "byte tokens"),
    ("a token of other letters", vocabulary(lambda v: v.update({"한": 544})), "byte-level alphabet"),
    ("an ordinary token named </s>", ordinary_end, "</s>"),
    ("lstrip", added_flag("lstrip"), "lstrip"),
    ("rstrip", added_flag("rstrip"), "rstrip"),
    ("single_word", added_flag("single_word"), "single_word"),
    ("normalized", added_flag("normalized"), "normalized"),
    ("an ordinary <|im_end|>", lambda t: t["added_tokens"][2].update(special=False), r"<\|im_end\|>"),
]


def assert_refused(folder: Path, output: Path, message: str, file_type: str = "f16") -> None:
    with pytest.raises(ExportError, match=message) as caught:
        write_gguf(folder, output, file_type)
    assert "\n" not in str(caught.value)
    assert not output.parent.exists() or list(output.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"), [fault[1:] for fault in TOKENIZER_FAULTS], ids=[f[0] for f in TOKENIZER_FAULTS]
)
def test_a_tokenizer_that_llama_cpp_would_read_differently_is_refused(
    make_model: Callable[..., Path], tmp_path: Path, edit_json: Callable[..., None], change: Any, message: str
) -> None:
    folder = make_model(vocab_size=608)
    edit_json(folder / "tokenizer.json", change)
    assert_refused(folder, tmp_path / "out" / "model.gguf", message)


CONFIG_FAULTS = [
    ("another architecture", "config.json", {"model_type": "opt"}, "opt"),
    ("no heads", "config.json", {"num_attention_heads": 0}, "num_attention_heads 0"),
    ("heads that do not divide", "config.json", {"num_key_value_heads": 3}, "8 query heads"),
    ("a number as text", "config.json", {"hidden_size": "64"}, "hidden_size '64'"),
    ("an epsilon of zero", "config.json", {"rms_norm_eps": 0.0}, "rms_norm_eps 0.0"),
    ("a missing key", "config.json", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("gelu", "config.json", {"hidden_act": "gelu"}, "gelu"),
    ("attention bias", "config.json", {"attention_bias": True}, "attention_bias"),
    ("mlp bias", "config.json", {"mlp_bias": True}, "mlp_bias"),
    ("no theta", "config.json", {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ("two thetas", "config.json", {"rope_theta": 5.0}, "rope_theta"),
    ("yarn", "config.json", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
    ("old linear rope", "config.json", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type"),
    ("half rotated", "config.json", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("sliding layers", "config.json", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
    ("fewer rows than tokens", "config.json", {"vocab_size": 500}, "500"),
    ("another width", "config.json", {"intermediate_size": 168}, "168"),
    ("another number of key heads", "config.json", {"num_key_value_heads": 4}, "k_proj"),
    ("more layers than weights", "config.json", {"num_hidden_layers": 3}, "lack 9"),
    ("fewer layers than weights", "config.json", {"num_hidden_layers": 1}, "have beside"),
    ("an untied config", "config.json", {"tie_word_embeddings": False}, "lm_head"),
    ("another eos in config", "config.json", {"eos_token_id": 2}, "config.json has eos_token_id 2"),
    ("a default bos", "config.json", {"bos_token_id": 1}, "bos_token_id 1"),
    ("another pad", "config.json", {"pad_token_id": 0}, "pad_token_id 0"),
    ("another eos in generation", "generation_config.json", {"eos_token_id": 2}, "generation_config.json"),
    ("no eos in generation", "generation_config.json", {"eos_token_id": None}, "generation_config.json"),
    ("an eos out of range", "generation_config.json", {"eos_token_id": [0, 9999]}, "9999"),
    ("an eos that llama.cpp ignores", "generation_config.json", {"eos_token_id": [0, 50]}, "50"),
    ("no eos token", "tokenizer_config.json", {"eos_token": None}, "eos_token"),
    ("an unknown eos token", "tokenizer_config.json", {"eos_token": "<eos>"}, "<eos>"),
    ("a template that does not parse", "tokenizer_config.json", {"chat_template": "{% if x %}"}, "template"),
    ("several templates", "tokenizer_config.json", {"chat_template": [{"name": "a", "template": ""}]}, "several"),
]


@pytest.mark.parametrize(
    ("file_name", "change", "message"), [fault[1:] for fault in CONFIG_FAULTS], ids=[f[0] for f in CONFIG_FAULTS]
)
def test_settings_that_contradict_the_model_or_each_other_are_refused(
    make_model: Callable[..., Path],
    tmp_path: Path,
    edit_json: Callable[..., None],
    file_name: str,
    change: dict[str, Any],
    message: str,
) -> None:
    folder = make_model()
    edit_json(folder / file_name, lambda value: value.update(change))
    assert_refused(folder, tmp_path / "out" / "model.gguf", message)


def test_numbers_that_are_not_finite_or_do_not_fit_are_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model()
    weights = load_file(folder / "model.safetensors")
    last = weights["model.layers.1.mlp.down_proj.weight"]
    last[3, 5] = 1e5
    save_file(weights, folder / "model.safetensors")
    assert_refused(folder, tmp_path / "out" / "model.gguf", "beyond float16, up to 1e")
    assert_refused(folder, tmp_path / "out" / "model.gguf", "beyond float16, up to 1e", "q8_0")
    write_gguf(folder, tmp_path / "fits.gguf", "f32")
    last[3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors")
    assert_refused(folder, tmp_path / "out" / "model.gguf", "not finite", "f32")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_missing_or_damaged_file_is_named(make_model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = make_model()
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    assert_refused(folder, tmp_path / "out" / "model.gguf", name)
    (folder / name).unlink()
    assert_refused(folder, tmp_path / "out" / "model.gguf", name)


def test_an_earlier_file_survives_a_failed_export(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder, output = make_model(), tmp_path / "model.gguf"
    write_gguf(folder, output)
    before = output.read_bytes()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ExportError):
        write_gguf(folder, output)
    assert output.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.gguf"]
