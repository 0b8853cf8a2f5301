"""What a GGUF file of each type holds, from shapes alone: the type of every tensor, fallbacks, bits and bytes.

Needs neither torch nor weights. A tensor is stored in blocks along its rows, so a type fits only rows that are a
multiple of its block.

Legend: V tokens, H hidden size, I intermediate size, N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from .planning import ModelShape

GGUFType = Literal[
    "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"
]
GGUF_TYPES: tuple[GGUFType, ...] = get_args(GGUFType)

# Numbers in a block, and its bytes. Source: ggml, src/ggml-common.h, block_q8_0 to block_q6_K.
BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)},
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}
# What llama.cpp stores instead when rows are no multiple of 256. Source: llama.cpp, src/llama-quant.cpp,
# tensor_type_fallback.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
# general.file_type. Source: llama.cpp, include/llama.h, enum llama_ftype.
FILE_TYPE_NUMBERS: dict[GGUFType, int] = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9},
    **{"q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "bf16": 32},
}
ALIGNMENT = 32  # bytes; header and each tensor are padded to it


def needs_llamacpp(file_type: GGUFType) -> bool:
    """K-quants: searched for by llama.cpp itself, while the other types are plain rounding that numpy does."""
    return "_k" in file_type


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: its names in the file and in the model folder, and its shape (out, in) without padding rows.

    Attributes:
        source_rows: rows in the model folder; more than `shape[0]` when the embedding is padded there.
        rotary_heads: heads whose rows llama.cpp wants interleaved, or 0.
        transposed: the model folder has it as (in, out).
    """

    name: str
    source: str
    shape: tuple[int, ...]
    source_rows: int
    rotary_heads: int = 0
    transposed: bool = False

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape in the model folder."""
        return self.shape[::-1] if self.transposed else (self.source_rows, *self.shape[1:])


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor with the type that it is stored as, and the one that the file type asks for."""

    tensor: GGUFTensor
    wanted: str
    stored: str

    @property
    def bytes(self) -> int:
        """Bytes of its data, padding excluded."""
        return tensor_bytes(self.tensor.shape, self.stored)


@dataclass(frozen=True)
class GGUFPlan:
    """A file before it is written. `header_bytes` is everything before the tensors, without its padding."""

    file_type: GGUFType
    tensors: tuple[PlannedTensor, ...]
    header_bytes: int

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(planned.tensor.shape) for planned in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data per parameter, without the metadata."""
        return 8 * sum(planned.bytes for planned in self.tensors) / self.parameters

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return _padded(self.header_bytes) + sum(_padded(planned.bytes) for planned in self.tensors)

    @property
    def tensor_types(self) -> dict[str, int]:
        """Tensors by storage type, such as {"F16": 15, "F32": 5}."""
        return dict(sorted(Counter(planned.stored for planned in self.tensors).items()))

    @property
    def fallbacks(self) -> dict[str, int]:
        """Tensors that do not get the type they should, by both types, such as {"Q4_K -> Q5_0": 192}."""
        changed = (
            f"{planned.wanted} -> {planned.stored}" for planned in self.tensors if planned.wanted != planned.stored
        )
        return dict(sorted(Counter(changed).items()))

    def lines(self) -> list[str]:
        """The plan for people: a line on the file, and one on tensors that get another type than asked for."""
        types = ", ".join(f"{count} {kind}" for kind, count in self.tensor_types.items())
        found = [f"plan {self.file_type}: {self.bytes:,} bytes, {self.bits_per_weight:.2f} bits per weight ({types})"]
        if self.fallbacks:
            changed = ", ".join(f"{count} {change}" for change, count in self.fallbacks.items())
            found.append(
                f"plan {self.file_type}: {sum(self.fallbacks.values())} of {len(self.tensors)} tensors have rows that "
                f"are no multiple of the block and fall back ({changed}); the file is larger than its name says"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`, with every tensor."""
        return {
            "file_type": self.file_type,
            "bytes": self.bytes,
            "parameters": self.parameters,
            "bits_per_weight": self.bits_per_weight,
            "tensor_types": self.tensor_types,
            "fallbacks": self.fallbacks,
            "tensors": {planned.tensor.name: planned.stored for planned in self.tensors},
        }


def plan_shape(shape: ModelShape, file_type: GGUFType, tokens: int | None = None) -> GGUFPlan:
    """The plan of a model that may not exist yet; its metadata are estimated from the number of tokens."""
    tensors = gguf_tensors(shape, tokens or shape.vocab_size)
    return plan_tensors(tensors, file_type, estimated_header_bytes(tensors[0].shape[0], len(tensors)))


