from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_tinylm.modeling import projected_loss as module
from hf_tinylm.modeling.loss import IGNORE_INDEX, summed_loss
from hf_tinylm.modeling.projected_loss import chunk_loss, compilable_chunk_loss, projected_loss

ROWS, LENGTH, HIDDEN, VOCABULARY = 3, 16, 24, 211
LOSSES = pytest.mark.parametrize("loss_of_chunk", [chunk_loss, compilable_chunk_loss])


@pytest.fixture(params=[1, 7, 48, 1000])
def rows_per_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param * VOCABULARY)
    return request.param


def drawn(dtype: torch.dtype, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64) * 0.5
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < ignored] = IGNORE_INDEX
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float64 by the plain formula, over a divisor as training has one."""
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    total = summed_loss(functional.linear(wide_hidden, wide_weight), labels)
    (total / 17).backward()
    return total.detach(), wide_hidden.grad, wide_weight.grad  # type: ignore[return-value]


@LOSSES
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_plain_logits_for_any_chunk(
    rows_per_chunk: int, loss_of_chunk: Any, ignored: float
) -> None:
    hidden, weight, labels = drawn(torch.float64, ignored)
    total = projected_loss(hidden, weight, labels, loss_of_chunk)
    (total / 17).backward()
    for found, expected in zip((total, hidden.grad, weight.grad), reference(hidden, weight, labels), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@LOSSES
def test_a_bfloat16_gradient_is_divided_by_a_count_that_is_not_rounded(loss_of_chunk: Any) -> None:
    gradients = []
    for divisor in (1, 23):  # 1/23 is 0.13% less in bfloat16
        hidden, weight, labels = drawn(torch.bfloat16)
        (projected_loss(hidden, weight, labels, loss_of_chunk) / divisor).backward()
        gradients.append((hidden.grad, weight.grad))
    for whole, divided in zip(*gradients, strict=True):
        assert float(divided.double().norm() * 23 / whole.double().norm()) == pytest.approx(1, abs=3e-4)


@LOSSES
def test_float32_is_as_exact_as_plain_float32(loss_of_chunk: Any) -> None:
    hidden, weight, labels = drawn(torch.float32)
    plain_hidden, plain_weight, _ = drawn(torch.float32)
    (summed_loss(functional.linear(plain_hidden, plain_weight), labels) / 17).backward()
    (projected_loss(hidden, weight, labels, loss_of_chunk) / 17).backward()
    _, *expected = reference(hidden, weight, labels)
    for ours, plain, exact in zip(
        (hidden.grad, weight.grad), (plain_hidden.grad, plain_weight.grad), expected, strict=True
    ):
        assert (ours.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


@LOSSES
def test_under_autocast_it_is_as_exact_as_plain_bfloat16(loss_of_chunk: Any) -> None:
    hidden, weight, labels = drawn(torch.float32)
    plain_hidden, plain_weight, _ = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = summed_loss(functional.linear(plain_hidden, plain_weight), labels)
        ours = projected_loss(hidden, weight, labels, loss_of_chunk)
    (plain / 17).backward()
    (ours / 17).backward()
    assert ours.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    total, *expected = reference(hidden, weight, labels)
    assert abs(ours.item() - total.item()) <= 2 * abs(plain.item() - total.item()) + 1e-3
    for found, other, exact in zip(
        (hidden.grad, weight.grad), (plain_hidden.grad, plain_weight.grad), expected, strict=True
    ):
        assert (found.double() - exact).norm() <= 2 * (other.double() - exact).norm()


def test_a_batch_without_a_target_gives_zero_and_zero_gradients() -> None:
    hidden, weight, labels = drawn(torch.float32, ignored=1.1)
    total = projected_loss(hidden, weight, labels)
    total.backward()
    assert total.item() == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_nothing_larger_than_a_chunk_of_logits_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8 * VOCABULARY)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x))
            return out

    hidden, weight, labels = drawn(torch.float32, ignored=0.0)
    with Sizes():
        projected_loss(hidden, weight, labels).backward()
    assert max(sizes) == max(weight.numel(), 8 * VOCABULARY)
    assert max(sizes) < ROWS * LENGTH * VOCABULARY


def test_without_gradients_only_the_loss_is_made() -> None:
    hidden, weight, labels = drawn(torch.float32)
    with torch.no_grad():
        total = projected_loss(hidden, weight, labels)
    assert not total.requires_grad
    assert math.isclose(total.item(), reference(hidden, weight, labels)[0].item(), rel_tol=1e-6)


@pytest.mark.slow
def test_a_compiled_chunk_gives_the_same_and_compiles_for_two_shapes_at_most() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # what other tests compiled counts there too
    compiled = torch.compile(compilable_chunk_loss)
    for length in (16, 15, 9, 4, 11):
        hidden, weight, labels = drawn(torch.float32, ignored=0.0)
        total = projected_loss(hidden[:, :length], weight, labels[:, :length], compiled)
        total.backward()
        expected, _, gradient = reference(hidden[:, :length], weight, labels[:, :length])
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(weight.grad.double() / 17, gradient, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_second_backward_pass_is_refused_and_not_scaled_twice() -> None:
    hidden, weight, labels = drawn(torch.float32)
    total = projected_loss(hidden, weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        total.backward()
