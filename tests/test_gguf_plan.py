"""Sizes and types from shapes alone, against the gguf package's own tables and against files that were measured."""

from __future__ import annotations

import math

import gguf
import pytest

from hf_tinylm.gguf_plan import BLOCKS, FILE_TYPE_NUMBERS, GGUF_TYPES, GGUFType, file_bytes, needs_llamacpp, plan_shape
from hf_tinylm.planning import ModelShape, export_bytes

OF_345M = ModelShape(32_000, 960, 32, 15, 5, 2_560, 64, qk_norm=False, tie_word_embeddings=True)


def small(hidden: int, inner: int = 512, layers: int = 16, tied: bool = True) -> ModelShape:
    return ModelShape(1_000, hidden, layers, 4, 2, inner, hidden // 4, tie_word_embeddings=tied)


@pytest.mark.parametrize(
    ("file_type", "megabytes"), [("f16", 692.0), ("q8_0", 368.0), ("q4_k_m", 252.5), ("q4_k_s", 241.8), ("q4_0", 211.0)]
)
def test_a_model_of_345_million_has_the_sizes_that_were_measured(file_type: GGUFType, megabytes: float) -> None:
    assert plan_shape(OF_345M, file_type).bytes / 1e6 == pytest.approx(megabytes, rel=0.001)


def test_rows_of_960_make_192_of_290_tensors_fall_back() -> None:
    plan = plan_shape(OF_345M, "q4_k_m")
    assert len(plan.tensors) == 290
    assert plan.fallbacks == {"Q4_K -> Q5_0": 176, "Q6_K -> Q8_0": 16}
    assert plan.bits_per_weight == pytest.approx(5.82, abs=0.01)  # not the 4.5 of its blocks
    assert "192 of 290 tensors" in plan.lines()[1]
    assert plan_shape(OF_345M, "q8_0").lines() == [plan_shape(OF_345M, "q8_0").lines()[0]]


def test_blocks_and_numbers_are_those_of_the_gguf_package() -> None:
    assert {gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in BLOCKS} == set(BLOCKS.values())
    for kind, block in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == block
    for file_type, number in FILE_TYPE_NUMBERS.items():
        prefix = "ALL" if file_type == "f32" else "MOSTLY"
        assert gguf.LlamaFileType[f"{prefix}_{file_type.upper()}"] == number
    assert set(FILE_TYPE_NUMBERS) == set(GGUF_TYPES)


@pytest.mark.parametrize(
    ("hidden", "file_type", "query", "embedding"),
    [
        (256, "q4_k_m", "Q4_K", "Q6_K"),
        (256, "q5_k_m", "Q5_K", "Q6_K"),
        (64, "q4_k_m", "Q5_0", "Q8_0"),
        (64, "q5_k_s", "Q5_1", "Q8_0"),
        (64, "q6_k", "Q8_0", "Q8_0"),
        (64, "q4_0", "Q4_0", "Q8_0"),
        (48, "q4_k_m", "F16", "F16"),
        (48, "q8_0", "F16", "F16"),
        (48, "bf16", "BF16", "BF16"),
        (48, "f32", "F32", "F32"),
    ],
)
def test_rows_that_do_not_fit_the_block_get_the_type_that_llama_cpp_gives_them(
    hidden: int, file_type: GGUFType, query: str, embedding: str
) -> None:
    stored = {planned.tensor.name: planned.stored for planned in plan_shape(small(hidden), file_type).tensors}
    assert stored["blk.0.attn_q.weight"] == query
    assert stored["token_embd.weight"] == embedding
    assert stored["blk.0.attn_norm.weight"] == "F32"


def test_an_untied_embedding_is_like_any_matrix_and_the_output_is_not() -> None:
    stored = {p.tensor.name: p.stored for p in plan_shape(small(256, tied=False), "q4_0").tensors}
    assert (stored["token_embd.weight"], stored["output.weight"]) == ("Q4_0", "Q8_0")


def test_q4_k_m_spends_more_bits_on_the_outer_eighths_and_every_third_layer() -> None:
    plan = plan_shape(small(256, layers=16), "q4_k_m")
    more = [p.tensor.name for p in plan.tensors if p.stored == "Q6_K" and "ffn_down" in p.tensor.name]
    assert more == [f"blk.{layer}.ffn_down.weight" for layer in (0, 1, 4, 7, 10, 13, 14, 15)]
    plan = plan_shape(small(256, layers=16), "q4_k_s")
    more = [p.tensor.name for p in plan.tensors if p.stored == "Q5_K"]
    assert more == [
        *("blk.0.attn_v.weight", "blk.0.ffn_down.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight"),
        *("blk.2.attn_v.weight", "blk.3.attn_v.weight"),
    ]


def test_parameters_are_those_of_the_shape_without_padding_rows() -> None:
    padded = ModelShape(1_024, 64, 2, 4, 2, 96, 16, qk_norm=True, tie_word_embeddings=False)
    plan = plan_shape(padded, "f16", tokens=1_000)
    assert plan.parameters == padded.parameters - 2 * 24 * 64
    assert sum(math.prod(p.tensor.source_shape) for p in plan.tensors) == padded.parameters


@pytest.mark.parametrize("file_type", GGUF_TYPES)
def test_bytes_without_counting_layers_are_those_of_the_plan(file_type: GGUFType) -> None:
    for layers in range(1, 34):
        for shape in (small(256, layers=layers), small(64, 512, layers, tied=False), small(48, 96, layers)):
            assert file_bytes(shape, file_type) == plan_shape(shape, file_type).bytes


def test_disk_for_an_export_counts_the_exact_file_that_k_quants_are_made_from() -> None:
    plain = export_bytes(OF_345M, ["f16", "q8_0"])
    assert plain == plan_shape(OF_345M, "f16").bytes + plan_shape(OF_345M, "q8_0").bytes
    assert export_bytes(OF_345M, ["f16", "q4_k_m"]) > 4 * OF_345M.parameters + 2 * OF_345M.parameters
    assert [kind for kind in GGUF_TYPES if needs_llamacpp(kind)] == ["q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"]
