"""A stock `llama`, `qwen3` or `gpt2` model folder as GGUF files, without torch.

Tensors are read, converted and written a few rows at a time, so memory depends on neither the model nor its largest
tensor. Everything that llama.cpp would read differently from Hugging Face is refused before a file is opened; the asked
name appears when the file is whole.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ExportError
from ..files import atomic_file, temporary_sibling
from ..gguf_plan import (
    ALIGNMENT,
    FILE_TYPE_NUMBERS,
    GGUFPlan,
    GGUFType,
    PlannedTensor,
    gguf_tensors,
    needs_llamacpp,
    plan_tensors,
)
from .gguf_tokenizer import TokenizerSection, read_json_object, read_tokenizer_section
from .model_config import ExportedConfig, read_exported_config
from .quantize import quantize_file
from .weights import SafetensorsFolder

CHUNK_NUMBERS = 2**21  # converted at a time: 8 MiB in float32


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


class GGUFSource:
    """A model folder (config, safetensors, tokenizer) that was read and found fit to be written.

    `name` and `licence` default to those of the folder's README. `tokenizer_folder` is for a checkpoint, whose
    tokenizer is elsewhere; without weights only a plan can be made.

    Raises:
        ExportError: the folder is incomplete, contradicts itself, or holds something that llama.cpp reads differently.
    """

    def __init__(
        self,
        model_folder: Path,
        name: str | None = None,
        licence: str | None = None,
        tokenizer_folder: Path | None = None,
    ) -> None:
        config = read_json_object(model_folder / "config.json")
        self.config = read_exported_config(config)
        self.section = read_tokenizer_section(tokenizer_folder or model_folder, config)
        tokens, rows = len(self.section.tokens), self.config.shape.vocab_size
        if rows < tokens:
            raise ExportError(
                f"config.json has vocab_size {rows:,}, fewer than the {tokens:,} tokens of tokenizer.json. "
                "Use the tokenizer that the model was trained with."
            )
        self.trimmed_rows = rows - tokens
        self.tensors = gguf_tensors(self.config.shape, tokens)
        self.weights = SafetensorsFolder(model_folder)
        self.weights.check({tensor.source: tensor.source_shape for tensor in self.tensors})
        card = _model_card(model_folder)
        self.name = name or card.get("model_name") or model_folder.resolve().name
        self.licence = licence or card.get("license")

    def plan(self, file_type: GGUFType) -> GGUFPlan:
        """What the file of a type will hold, to the byte."""
        return plan_tensors(self.tensors, file_type, self._header_bytes)

    def write(self, output: Path, file_type: GGUFType) -> GGUFReport:
        """Write the file of a type that needs no llama.cpp."""
        plan = self.plan(file_type)
        with atomic_file(output) as temporary:
            self._write_header(temporary, plan)
            self._append_tensors(temporary, plan, output.name)
        return self._report(output, plan)

    def write_all(self, targets: Mapping[GGUFType, Path]) -> dict[GGUFType, GGUFReport]:
        """Write a file of each type; those that llama.cpp searches for come from one exact F32 file, removed after.

        Raises:
            MissingExtraError: a type needs llama-cpp-python, which is not installed.
            ExportError: a number that the type cannot hold, or llama.cpp failed.
        """
        reports = {kind: self.write(path, kind) for kind, path in targets.items() if not needs_llamacpp(kind)}
        searched = {kind: path for kind, path in targets.items() if needs_llamacpp(kind)}
        if searched:
            exact = temporary_sibling(next(iter(searched.values())).with_suffix(".f32"))
            try:
                self.write(exact, "f32")
                for kind, path in searched.items():
                    quantize_file(exact, path, FILE_TYPE_NUMBERS[kind])
                    reports[kind] = self._report(path, _plan_as_written(path, self.plan(kind)))
            finally:
                exact.unlink(missing_ok=True)
        return {kind: reports[kind] for kind in targets}

    @cached_property
    def _header_bytes(self) -> int:
        """Bytes before the tensors: written once to be counted, as they do not depend on the type."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "header"
            self._write_header(path, plan_tensors(self.tensors, "f32", 0))
            return path.stat().st_size

    def _write_header(self, path: Path, plan: GGUFPlan) -> None:
        """Metadata and the list of tensors."""
        import gguf

        writer = gguf.GGUFWriter(path, self.config.architecture)
        try:
            _add_general(writer, plan, self.name, self.licence)
            _add_architecture(writer, self.config, len(self.section.tokens))
            _add_tokenizer(writer, self.section)
            for planned in plan.tensors:
                kind = gguf.GGMLQuantizationType[planned.stored]
                writer.add_tensor_info(
                    planned.tensor.name, planned.tensor.shape, np.dtype(np.float32), planned.bytes, raw_dtype=kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()

    def _append_tensors(self, path: Path, plan: GGUFPlan, name: str) -> None:
        from tqdm import tqdm

        with open(path, "ab") as file:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for planned in tqdm(plan.tensors, desc=name, unit="tensor", leave=False, disable=None):
                for chunk in _stored_chunks(self.weights, planned):
                    file.write(chunk.data)
                file.write(bytes(-file.tell() % ALIGNMENT))

    def _report(self, path: Path, plan: GGUFPlan) -> GGUFReport:
        return GGUFReport(
            path=path,
            file_type=plan.file_type,
            architecture=self.config.architecture,
            bytes=path.stat().st_size,
            parameters=plan.parameters,
            bits_per_weight=plan.bits_per_weight,
            tensor_types=plan.tensor_types,
            trimmed_rows=self.trimmed_rows,
        )


def write_gguf(
    model_folder: Path,
    output: Path,
    file_type: GGUFType = "f16",
    name: str | None = None,
    licence: str | None = None,
) -> GGUFReport:
    """Write the model of `model_folder` to the GGUF file `output`. One-dimensional tensors stay F32.

    Raises:
        ExportError: as `GGUFSource` and `GGUFSource.write_all`.
    """
    return GGUFSource(Path(model_folder), name, licence).write_all({file_type: Path(output)})[file_type]


def interleave_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a (heads x D, H) projection: within a head, row i of each half becomes rows 2i and 2i + 1.

    Attention scores stay the same, as queries and keys are reordered alike (each with its own number of heads).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _stored_chunks(weights: SafetensorsFolder, planned: PlannedTensor) -> Iterator[np.ndarray]:
    """The tensor as it is stored, some whole rows (and, where they are reordered, whole heads) at a time."""
    tensor = planned.tensor
    rows = tensor.shape[0]
    if tensor.transposed:  # whole: its rows are columns of the file, and the largest has 4 x hidden^2 numbers
        yield _stored(weights.rows(tensor.source, 0, tensor.source_shape[0]).T, planned.stored, tensor.source)
        return
    step = max(1, CHUNK_NUMBERS // math.prod(tensor.shape[1:]))
    if tensor.rotary_heads:
        head = rows // tensor.rotary_heads
        step = max(1, step // head) * head
    for start in range(0, rows, step):
        chunk = weights.rows(tensor.source, start, min(rows, start + step))
        if tensor.rotary_heads:
            chunk = interleave_rotary_rows(chunk, len(chunk) // head)
        yield _stored(chunk, planned.stored, tensor.source)


def _stored(chunk: np.ndarray, kind: str, source: str) -> np.ndarray:
    """Finite numbers in a storage type, as an array whose bytes are those of the file."""
    import gguf

    if not np.isfinite(chunk).all():
        raise ExportError(f"{source} has values that are not finite. Export an earlier checkpoint.")
    if kind not in ("F32", "BF16"):
        largest = float(np.abs(chunk).max(initial=0.0))
        if largest >= 65_520:  # rounds to infinity in float16, in which block scales are kept too
            raise ExportError(f"{source} has values beyond float16, up to {largest:.3g}. Use f32 or bf16.")
    if kind in ("F32", "F16"):
        return np.ascontiguousarray(chunk, dtype=np.float32 if kind == "F32" else np.float16)
    numbers = np.ascontiguousarray(chunk, dtype=np.float32)
    return np.ascontiguousarray(gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]))


def _plan_as_written(path: Path, plan: GGUFPlan) -> GGUFPlan:
    """The plan with the types that llama.cpp has really chosen, which another version may choose differently."""
    from gguf import GGUFReader

    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    return replace(plan, tensors=tuple(replace(each, stored=kinds[each.tensor.name]) for each in plan.tensors))


def _add_general(writer: Any, plan: GGUFPlan, name: str, licence: str | None) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    if licence:
        writer.add_license(licence)
    writer.add_file_type(FILE_TYPE_NUMBERS[plan.file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_size_label(gguf.size_label(plan.parameters, 0, 0, 0))


def _add_architecture(writer: Any, config: ExportedConfig, tokens: int) -> None:
    shape = config.shape
    writer.add_vocab_size(tokens)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_head_count(shape.num_attention_heads)
    if config.rope_theta is None:
        writer.add_layer_norm_eps(config.norm_eps)
        return
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)


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
    writer.add_add_bos_token(section.add_bos)
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
