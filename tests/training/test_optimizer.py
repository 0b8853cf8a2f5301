from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_tinylm.errors import CheckpointError, TrainingError
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.optimizer import (
    adamw,
    load_optimizer_tensors,
    optimizer_tensors,
    parameter_groups,
    set_rates,
)


def tiny(**keys: object) -> TinyLMForCausalLM:
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    return new_model(ModelSection(**{**shape, **keys}), 101, 32, seed=1)  # type: ignore[arg-type]


def test_matrices_are_decayed_gains_are_not_and_the_tied_embedding_counts_once() -> None:
    """hidden 32, 2 layers, heads 4/2 of 8, feed-forward 64, 101 tokens: 3,232 + 2 x (3 x 1,024 + 6,144) and 5 gains."""
    decayed, undecayed = parameter_groups(tiny(), 0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert sum(p.numel() for p in decayed["params"]) == 3_232 + 2 * (3_072 + 6_144)
    assert sum(p.numel() for p in undecayed["params"]) == 5 * 32


def test_an_untied_head_and_query_gains_are_in_the_right_groups() -> None:
    decayed, undecayed = parameter_groups(tiny(tie_word_embeddings=False, qk_norm=True), 0.1)
    assert sum(p.numel() for p in decayed["params"]) == 2 * 3_232 + 2 * (3_072 + 6_144)
    assert sum(p.numel() for p in undecayed["params"]) == 5 * 32 + 2 * 2 * 8


def test_a_rate_that_is_a_tensor_stays_one_and_is_never_changed_in_place() -> None:
    """On XLA devices it is an input of the compiled step; a change in place would become a part of it."""
    optimizer = torch.optim.SGD(parameter_groups(tiny(), 0.1), lr=torch.tensor(1.0))
    before = optimizer.param_groups[0]["lr"]
    set_rates(optimizer, 0.25)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.25]
    assert before.item() == 1.0
    set_rates(optimizer, 0.0)
    assert all(0.0 < group["lr"].item() < 1e-37 for group in optimizer.param_groups), "torch divides by it"
    plain = torch.optim.SGD(parameter_groups(tiny(), 0.1), lr=1.0)
    set_rates(plain, 0.25)
    assert [group["lr"] for group in plain.param_groups] == [0.25, 0.25]


def test_weights_that_are_not_float32_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"bfloat16; training needs float32"):
        parameter_groups(tiny().bfloat16(), 0.1)


def test_a_float32_weight_near_one_moves_where_bfloat16_storage_would_not() -> None:
    """100 updates of AdamW at 6e-4 with gradient 1: float32 reaches 0.9342, bfloat16 stays at 1.0."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = adamw(model, 6e-4, (0.9, 0.999), 1e-8, 0.1)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(0.9342, abs=2e-4)
    assert all(v.dtype == torch.float32 for state in optimizer.state.values() for v in state.values())


def trained() -> tuple[TinyLMForCausalLM, torch.optim.Optimizer]:
    model = tiny()
    optimizer = adamw(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    step(model, optimizer, 1)
    return model, optimizer


def step(model: TinyLMForCausalLM, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(0, 101, (2, 32), generator=torch.Generator().manual_seed(seed))
    model.train()(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_through_a_file_continues_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_file(optimizer_tensors(optimizer, model), tmp_path / "optimizer.safetensors")
    again = tiny()
    again.load_state_dict(model.state_dict())
    resumed = adamw(again, 1e-3, (0.9, 0.95), 1e-8, 0.1)
    load_optimizer_tensors(resumed, again, load_file(tmp_path / "optimizer.safetensors"))
    step(model, optimizer, 2)
    step(again, resumed, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_missing_unknown_and_misshapen_state_is_refused() -> None:
    model, optimizer = trained()
    tensors = optimizer_tensors(optimizer, model)
    without = {k: v for k, v in tensors.items() if not k.endswith("model.norm.weight")}
    with pytest.raises(CheckpointError, match=r"no state of model\.norm\.weight"):
        load_optimizer_tensors(optimizer, model, without)
    with pytest.raises(CheckpointError, match=r"state of other, which the model does not have"):
        load_optimizer_tensors(optimizer, model, {**tensors, "exp_avg.other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"has shape \(2,\)"):
        load_optimizer_tensors(optimizer, model, {**tensors, "exp_avg.model.norm.weight": torch.zeros(2)})