def file_bytes(shape: ModelShape, file_type: GGUFType) -> int:
    """`plan_shape(...).bytes`, computed in a time that does not depend on the number of layers."""
    layers = shape.num_hidden_layers
    tensors = gguf_tensors(replace(shape, num_hidden_layers=1), shape.vocab_size)
    of_layer = [tensor for tensor in tensors if _layer(tensor.name) is not None]
    found = _padded(estimated_header_bytes(shape.vocab_size, len(tensors) + (layers - 1) * len(of_layer)))
    for tensor in tensors:
        columns, part = tensor.shape[-1], tensor.name.split(".")[-2] if len(tensor.shape) > 1 else "vector"
        plain = _fitting_type(_plain_type(tensor, file_type, shape.tie_word_embeddings), columns)
        raised = _fitting_type(_RAISED_TYPES[file_type], columns) if part in _RAISED_PARTS else plain
        more = _raised_layers(part, file_type, layers)
        copies = layers if tensor in of_layer else 1
        found += (copies - more) * _padded(tensor_bytes(tensor.shape, plain))
        found += more * _padded(tensor_bytes(tensor.shape, raised))
    return found


def plan_tensors(tensors: list[GGUFTensor], file_type: GGUFType, header_bytes: int) -> GGUFPlan:
    """The plan of these tensors."""
    layers = 1 + max((layer for tensor in tensors if (layer := _layer(tensor.name)) is not None), default=-1)
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    planned = []
    for tensor in tensors:
        wanted = _wanted_type(tensor, file_type, layers, tied)
        planned.append(PlannedTensor(tensor, wanted, _fitting_type(wanted, tensor.shape[-1])))
    return GGUFPlan(file_type, tuple(planned), header_bytes)


