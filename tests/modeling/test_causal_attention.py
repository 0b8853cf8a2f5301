"""Attention on matrix tiles beside float64, and when a run uses it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_tinylm.modeling import causal_attention as kernel
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM, TinyLMRMSNorm
from hf_tinylm.sections import ModelSection

needs_tiles = pytest.mark.skipif(not kernel.has_tiles(), reason="needs a processor with matrix tiles (AMX)")
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder for compiled code, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "has_tiles", lambda: True)
    kernel.kernel_problem.cache_clear()
    kernel._library.cache_clear()
    yield tmp_path / "hf_tinylm" / "kernels"
    kernel.kernel_problem.cache_clear()
    kernel._library.cache_clear()


def drawn(windows: int, heads: int, kv_heads: int, positions: int, channels: int, size: float = 1.0) -> Tensors:
    """Query, key, value and the gradient of the output, laid out as a model has them."""
    draw = torch.Generator().manual_seed(positions)
    query = torch.randn(windows, heads, positions, channels, generator=draw) * size
    key = torch.randn(windows, kv_heads, positions, channels, generator=draw)
    value = torch.randn(windows, positions, kv_heads, channels, generator=draw).transpose(1, 2)
    upstream = torch.randn(windows, positions, heads, channels, generator=draw)
    return tuple(part.bfloat16() for part in (query, key, value, upstream))


def on_tiles(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor) -> Tensors:
    inputs = [part.detach().requires_grad_() for part in (query, key, value)]
    out = kernel.causal_attention(inputs[0], inputs[1], inputs[2], query.shape[-1] ** -0.5)
    return (out.detach(), *torch.autograd.grad(out, inputs, upstream))


def by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor, dtype: torch.dtype
) -> Tensors:
    inputs = [part.detach().to(dtype).requires_grad_() for part in (query, key, value)]
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(*inputs, is_causal=True, enable_gqa=True).transpose(1, 2)
    return (out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype)))


@needs_tiles
@pytest.mark.parametrize(
    ("windows", "heads", "kv_heads", "positions", "channels", "size"),
    [
        (2, 5, 5, 512, 64, 1.0),
        (1, 12, 4, 1_024, 64, 1.0),
        (3, 4, 2, 96, 32, 8.0),  # peaked: nearly all of a row's weight on one key
        (2, 3, 1, 77, 64, 1.0),
        (1, 2, 1, 130, 128, 3.0),
        (1, 2, 2, 33, 96, 1.0),
        (2, 2, 1, 2, 32, 1.0),
    ],
)
def test_output_and_gradients_are_as_near_to_float64_as_those_of_torch_in_bfloat16(
    windows: int, heads: int, kv_heads: int, positions: int, channels: int, size: float
) -> None:
    case = drawn(windows, heads, kv_heads, positions, channels, size)
    found, torchs, exact = on_tiles(*case), by_torch(*case, torch.bfloat16), by_torch(*case, torch.float64)
    for name, own, other, expected in zip(("out", "query", "key", "value"), found, torchs, exact, strict=True):
        assert own.dtype == torch.bfloat16
        error, others = ((part.double() - expected).norm() / expected.norm() for part in (own, other))
        assert error <= 1.25 * others, (name, float(error), float(others))
        assert error < 1e-2  # bfloat16 rounds by 4e-3 at most, factors and result


@needs_tiles
def test_one_position_attends_to_itself_alone() -> None:
    query, key, value, upstream = drawn(2, 4, 2, 1, 64)
    out, query_gradient, key_gradient, value_gradient = on_tiles(query, key, value, upstream)
    assert torch.equal(out, value.repeat_interleave(2, dim=1).transpose(1, 2))
    assert query_gradient.abs().max() < 0.02  # zero but for the rounding of the output
    assert key_gradient.abs().max() < 0.02
    summed = upstream.transpose(1, 2).reshape(2, 2, 2, 1, 64).float().sum(dim=2)
    assert torch.equal(value_gradient, summed.bfloat16())


@needs_tiles
def test_later_positions_change_nothing_before_them() -> None:
    query, key, value, upstream = drawn(1, 2, 1, 200, 64)
    for position in (1, 31, 32, 47, 100, 199):
        other = [part.clone() for part in (query, key, value)]
        for part in other:
            part[:, :, position:] = 3.0
        assert torch.equal(
            on_tiles(query, key, value, upstream)[0][:, :position], on_tiles(*other, upstream)[0][:, :position]
        )


@needs_tiles
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    case, threads = drawn(3, 6, 2, 160, 32), torch.get_num_threads()
    found = []
    for count in (1, 2, 5, 2):
        torch.set_num_threads(count)
        found.append(on_tiles(*case))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_tiles
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_not_swallowed(which: int, bad: float) -> None:
    case = drawn(1, 2, 2, 96, 32)
    case[which][0, 1, 40, 7] = bad
    out = on_tiles(*case)[0]
    assert not out[0, 40:, 1].isfinite().all()
    assert out[0, :32].isfinite().all()
    assert out[0, :, 0].isfinite().all()


@needs_tiles
def test_other_users_of_the_tiles_on_the_same_threads_find_them_as_they_were() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 300, generator=draw).bfloat16() for _ in range(2))
    case = drawn(2, 4, 2, 96, 64)
    product, attention = a @ b, on_tiles(*case)
    for _ in range(20):
        assert torch.equal(a @ b, product)
        assert all(torch.equal(x, y) for x, y in zip(on_tiles(*case), attention, strict=True))


@needs_tiles
def test_the_operator_keeps_what_compilers_are_told_of_it() -> None:
    query, key, value, _ = drawn(1, 4, 2, 48, 32)
    inputs = [part.detach().requires_grad_() for part in (query, key, value)]
    torch.library.opcheck(kernel._forward, (*inputs, 0.2))


@needs_tiles
def test_a_training_pass_on_tiles_is_as_near_to_float64_as_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within twice its error, and evaluation keeps its bits."""

    def one_pass(model: TinyLMForCausalLM, bf16: bool = True) -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss
        loss.backward()
        return torch.cat([part.grad.double().flatten() for part in model.parameters()])  # type: ignore[union-attr]

    def evaluated(model: TinyLMForCausalLM) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found: torch.Tensor = model.eval()(input_ids=ids).logits
        model.train()
        return found

    ids = torch.randint(4, 211, (3, 71), generator=torch.Generator().manual_seed(3))
    model = new_model(ModelSection(64, 3, 2, 1, 128, qk_norm=True), 211, 70, seed=1).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # scores and logits that differ, as in a trained model
    reference = copy.deepcopy(model).double()
    monkeypatch.setattr(TinyLMRMSNorm, "compute_dtype", torch.float64)
    exact = one_pass(reference, bf16=False)
    monkeypatch.undo()
    plain, logits = one_pass(model), evaluated(model)
    assert kernel.kernel_of(model) == "torch"
    assert kernel.attend_on_tiles(model, 70) is None
    assert kernel.kernel_of(model) == "tiles"
    tiled = one_pass(model)
    assert not torch.equal(tiled, plain)
    assert (tiled - exact).norm() <= 2 * (plain - exact).norm()
    assert torch.equal(evaluated(model), logits)


