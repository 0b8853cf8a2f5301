"""The kernels in C beside float64, and when a run uses them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_tinylm.modeling import native
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM, TinyLMRMSNorm
from hf_tinylm.modeling.native import attention as kernel
from hf_tinylm.modeling.native import build
from hf_tinylm.modeling.native.loss import native_chunk_loss
from hf_tinylm.modeling.projected_loss import chunk_loss
from hf_tinylm.sections import ModelSection

needs_vectors = pytest.mark.skipif(not build.has_vectors(), reason="needs a processor with AVX-512 and bfloat16")
needs_tiles = pytest.mark.skipif(not build.has_tiles(), reason="needs a processor with matrix tiles (AMX)")
Tensors = tuple[torch.Tensor, ...]


def forget() -> None:
    for known in (build.library, kernel.prepared, native.loss_problem, native.attention_problem):
        known.cache_clear()


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder for compiled code of a processor that can use it, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "has_vectors", lambda: True)
    monkeypatch.setattr(native, "has_tiles", lambda: True)
    forget()
    yield tmp_path / "hf_tinylm" / "kernels"
    forget()


def small_model(**keys: object) -> TinyLMForCausalLM:
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return new_model(ModelSection(**{**shape, "intermediate_size": 64, **keys}), 101, 64, seed=1)  # type: ignore[arg-type]


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


@needs_vectors
@pytest.mark.parametrize("classes", [7, 16, 37, 512, 8_192, 50_257])
def test_losses_and_gradients_of_logits_are_those_of_float64(classes: int) -> None:
    draw = torch.Generator().manual_seed(classes)
    logits = (4 * torch.randn(6, classes + 3, generator=draw)).bfloat16()[:, :classes]  # rows further apart than long
    logits[2] += 1_000  # large numbers near each other
    targets = torch.randint(0, classes, (6,), generator=draw)
    targets[0], targets[1] = 0, classes - 1
    wide, other = logits.double(), logits.clone()
    exact, found = chunk_loss(wide, targets), native_chunk_loss(logits, targets)
    chunk_loss(other, targets)  # what bfloat16 costs any gradient
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert (logits.double() - wide).norm() <= 1.01 * (other.double() - wide).norm()
    assert (logits.double() - wide).abs().max() <= 2.0**-8


@needs_vectors
def test_no_number_of_the_loss_is_lost_or_touched_beyond_its_row() -> None:
    rows = torch.full((3, 40), 7.0).bfloat16()
    rows[1, 5] = math.nan
    rows[2, :] = torch.finfo(torch.bfloat16).min
    losses = native_chunk_loss(rows[:, :33], torch.tensor([3, 4, 5]))
    assert losses[0].item() == pytest.approx(math.log(33), rel=1e-6)
    assert losses[1].isnan()
    assert losses[2].item() == pytest.approx(math.log(33), rel=1e-6)
    assert (rows[:, 33:][[0, 1]] == 7.0).all()
    wide = torch.randn(2, 9)
    assert torch.equal(native_chunk_loss(wide.clone(), torch.tensor([1, 2])), chunk_loss(wide, torch.tensor([1, 2])))


@needs_vectors
def test_a_target_that_is_no_class_is_refused_before_anything_is_written() -> None:
    for target in (-100, -1, 9):
        logits = torch.ones(2, 9).bfloat16()
        with pytest.raises(IndexError, match=r"^1 of 2 targets are none of the 9 classes\.$"):
            native_chunk_loss(logits, torch.tensor([3, target]))
        assert (logits == 1).all()


@needs_vectors
def test_bits_of_the_loss_do_not_depend_on_the_number_of_threads() -> None:
    logits, threads = torch.randn(50, 300).bfloat16(), torch.get_num_threads()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        own = logits.clone()
        found.append((native_chunk_loss(own, torch.arange(50)), own))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_tiles
def test_a_training_pass_with_native_kernels_is_as_near_to_float64_as_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert native.native_kernels_of(model) == "none"
    assert native.use_native_kernels(model, 70) is None
    assert native.native_kernels_of(model) == "loss, attention"
    tiled = one_pass(model)
    assert not torch.equal(tiled, plain)
    assert (tiled - exact).norm() <= 2 * (plain - exact).norm()
    assert torch.equal(evaluated(model), logits)


@needs_vectors
@pytest.mark.parametrize(
    ("keys", "length"),
    [
        ({"num_attention_heads": 4}, 64),  # sixteen channels of a head fill no tile
        ({"attention_dropout": 0.1}, 64),
        ({"attn_implementation": "eager"}, 64),
        ({}, kernel.LONGEST + 1),
    ],
)
def test_attention_that_tiles_are_not_for_is_left_to_torch(keys: dict[str, object], length: int) -> None:
    model = small_model(**keys)
    assert native.use_native_kernels(model, length) is None
    assert native.native_kernels_of(model) == "loss"


def test_other_processors_compile_nothing(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_vectors", lambda: False)
    model = small_model()
    assert native.use_native_kernels(model, 64) is None
    assert native.native_kernels_of(model) == "none"
    assert not unloaded.exists()


def test_a_compiler_that_fails_is_named_and_leaves_the_model_as_it_was(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    for compiler, words in (("false", "false ended with 1:"), ("no-such-compiler", "'no-such-compiler'")):
        monkeypatch.setenv("CC", compiler)
        forget()
        problem = native.use_native_kernels(model, 64)
        assert problem is not None
        assert problem.startswith("The native kernel of loss cannot be used here: ")
        assert problem.endswith(words)
    assert native.native_kernels_of(model) == "none"
    assert list(unloaded.iterdir()) == []


@pytest.mark.parametrize(("name", "left"), [("loss", "none"), ("attention", "loss")])
@pytest.mark.parametrize("error", [0.02, math.nan])
def test_a_kernel_that_is_off_is_not_used(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: str, error: float
) -> None:
    model = small_model()
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(kernel, "prepared", functools.cache(lambda: None))
    for part in ("loss", "attention"):
        monkeypatch.setattr(getattr(native, part), "largest_error", lambda part=part: error if part == name else 0.0)
    problem = native.use_native_kernels(model, 64)
    assert problem is not None
    assert problem.startswith(f"The native kernel of {name} is off by ")
    assert problem.endswith("here, more than 7.8e-03.")
    assert native.native_kernels_of(model) == left


@needs_vectors
def test_compiled_code_is_kept_and_what_is_none_is_built_again(unloaded: Path) -> None:
    built = build.target()
    built.parent.mkdir(parents=True)
    built.write_bytes(b"not a library")
    assert native.loss_problem() is None
    assert list(unloaded.iterdir()) == [built]
    assert built.read_bytes()[:4] == b"\x7fELF"
    kept = built.stat().st_mtime_ns
    forget()
    assert native.loss_problem() is None
    assert built.stat().st_mtime_ns == kept
