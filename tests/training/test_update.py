"""`Update` by itself: the gradient scaler, and agreement."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_tinylm.modeling.factory import new_model
from hf_tinylm.planning.compilation import rows_of_pass
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.optimizer import adamw
from hf_tinylm.training.source_loss import SOURCE_IDS
from hf_tinylm.training.update import Update


class OneProcess:
    num_processes = 1
    device = torch.device("cpu")

    def no_sync(self, model: Any) -> Any:
        return contextlib.nullcontext()


def make(
    scaler: torch.amp.GradScaler | None, max_grad_norm: float = 1.0, **settings: Any
) -> tuple[Update, torch.nn.Module]:
    section = ModelSection(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64
    )
    model = new_model(section, 101, 32, seed=1).train()
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    return Update(OneProcess(), model, optimizer, max_grad_norm, scaler, **settings), model


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


class CountCasts(TorchDispatchMode):
    """How often each of some tensors was copied to bfloat16."""

    def __init__(self, weights: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self.names, self.counts = {weight.data_ptr(): name for name, weight in weights.items()}, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.counts.update([self.names.get(args[0].data_ptr(), "other")])
        return func(*args, **(kwargs or {}))


def test_weights_of_layers_are_cast_once_an_update_and_afresh_in_the_next() -> None:
    """And gradients have the bits of an update that casts them for each micro-batch."""
    update, model = make(None)
    plain, other = make(None)
    plain.casts_kept = contextlib.nullcontext  # type: ignore[method-assign]
    for each in (model, other):
        each.forward = torch.autocast("cpu", torch.bfloat16)(each.forward)  # type: ignore[method-assign]
    weights = {name: weight for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2}
    assert len(weights) == 7
    for seed in range(2):
        with CountCasts(weights) as casts:
            update.run(batches(seed), 1e-2)
        assert {name: casts.counts[name] for name in weights} == dict.fromkeys(weights, 1)
        plain.run(batches(seed), 1e-2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_passes_of_a_micro_batch_give_what_the_whole_gives_and_are_reduced_once() -> None:
    """The same targets, losses of sources and gradients up to the order of float32 sums; one pass is not in no_sync."""
    whole, model = make(None, sources=2)
    parted, other = make(None, sources=2, rows_of_pass=1)
    shapes, unsynced, first_batches = [], [], []
    other.register_forward_pre_hook(lambda *call: shapes.append(call[2]["input_ids"].shape), with_kwargs=True)
    parted.accelerator.no_sync = lambda model: contextlib.nullcontext(unsynced.append(model))
    parted.after_first = first_batches.append
    for seed in range(2):
        given = batches(seed)
        given[1]["shift_labels"] = given[1]["shift_labels"].clone()
        given[1]["shift_labels"][1, 5:] = -100  # an update whose last part has fewer targets
        for batch in given:
            batch[SOURCE_IDS] = (batch["input_ids"] > 50).long()
        first, second = whole.run(given, 1e-3), parted.run(given, 1e-3)
        assert first.targets == second.targets == 101
        assert second.loss == pytest.approx(first.loss, rel=1e-6)
        np.testing.assert_allclose(second.source_sums, first.source_sums, rtol=1e-6)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        assert first_batches[seed] is given[0]
    assert shapes == [(1, 32)] * 8
    assert len(unsynced) == 6
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_loss_that_is_not_finite_in_any_pass_names_its_micro_batch() -> None:
    update, _ = make(None, rows_of_pass=1)
    plain, calls = update.model.forward, []

    def forward(**inputs: Any) -> Any:
        calls.append(inputs)
        output = plain(**inputs)
        output.loss = output.loss * (float("nan") if len(calls) == 3 else 1.0)
        return output

    update.model.forward = forward  # type: ignore[method-assign]
    assert update.run(batches(0), 1e-3).bad_batches == [1]


@pytest.mark.parametrize(
    ("rows", "length", "passed"), [(16, 512, 4), (8, 1024, 2), (12, 1024, 2), (7, 1024, 1), (2, 8192, 1), (6, 64, 6)]
)
def test_a_compiled_pass_on_a_processor_takes_a_part_of_equal_size(rows: int, length: int, passed: int) -> None:
    assert rows_of_pass(rows, length, compiled_for_cpu=True) == passed
    assert rows_of_pass(rows, length, compiled_for_cpu=False) == rows


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
