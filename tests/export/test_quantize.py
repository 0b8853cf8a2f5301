"""What needs llama-cpp-python: K-quants, and raw logits at every position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hf_tinylm.errors import ExportError, VerificationError
from hf_tinylm.export import quality
from hf_tinylm.export.gguf import GGUFSource, write_gguf
from hf_tinylm.export.llamacpp import LlamaCppServer
from hf_tinylm.export.logits import raw_logits
from hf_tinylm.export.parity import Reference, verify_gguf
from hf_tinylm.export.quantize import quantize_file
from hf_tinylm.gguf_plan import GGUF_TYPES, needs_llamacpp

pytest.importorskip("llama_cpp")

MakeModel = Callable[..., Path]
SEARCHED = [kind for kind in GGUF_TYPES if needs_llamacpp(kind)]


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": (4, 2), "head_dim": 64, "layers": 9, "tied": False, "vocab_size": 608},
        {"architecture": "qwen3", "heads": (15, 5), "head_dim": 16},
    ],
)
def test_a_plan_of_k_quants_is_what_llama_cpp_writes(make_model: MakeModel, tmp_path: Path, shape: Any) -> None:
    source = GGUFSource(make_model(**shape), name="Tiny", licence="mit")
    reports = source.write_all({kind: tmp_path / f"{kind}.gguf" for kind in SEARCHED})
    assert sorted(path.name for path in tmp_path.glob("*.gguf")) == sorted(f"{kind}.gguf" for kind in SEARCHED)
    for kind in SEARCHED:
        plan, reader = source.plan(kind), gguf.GGUFReader(tmp_path / f"{kind}.gguf")
        assert {t.name: t.tensor_type.name for t in reader.tensors} == plan.to_json()["tensors"]
        assert (tmp_path / f"{kind}.gguf").stat().st_size == plan.bytes == reports[kind].bytes
        assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
        assert reader.fields["general.name"].contents() == "Tiny"
        assert reader.fields["general.license"].contents() == "mit"


def test_a_k_quant_passes_the_gate_and_costs_little(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model("qwen3", heads=(4, 2), head_dim=64)
    write_gguf(folder, tmp_path / "model.gguf", "q6_k")
    limits = {"kl_divergence": 0.1, "top1_agreement": 0.8}  # random weights lose more than trained ones
    report = verify_gguf(tmp_path / "model.gguf", folder, random_strings=100, threads=1, limits=limits)
    assert report.failures == []
    assert report.quality is not None
    assert report.quality.engine == "llama-cpp-python"
    assert report.quality.positions > 1_500
    assert 1e-6 < report.quality.kl_divergence < 0.1


def test_what_llama_cpp_cannot_quantize_is_one_line_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"GGUF nonsense")
    with pytest.raises(ExportError, match=r"did not quantize out\.gguf") as caught:
        quantize_file(tmp_path / "source", tmp_path / "out.gguf", 15)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_raw_logits_are_those_of_the_model_at_every_position(
    make_model: MakeModel, tmp_path: Path, architecture: str
) -> None:
    folder = make_model(architecture, heads=(15, 5), theta=500_000.0)
    write_gguf(folder, tmp_path / "model.gguf", "f32")
    rows = [
        torch.randperm(540, generator=torch.Generator().manual_seed(n))[:length].tolist()
        for n, length in ((0, 90), (1, 7))
    ]
    reference = Reference(folder)
    for row, theirs in zip(rows, raw_logits(tmp_path / "model.gguf", rows, 544, 1), strict=True):
        ours = reference.logits(row)
        assert theirs.shape == ours.shape == (len(row), 544)
        assert ours.std() > 0.3
        np.testing.assert_allclose(theirs, ours, atol=2e-4)


def test_a_file_that_does_not_load_or_has_other_tokens_is_named(make_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_model(), path, "f32")
    with pytest.raises(VerificationError, match="the file has 544 tokens, the model 500"):
        list(raw_logits(path, [[1, 2]], 500, 1))
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(VerificationError, match=r"no logits for .*model\.gguf"):
        list(raw_logits(path, [[1, 2]], 544, 1))


def test_both_engines_measure_about_the_same_cost(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(heads=(12, 4))
    write_gguf(folder, tmp_path / "model.gguf", "q4_0")
    reference = Reference(folder)
    with LlamaCppServer(tmp_path / "model.gguf", threads=1) as server:
        every = quality.measure_quality(tmp_path / "model.gguf", server, reference)
        monkeypatch.setattr(quality, "every_logit_is_available", lambda: False)
        few = quality.measure_quality(tmp_path / "model.gguf", server, reference)
    assert (every.engine, few.engine) == ("llama-cpp-python", "xllamacpp")
    assert every.positions > 10 * few.positions
    assert few.kl_divergence == pytest.approx(every.kl_divergence, rel=0.5)
