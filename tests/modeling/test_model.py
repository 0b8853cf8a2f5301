from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hf_tinylm.errors import ConfigError
from hf_tinylm.model_folder import find_model_folder
from hf_tinylm.modeling.factory import load_model, meta_model, new_model
from hf_tinylm.modeling.model import TinyLMRMSNorm
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.sections import ModelSection

SHAPES = [(4, 4), (8, 2), (12, 4), (15, 5)]
Make = Callable[..., Any]


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["f32", "f64"])
def test_logits_equal_the_stock_model_with_the_same_weights(
    make_model: Make, ids: torch.Tensor, heads: int, kv_heads: int, qk_norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model = make_model(heads, kv_heads, gain=1.5, qk_norm=qk_norm, rope_theta=500_000.0).to(dtype)
    stock = stock_model(model)
    assert type(stock).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        stock.set_attn_implementation(attention)
        with torch.no_grad():
            ours, theirs = model(ids).logits, stock(ids).logits
        assert theirs.std() > 0.5, "logits that do not vary prove nothing"
        assert (ours - theirs).abs().max() <= tolerance


def test_untied_head_and_head_size_of_its_own_equal_stock(make_model: Make, ids: torch.Tensor) -> None:
    model = make_model(8, 2, qk_norm=True, head_dim=12, tie_word_embeddings=False)
    with torch.no_grad():
        assert (model(ids).logits - stock_model(model)(ids).logits).abs().max() <= 1e-5
    assert "lm_head.weight" in dict(model.named_parameters())


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_equal_finite_differences_in_float64(
    make_model: Make, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch, qk_norm: bool, tied: bool
) -> None:
    """Central differences along a random direction in every parameter; the norm computes in float64 for this test."""
    monkeypatch.setattr(TinyLMRMSNorm, "compute_dtype", torch.float64)
    model = make_model(8, 2, qk_norm=qk_norm, tie_word_embeddings=tied, num_hidden_layers=2).double().train()
    labels = ids.clone()
    labels[0, 5:9] = -100
    model(ids, labels=labels).loss.backward()
    generator = torch.Generator().manual_seed(5)
    step = 1e-5
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        losses = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * step)
                losses.append(float(model(ids, labels=labels).loss))
                parameter.add_(direction, alpha=-sign * step)
        slope = (losses[0] - losses[1]) / (2 * step)
        exact = float((parameter.grad * direction).sum())
        assert math.isclose(slope, exact, rel_tol=1e-5, abs_tol=1e-8), f"{name}: {slope} is not {exact}"


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_cached_uncached_and_stock_generation_give_the_same_ids(
    make_model: Make, ids: torch.Tensor, qk_norm: bool
) -> None:
    model = make_model(12, 4, qk_norm=qk_norm)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 3}
    prompt = ids[:, :8]
    cached = model.generate(prompt, use_cache=True, **options)
    assert cached.shape == (2, 28)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))
    assert torch.equal(cached, stock_model(model).generate(prompt, **options))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_padded_on_the_left_has_the_logits_of_the_row_alone(
    make_model: Make, ids: torch.Tensor, attention: str
) -> None:
    model = make_model()
    model.set_attn_implementation(attention)
    short = ids[:1, :10]
    padded = functional.pad(short, (6, 0), value=3)
    mask = functional.pad(torch.ones_like(short), (6, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(short).logits
        beside = model(padded, attention_mask=mask, position_ids=positions).logits[:, 6:]
    assert (alone - beside).abs().max() < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_positions_that_restart_keep_documents_apart(make_model: Make, ids: torch.Tensor, attention: str) -> None:
    model = make_model().train()
    model.set_attn_implementation(attention)
    packed = torch.cat((ids[:1, :8], ids[1:, :8]), dim=1)
    positions = torch.cat((torch.arange(8), torch.arange(8)))[None]
    with torch.no_grad():
        apart = model(packed, position_ids=positions, use_cache=False).logits[:, 8:]
        alone = model(ids[1:, :8], use_cache=False).logits
        run_on = model(packed, use_cache=False).logits[:, 8:]
    assert (apart - alone).abs().max() < 1e-5
    assert (run_on - alone).abs().max() > 0.1, (
        "without positions the first document must be seen, or this proves nothing"
    )


def test_a_change_at_one_position_leaves_earlier_logits_untouched(make_model: Make, ids: torch.Tensor) -> None:
    model = make_model()
    other = ids.clone()
    other[:, 20] = (other[:, 20] + 1) % 101
    with torch.no_grad():
        before, after = model(ids).logits, model(other).logits
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_labels_and_shifted_labels_give_the_same_loss_as_a_plain_reference(make_model: Make, ids: torch.Tensor) -> None:
    model = make_model().double()
    labels = ids.clone()
    labels[1, 10:20] = -100
    logits = model(ids).logits
    chosen = [
        (functional.log_softmax(logits[row, t], -1)[labels[row, t + 1]])
        for row in range(2)
        for t in range(31)
        if labels[row, t + 1] != -100
    ]
    reference = -torch.stack(chosen).mean()
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.isclose(model(ids, labels=labels).loss, reference, rtol=1e-12)
    assert torch.isclose(model(ids, shift_labels=shifted).loss, reference, rtol=1e-12)
    halved = model(ids, shift_labels=shifted, num_items_in_batch=2 * len(chosen)).loss
    assert torch.isclose(halved, reference / 2, rtol=1e-12)


def test_training_returns_no_logits_and_evaluation_does(make_model: Make, ids: torch.Tensor) -> None:
    model = make_model()
    assert model(ids, labels=ids).logits is not None
    assert model(ids, labels=ids, return_logits=False).logits is None
    model.train()
    assert model(ids, labels=ids).logits is None
    assert model(ids).logits is not None


def test_padding_rows_get_no_probability_no_gradient_and_change_no_loss(make_model: Make, ids: torch.Tensor) -> None:
    plain = make_model()
    padded = make_model(pad_vocab_to_multiple_of=64)
    assert padded.config.vocab_size == 128
    with torch.no_grad():
        for name, parameter in padded.named_parameters():
            source = dict(plain.named_parameters())[name]
            parameter[: len(source)].copy_(source)
    assert torch.equal(plain(ids, labels=ids).loss, padded(ids, labels=ids).loss)
    logits = padded(ids).logits
    assert logits.shape[-1] == 128
    assert bool((logits[..., 101:].softmax(-1).isnan() | (logits[..., 101:] == -math.inf)).all())
    padded.train()
    padded(ids, labels=ids).loss.backward()
    assert float(padded.model.embed_tokens.weight.grad[101:].abs().max()) == 0.0
    with torch.no_grad():
        assert (stock_model(padded)(ids).logits - plain(ids).logits).abs().max() < 1e-5


def test_gradient_checkpointing_changes_no_gradient(make_model: Make, ids: torch.Tensor) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = make_model().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_initial_weights_follow_the_width_and_residual_projections_the_depth() -> None:
    section = ModelSection(
        hidden_size=320, num_hidden_layers=6, num_attention_heads=5, num_key_value_heads=5, intermediate_size=864
    )
    model = new_model(section, 2_000, 32, seed=0)
    expected = 0.035355339059327376  # sqrt(2 / (5 * 320))
    residual = expected / math.sqrt(12)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all())
            continue
        std = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else expected
        assert abs(float(parameter.detach().std()) / std - 1) < 0.02, name
        assert abs(float(parameter.detach().mean())) < 0.1 * std, name


def test_a_given_initializer_range_is_used_as_it_is() -> None:
    model = new_model(ModelSection(initializer_range=0.02, num_hidden_layers=1), 1_000, 32, seed=0)
    assert abs(float(model.model.embed_tokens.weight.detach().std()) / 0.02 - 1) < 0.02


def test_weights_depend_on_the_seed_alone() -> None:
    section = ModelSection(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    first = new_model(section, 300, 16, seed=7).state_dict()
    torch.rand(5)
    second, other = new_model(section, 300, 16, seed=7).state_dict(), new_model(section, 300, 16, seed=8).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "qk_norm", "parameters", "decayed"),
    [
        (768, 12, 12, 4, 2048, 32_000, False, 100_092_672, 100_073_472),
        (768, 16, 12, 4, 2048, 32_768, False, 125_854_464, 125_829_120),
        (1024, 24, 16, 4, 2816, 32_768, False, 304_137_216, 304_087_040),
        (960, 32, 15, 5, 2560, 32_000, True, 345_359_296, 345_292_800),
        (960, 32, 15, 5, 2560, 32_000, False, 345_355_200, 345_292_800),
    ],
)
def test_parameter_counts_of_the_published_shapes_on_the_meta_device(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    qk_norm: bool,
    parameters: int,
    decayed: int,
) -> None:
    section = ModelSection(hidden, layers, heads, kv_heads, ffn, qk_norm=qk_norm)
    model = meta_model(section, vocab, 1024)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters == model.config.shape.parameters
    assert sum(p.numel() for p in model.parameters() if p.ndim >= 2) == decayed == model.config.shape.decayed_parameters


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{}", '{"model_type"', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_damaged_configuration_is_an_error_that_names_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.json"))):
        load_model(tmp_path)


def test_a_run_given_as_a_model_is_told_which_of_its_folders_is_one(tmp_path: Path) -> None:
    def meant() -> str:
        with pytest.raises(ConfigError, match="is not a model folder") as caught:
            find_model_folder(str(tmp_path))
        return str(caught.value).rpartition(". ")[2]

    assert meant() == "Give a run's final folder, a checkpoint, or a model's folder."
    for name in ("checkpoint-00000100", "checkpoint-00000020", "final"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-00000100" / "config.json").touch()
    (tmp_path / "checkpoint-00000020" / "config.json").touch()
    assert meant() == f"Did you mean {tmp_path / 'checkpoint-00000100'}?"
    (tmp_path / "final" / "config.json").touch()
    assert meant() == f"Did you mean {tmp_path / 'final'}?"