@pytest.mark.parametrize(
    ("section", "length", "attention"),
    [
        (ModelSection(32, 1, 4, 4, 64), 64, "sdpa"),  # eight channels of a head fill no tile
        (ModelSection(64, 1, 2, 2, 64, attention_dropout=0.1), 64, "sdpa"),
        (ModelSection(64, 1, 2, 2, 64), 64, "eager"),
        (ModelSection(64, 1, 2, 2, 64), kernel.LONGEST + 1, "sdpa"),
    ],
)
def test_what_tiles_are_not_for_is_left_to_torch(
    unloaded: Path, section: ModelSection, length: int, attention: str
) -> None:
    model = new_model(section, 101, length, seed=1)
    model.config._attn_implementation = attention
    assert kernel.attend_on_tiles(model, length) is None
    assert kernel.kernel_of(model) == "torch"
    assert not unloaded.exists()


def test_a_compiler_that_fails_is_named_and_leaves_the_model_as_it_was(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(ModelSection(64, 1, 2, 2, 64), 101, 64, seed=1)
    monkeypatch.setenv("CC", "false")
    assert kernel.attend_on_tiles(model, 64) == "Attention on matrix tiles cannot be used here: false ended with 1:"
    monkeypatch.setenv("CC", "no-such-compiler")
    kernel.kernel_problem.cache_clear()
    problem = kernel.attend_on_tiles(model, 64)
    assert problem is not None
    assert "no-such-compiler" in problem
    assert kernel.kernel_of(model) == "torch"
    assert list(unloaded.iterdir()) == []


def test_a_kernel_that_is_off_is_not_used(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model(ModelSection(64, 1, 2, 2, 64), 101, 64, seed=1)
    monkeypatch.setattr(kernel, "_library", lambda: None)
    for error in (0.02, math.nan):
        monkeypatch.setattr(kernel, "_largest_error", lambda error=error: error)
        kernel.kernel_problem.cache_clear()
        problem = kernel.attend_on_tiles(model, 64)
        assert problem is not None
        assert problem.endswith("here, more than 7.8e-03.")
        assert kernel.kernel_of(model) == "torch"
    monkeypatch.undo()


@needs_tiles
def test_compiled_code_is_kept_and_what_is_none_is_built_again(unloaded: Path) -> None:
    built = kernel._target()
    built.parent.mkdir(parents=True)
    built.write_bytes(b"not a library")
    assert kernel.kernel_problem() is None
    assert list(unloaded.iterdir()) == [built]
    kept = built.stat().st_mtime_ns
    assert built.read_bytes()[:4] == b"\x7fELF"
    kernel.kernel_problem.cache_clear()
    kernel._library.cache_clear()
    assert kernel.kernel_problem() is None
    assert built.stat().st_mtime_ns == kept
