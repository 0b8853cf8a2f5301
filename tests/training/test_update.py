"""`Update` by itself: the gradient scaler, and agreement."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from hf_tinylm.modeling.factory import new_model
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.optimizer import adamw
from hf_tinylm.training.update import Update


class OneProcess:
    num_processes = 1
    device = torch.device("cpu")

    def no_sync(self, model: Any) -> Any:
        return contextlib.nullcontext()


def make(scaler: torch.amp.GradScaler | None, max_grad_norm: float = 1.0) -> tuple[Update, torch.nn.Module]:
    section = ModelSection(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64
    )
    model = new_model(section, 101, 32, seed=1).train()
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    return Update(OneProcess(), model, optimizer, max_grad_norm, scaler), model


def batches(seed: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(4, 101, (4, 33), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids[rows, :-1], "shift_labels": ids[rows, 1:]} for rows in (slice(0, 2), slice(2, 4))]


def test_a_scaled_run_equals_the_plain_one_and_clips_unscaled_gradients() -> None:
    """The scale is a power of two, so scaling and unscaling change no bit in float32."""
    plain, model = make(None)
    scaled, other = make(torch.amp.GradScaler("cpu", init_scale=2.0**10))
    for seed in range(3):
        first, second = plain.run(batches(seed), 1e-3), scaled.run(batches(seed), 1e-3)
        assert second.clipped
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_overflow_changes_nothing_but_the_scale_and_the_next_try_goes_through() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    update, model = make(scaler)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hook = model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = update.run(batches(0), 1e-3)
    assert result.overflow
    assert not result.applied
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not update.optimizer.state, "moments must not exist before the first applied update"
    hook.remove()
    assert update.run(batches(0), 1e-3).applied


def test_a_loss_that_is_not_finite_is_no_overflow_and_leaves_the_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    update, model = make(scaler)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    result = update.run(batches(0), 1e-3)
    assert not result.overflow
    assert not result.applied
    assert result.bad_batches == [0, 1]
    assert scaler.get_scale() == 2.0**10
    with torch.no_grad():
        model.model.norm.weight[0] = 1.0
    assert update.run(batches(1), 1e-3).applied, "after a skipped update the scaler goes on"


def test_a_batch_without_targets_gives_no_nan() -> None:
    update, _ = make(None)
    empty = [{**batch, "shift_labels": torch.full_like(batch["shift_labels"], -100)} for batch in batches(0)]
    result = update.run(empty, 1e-3)
    assert (result.loss, result.targets) == (0.0, 0)


def test_requests_travel_with_the_agreement() -> None:
    update, _ = make(None)
    assert update.run(batches(0), 1e-3, lambda: (1.0, 0.0, 1.0)).requests == (1.0, 0.0, 1.0)
