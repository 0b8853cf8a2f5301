"""A stock `llama` or `qwen3` model folder as one GGUF file, in F32 or F16, without torch.

Tensors are read, converted and written one at a time, so memory stays near the largest tensor. Everything that
llama.cpp would read differently from Hugging Face is refused; the asked name appears when the file is whole.

Legend: V tokens, H hidden size, I intermediate size, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import ExportError
from ..files import atomic_file
from .gguf_tokenizer import TokenizerSection, read_json_object, read_tokenizer_section
from .weights import SafetensorsFolder

FileType = Literal["f32", "f16"]

_REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class GGUFReport:
    """What was written.

    Attributes:
        bytes: size of the file.
        parameters: numbers in all tensors.
        bits_per_weight: bits of tensor data per parameter, without the metadata.
        tensor_types: tensors by storage type, such as {"F16": 15, "F32": 5}.
        trimmed_rows: padding rows of the embedding that were left out.
    """

    path: Path
    file_type: str
    architecture: str
    bytes: int
    parameters: int
    bits_per_weight: float
    tensor_types: dict[str, int]
    trimmed_rows: int

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of config.json that a GGUF file repeats; `vocab_rows` counts padding rows too."""

    architecture: str
    vocab_rows: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write: where it comes from, what it is called there and here, and how its rows are arranged."""

    source: str
    name: str
    shape: tuple[int, ...]  # in the model folder
    rotary_heads: int = 0  # number of heads whose rows llama.cpp wants interleaved
    rows: int | None = None  # rows to keep


def write_gguf(
    model_folder: Path,
    output: Path,
    file_type: FileType = "f16",
    name: str | None = None,
    licence: str | None = None,
) -> GGUFReport:
    """Write the model of `model_folder` (config, safetensors, tokenizer) to the GGUF file `output`.

    Norms and other one-dimensional tensors stay F32. `name` and `licence` default to those of the folder's README.

    Raises:
        ExportError: the folder is incomplete, contradicts itself, or holds something that llama.cpp reads differently.
    """
    import gguf

    if file_type not in ("f32", "f16"):
        raise ExportError(f"file_type={file_type!r} is not known; use f32 or f16.")
    model_folder, output = Path(model_folder), Path(output)
    config = read_json_object(model_folder / "config.json")
    shape = read_model_shape(config)
    section = read_tokenizer_section(model_folder, config)
    if shape.vocab_rows < len(section.tokens):
        raise ExportError(
            f"config.json has vocab_size {shape.vocab_rows:,}, fewer than the {len(section.tokens):,} tokens of "
            "tokenizer.json. Use the tokenizer that the model was trained with."
        )
    tensors = _expected_tensors(shape, len(section.tokens))
    weights = SafetensorsFolder(model_folder)
    weights.check({tensor.source: tensor.shape for tensor in tensors})

    card = _model_card(model_folder)
    with atomic_file(output) as temporary:
        writer = gguf.GGUFWriter(temporary, shape.architecture)
        try:
            parameters = sum(math.prod(_written_shape(tensor)) for tensor in tensors)
            _add_general(
                writer,
                file_type,
                name or card.get("model_name") or model_folder.resolve().name,
                licence or card.get("license"),
            )
            writer.add_size_label(gguf.size_label(parameters, 0, 0, 0))
            _add_architecture(writer, shape, len(section.tokens))
            _add_tokenizer(writer, section)
            types = _write_tensors(writer, weights, tensors, file_type)
        finally:
            writer.close()
    data_bytes = sum(math.prod(_written_shape(tensor)) * types[tensor.name].itemsize for tensor in tensors)
    return GGUFReport(
        path=output,
        file_type=file_type,
        architecture=shape.architecture,
        bytes=output.stat().st_size,
        parameters=parameters,
        bits_per_weight=8 * data_bytes / parameters,
        tensor_types=dict(sorted(Counter(f"F{8 * dtype.itemsize}" for dtype in types.values()).items())),
        trimmed_rows=shape.vocab_rows - len(section.tokens),
    )


def read_model_shape(config: dict[str, Any]) -> ModelShape:
    """The shape that a stock config.json states, in either form of its rope settings.

    Raises:
        ExportError: a key is missing, or asks for something that llama.cpp's llama or qwen3 does not compute.
    """
    architecture = config.get("model_type")
    if architecture not in ("llama", "qwen3"):
        raise ExportError(
            f"config.json has model_type {architecture!r}; llama or qwen3 is needed. Export the run's final folder."
        )
    missing = [key for key in _REQUIRED_KEYS if config.get(key) is None]
    if missing:
        raise ExportError(f"config.json lacks {', '.join(missing)}.")
    _refuse_unknown_computation(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if architecture == "llama" else None)
    if head_dim is None or head_dim % 2:
        raise ExportError(f"config.json has head_dim {head_dim}; an even number is needed.")
    return ModelShape(
        architecture=architecture,
        vocab_rows=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        context_length=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=_rope_theta(config),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_unknown_computation(config: dict[str, Any]) -> None:
    if config.get("hidden_act") != "silu":
        raise ExportError(
            f"config.json has hidden_act {config.get('hidden_act')!r}; llama.cpp computes silu for this architecture."
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            raise ExportError(
                f"config.json has {key}={config[key]!r}, which cannot be exported. A model without it is needed."
            )
    if config.get("pretraining_tp", 1) not in (1, None):
        raise ExportError(f"config.json has pretraining_tp={config['pretraining_tp']}; 1 is needed.")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ExportError(f"config.json has layer_types {sorted(layer_types)}; only full_attention can be exported.")


def _rope_theta(config: dict[str, Any]) -> float:
    """The rope base from `rope_parameters` (transformers 5) or `rope_theta` (4); both, if given, must agree."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" or rope.get("factor") not in (None, 1, 1.0):
        raise ExportError(f"config.json has rope type {kind!r}; only the default rope can be exported.")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ExportError(
            "config.json rotates only a part of each head (partial_rotary_factor); the whole head is needed."
        )
    given = {float(value) for value in (rope.get("rope_theta"), config.get("rope_theta")) if value is not None}
    if len(given) != 1:
        raise ExportError(
            f"config.json gives {sorted(given) or 'no'} rope_theta; exactly one is needed, in rope_parameters or alone."
        )
    return given.pop()