def gguf_tensors(shape: ModelShape, tokens: int) -> list[GGUFTensor]:
    """Every tensor of a llama, (with QK-norm) qwen3 or gpt2 model in the order of the file, without padding rows."""
    if shape.architecture == "gpt2":
        return _gpt2_tensors(shape, tokens)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    # Hugging Face rotates the two halves of a head, and so does llama.cpp's `qwen3`; its `llama` rotates neighbours
    interleaved = 0 if shape.qk_norm else 1

    def embedding(name: str, source: str) -> GGUFTensor:
        return GGUFTensor(name, source, (tokens, hidden), shape.vocab_size)

    tensors = [embedding("token_embd.weight", "model.embed_tokens.weight")]
    for layer in range(shape.num_hidden_layers):
        rows: list[tuple[str, str, tuple[int, ...], int]] = [
            ("attn_norm", "input_layernorm", (hidden,), 0),
            ("attn_q", "self_attn.q_proj", (queries, hidden), interleaved * shape.num_attention_heads),
            ("attn_k", "self_attn.k_proj", (keys, hidden), interleaved * shape.num_key_value_heads),
            ("attn_v", "self_attn.v_proj", (keys, hidden), 0),
            ("attn_output", "self_attn.o_proj", (hidden, queries), 0),
            ("ffn_norm", "post_attention_layernorm", (hidden,), 0),
            ("ffn_gate", "mlp.gate_proj", (inner, hidden), 0),
            ("ffn_up", "mlp.up_proj", (inner, hidden), 0),
            ("ffn_down", "mlp.down_proj", (hidden, inner), 0),
        ]
        if shape.qk_norm:
            rows += [(f"attn_{letter}_norm", f"self_attn.{letter}_norm", (shape.head_dim,), 0) for letter in "qk"]
        tensors += [
            GGUFTensor(f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{source}.weight", size, size[0], heads)
            for name, source, size, heads in rows
        ]
    tensors.append(GGUFTensor("output_norm.weight", "model.norm.weight", (hidden,), hidden))
    if not shape.tie_word_embeddings:
        tensors.append(embedding("output.weight", "lm_head.weight"))
    return tensors


def _gpt2_tensors(shape: ModelShape, tokens: int) -> list[GGUFTensor]:
    hidden, inner, places = shape.hidden_size, shape.intermediate_size, shape.learned_positions
    tensors = [
        GGUFTensor("token_embd.weight", "transformer.wte.weight", (tokens, hidden), shape.vocab_size),
        GGUFTensor("position_embd.weight", "transformer.wpe.weight", (places, hidden), places),
    ]
    for layer in range(shape.num_hidden_layers):
        parts: list[tuple[str, str, int, int]] = [  # columns 0: a norm
            ("attn_norm", "ln_1", hidden, 0),
            ("attn_qkv", "attn.c_attn", 3 * hidden, hidden),
            ("attn_output", "attn.c_proj", hidden, hidden),
            ("ffn_norm", "ln_2", hidden, 0),
            ("ffn_up", "mlp.c_fc", inner, hidden),
            ("ffn_down", "mlp.c_proj", hidden, inner),
        ]
        for name, source, rows, columns in parts:
            ours, theirs = f"blk.{layer}.{name}", f"transformer.h.{layer}.{source}"
            size = (rows, columns) if columns else (rows,)
            tensors.append(GGUFTensor(f"{ours}.weight", f"{theirs}.weight", size, rows, transposed=bool(columns)))
            tensors.append(GGUFTensor(f"{ours}.bias", f"{theirs}.bias", (rows,), rows))
    tensors += [
        GGUFTensor(f"output_norm.{kind}", f"transformer.ln_f.{kind}", (hidden,), hidden) for kind in ("weight", "bias")
    ]
    if not shape.tie_word_embeddings:
        tensors.append(GGUFTensor("output.weight", "lm_head.weight", (tokens, hidden), shape.vocab_size))
    return tensors


def tensor_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor whose rows are a multiple of the block."""
    numbers, size = BLOCKS[kind]
    return math.prod(shape) // numbers * size


def estimated_header_bytes(tokens: int, tensors: int) -> int:
    """About what names, tokens, merges and tensor entries take; a BPE of 4,096 tokens took 31 bytes for each."""
    return 2_000 + 35 * tokens + 60 * tensors


# Parts of a layer that llama.cpp stores with more bits in some layers, and the type that they get there.
_RAISED_PARTS = ("attn_v", "ffn_down")
_RAISED_TYPES: dict[GGUFType, str] = {
    **{kind: kind.upper().removesuffix("_S").removesuffix("_M") for kind in GGUF_TYPES},
    **{"q4_k_m": "Q6_K", "q5_k_m": "Q6_K", "q4_k_s": "Q5_K"},
}


def _wanted_type(tensor: GGUFTensor, file_type: GGUFType, layers: int, tied: bool) -> str:
    """The type that a file type gives to a tensor whose rows fit."""
    part, layer = tensor.name.split(".")[-2], _layer(tensor.name)
    raised = layer is not None and part in _RAISED_PARTS and len(tensor.shape) > 1
    if layer is not None and raised and _is_raised(part, file_type, layer, layers):
        return _RAISED_TYPES[file_type]
    return _plain_type(tensor, file_type, tied)


def _plain_type(tensor: GGUFTensor, file_type: GGUFType, tied: bool) -> str:
    """The same in a layer that gets no more bits; one-dimensional tensors stay F32.

    K-quants follow llama.cpp; for the others the matrix of the logits is Q8_0, as its K-quant of choice (Q6_K) needs
    llama.cpp. Source: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type_impl.
    """
    part = tensor.name.split(".")[-2]
    if len(tensor.shape) == 1 or part == "position_embd":
        return "F32"
    default = file_type.upper().removesuffix("_S").removesuffix("_M")
    if part == "attn_qkv" and file_type in ("q4_k_m", "q5_k_m"):
        return "Q5_K" if file_type == "q4_k_m" else "Q6_K"
    if part == "output" or (part == "token_embd" and tied):
        if needs_llamacpp(file_type):
            return "Q8_0" if tensor.shape[-1] % BLOCKS[default][0] else "Q6_K"
        return default if BLOCKS[default][0] == 1 else "Q8_0"
    return default


def _is_raised(part: str, file_type: GGUFType, layer: int, layers: int) -> bool:
    """Of _M the first and the last eighth of the layers and every third between; of Q4_K_S the first ones."""
    if file_type in ("q4_k_m", "q5_k_m"):
        return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return file_type == "q4_k_s" and layer < (4 if part == "attn_v" else layers // 8)


def _raised_layers(part: str, file_type: GGUFType, layers: int) -> int:
    """For how many layers `_is_raised` holds."""
    if part not in _RAISED_PARTS:
        return 0
    first, last = layers // 8, 7 * layers // 8
    if file_type in ("q4_k_m", "q5_k_m"):
        return first + (layers - last) + (last - first) // 3
    return 0 if file_type != "q4_k_s" else min(4, layers) if part == "attn_v" else first


def _fitting_type(wanted: str, columns: int) -> str:
    """`wanted`, or what takes its place for rows of `columns` numbers."""
    if columns % BLOCKS[wanted][0] == 0:
        return wanted
    smaller = FALLBACKS.get(wanted, wanted)
    return smaller if columns % BLOCKS[smaller][0] == 0 else "F16"


def _layer(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