def _expected_tensors(shape: ModelShape, tokens: int) -> list[_Tensor]:
    """Every tensor of the model in the order of the file; shapes are those of Hugging Face, (out, in)."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Hugging Face rotates the two halves of a head, and so does llama.cpp's `qwen3`; its `llama` rotates neighbours
    interleave = shape.architecture == "llama"
    tensors = [_Tensor("model.embed_tokens.weight", "token_embd.weight", (shape.vocab_rows, hidden), rows=tokens)]
    for layer in range(shape.layers):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        tensors += [
            _Tensor(f"{ours}.input_layernorm.weight", f"{theirs}.attn_norm.weight", (hidden,)),
            _Tensor(
                f"{ours}.self_attn.q_proj.weight",
                f"{theirs}.attn_q.weight",
                (queries, hidden),
                rotary_heads=shape.heads * interleave,
            ),
            _Tensor(
                f"{ours}.self_attn.k_proj.weight",
                f"{theirs}.attn_k.weight",
                (keys, hidden),
                rotary_heads=shape.kv_heads * interleave,
            ),
            _Tensor(f"{ours}.self_attn.v_proj.weight", f"{theirs}.attn_v.weight", (keys, hidden)),
            _Tensor(f"{ours}.self_attn.o_proj.weight", f"{theirs}.attn_output.weight", (hidden, queries)),
            _Tensor(f"{ours}.post_attention_layernorm.weight", f"{theirs}.ffn_norm.weight", (hidden,)),
            _Tensor(f"{ours}.mlp.gate_proj.weight", f"{theirs}.ffn_gate.weight", (inner, hidden)),
            _Tensor(f"{ours}.mlp.up_proj.weight", f"{theirs}.ffn_up.weight", (inner, hidden)),
            _Tensor(f"{ours}.mlp.down_proj.weight", f"{theirs}.ffn_down.weight", (hidden, inner)),
        ]
        if shape.architecture == "qwen3":
            tensors += [
                _Tensor(
                    f"{ours}.self_attn.{letter}_norm.weight", f"{theirs}.attn_{letter}_norm.weight", (shape.head_dim,)
                )
                for letter in "qk"
            ]
    tensors.append(_Tensor("model.norm.weight", "output_norm.weight", (hidden,)))
    if not shape.tied:
        tensors.append(_Tensor("lm_head.weight", "output.weight", (shape.vocab_rows, hidden), rows=tokens))
    return tensors


def interleave_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a (heads x D, H) projection: within a head, row i of each half becomes rows 2i and 2i + 1.

    Attention scores stay the same, as queries and keys are reordered alike (each with its own number of heads).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _written_shape(tensor: _Tensor) -> tuple[int, ...]:
    return tensor.shape if tensor.rows is None else (tensor.rows, *tensor.shape[1:])


def _write_tensors(
    writer: Any, weights: SafetensorsFolder, tensors: list[_Tensor], file_type: FileType
) -> dict[str, np.dtype]:
    """Write header, metadata and all tensors; returns the storage type of each by name."""
    types = {t.name: np.dtype(np.float16 if file_type == "f16" and len(t.shape) > 1 else np.float32) for t in tensors}
    for tensor in tensors:
        shape, dtype = _written_shape(tensor), types[tensor.name]
        writer.add_tensor_info(tensor.name, shape, dtype, math.prod(shape) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(_converted(weights.read(tensor.source), tensor, types[tensor.name]))
    return types


def _converted(weight: np.ndarray, tensor: _Tensor, dtype: np.dtype) -> np.ndarray:
    """The tensor as it is stored: padding rows cut, rotary rows reordered, in `dtype`, every number finite."""
    weight = weight if tensor.rows is None else weight[: tensor.rows]
    if tensor.rotary_heads:
        weight = interleave_rotary_rows(weight, tensor.rotary_heads)
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(weight, dtype=dtype)
    if not np.isfinite(stored).all():
        if np.isfinite(weight).all():
            raise ExportError(
                f"{tensor.source} has values beyond {dtype.name}, up to {np.abs(weight).max():.3g}. Use f32."
            )
        raise ExportError(f"{tensor.source} has values that are not finite. Export an earlier checkpoint.")
    return stored


def _add_general(writer: Any, file_type: FileType, name: str, licence: str | None) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    if licence:
        writer.add_license(licence)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if file_type == "f32" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_architecture(writer: Any, shape: ModelShape, tokens: int) -> None:
    writer.add_vocab_size(tokens)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)


def _add_tokenizer(writer: Any, section: TokenizerSection) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(section.pre)
    writer.add_token_list(section.tokens)
    writer.add_token_types(section.token_types)
    writer.add_token_merges(section.merges)
    # without a bos id llama.cpp assumes 11; it is never added, so naming the end token costs nothing
    writer.add_bos_token_id(section.eos_token_id if section.bos_token_id is None else section.bos_token_id)
    writer.add_eos_token_id(section.eos_token_id)
    if section.eot_token_id is not None:
        writer.add_eot_token_id(section.eot_token_id)
    if section.pad_token_id is not None:
        writer.add_pad_token_id(section.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if section.chat_template is not None:
        writer.add_chat_template(section.chat_template)


def _model_card(model_folder: Path) -> dict[str, str]:
    """`model_name` and `license` of the YAML block at the top of the folder's README.md, where there is one."""
    import yaml

    path = model_folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not text.startswith("---\n") or "\n---" not in text[4:]:
        return {}
    try:
        block = yaml.safe_load(text[4 : text.index("\n---", 4)])
    except yaml.YAMLError as error:
        raise ExportError(f"{path} starts with a block that is not YAML ({error}). Correct or remove it.") from error
    block = block if isinstance(block, dict) else {}
    return {key: str(block[key]) for key in ("model_name", "license") if isinstance(block.get(key), str)}
