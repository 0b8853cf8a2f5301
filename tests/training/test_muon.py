"""Muon for hidden matrices beside AdamW for the rest: its arithmetic, its groups, its state, its cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_tinylm.errors import ContractError, RunStopped
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.planning.optimizer import checkpoint_bytes, newton_schulz_flops, optimizer_flops
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.optimizer import (
    MuonWithAdamW,
    hidden_matrices,
    muon_with_adamw,
    optimizer_tensors,
    set_momentum,
    set_rates,
)

Make = Callable[..., Any]
BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1
RATIOS = {"model.embed_tokens.weight": 3.0, "lm_head.weight": 0.5}
GAIN_RATIO = 2.0
GPT2 = {"architecture": "gpt2", "num_key_value_heads": None, "max_position_embeddings": 32}


def tiny(**keys: Any) -> TinyLMForCausalLM:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return new_model(ModelSection(**{**shape, "intermediate_size": 64, **keys}), 101, 32, seed=1)


def optimizer_for(model: TinyLMForCausalLM) -> MuonWithAdamW:
    return muon_with_adamw(model, 1.0, BETAS, EPSILON, DECAY, 0.95, 5, *RATIOS.values(), GAIN_RATIO)


def step(optimizer: MuonWithAdamW, model: TinyLMForCausalLM, scale: float) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    set_rates(optimizer, 1e-3)
    optimizer.step()


def orthogonalised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Five quintic steps towards U V' of x = U S V', written as in the paper."""
    tall = x.shape[0] > x.shape[1]
    y = x.to(dtype)
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ y
    return (y.T if tall else y).float()


class Reference:
    """One parameter's updates, by the formulas."""

    def __init__(self, name: str, weight: torch.Tensor, hidden: bool, dtype: torch.dtype) -> None:
        self.name, self.weight, self.hidden, self.dtype = name, weight.detach().clone(), hidden, dtype
        self.first, self.second, self.steps = torch.zeros_like(weight), torch.zeros_like(weight), 0

    def step(self, gradient: torch.Tensor, rate: float, momentum: float) -> None:
        self.steps += 1
        if self.hidden:
            self.first = momentum * self.first + (1 - momentum) * gradient
            direction = orthogonalised((1 - momentum) * gradient + momentum * self.first, self.dtype)
            self.weight = self.weight * (1 - rate * DECAY) - rate * 0.2 * math.sqrt(max(gradient.shape)) * direction
            return
        vector = gradient.ndim < 2
        rate *= GAIN_RATIO if vector else RATIOS[self.name]
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        mean = self.first / (1 - BETAS[0] ** self.steps)
        root = (self.second / (1 - BETAS[1] ** self.steps)).sqrt()
        self.weight = self.weight * (1 - rate * (0.0 if vector else DECAY)) - rate * mean / (root + EPSILON)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_equal_a_plain_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """torch.optim.Muon orthogonalises in bfloat16. With that cast to float32, weights equal the reference's to 1e-5.

    In bfloat16, with 8 bits, sums that are rounded once or twice differ, and five steps add up: 5% of what moved.
    """
    if dtype == torch.float32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    model = tiny(tie_word_embeddings=False, qk_norm=True)
    optimizer, hidden = optimizer_for(model), hidden_matrices(model)
    references = {name: Reference(name, p, name in hidden, dtype) for name, p in model.named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    for rate, momentum in ((1e-3, 0.85), (5e-3, 0.9), (2e-3, 0.95)):
        set_rates(optimizer, rate)
        set_momentum(optimizer, momentum)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            references[name].step(parameter.grad.clone(), rate, momentum)
        optimizer.step()
    for name, parameter in model.named_parameters():
        moved, apart = (parameter.detach() - other for other in (start[name], references[name].weight))
        assert float(moved.abs().max()) > 1e-3, name
        if dtype == torch.float32 or name not in hidden:
            assert float(apart.abs().max()) < 1e-5, name
        assert float(apart.norm() / moved.norm()) < 5e-2, name


def test_hidden_matrices_are_muons_and_the_rest_is_adamws_once_each() -> None:
    """hidden 32, 2 layers, heads 4/2 of 8, feed-forward 64, 101 tokens."""
    for tied in (True, False):
        groups = optimizer_for(tiny(tie_word_embeddings=tied)).param_groups
        sizes = [sum(p.numel() for p in group["params"]) for group in groups]
        assert sizes == [2 * (3_072 + 6_144), 3_232, *([] if tied else [3_232]), 5 * 32]
        assert [group["weight_decay"] for group in groups] == [DECAY, DECAY, *([] if tied else [DECAY]), 0.0]


def test_of_gpt2_both_embeddings_every_bias_and_layer_norm_are_adamws() -> None:
    """hidden 32, 2 layers, feed-forward 64, 101 tokens, 32 positions: 3,072 + 1,024 + 2 x 2,048 weights a layer."""
    model = tiny(**GPT2)
    matrices, embeddings, vectors = optimizer_for(model).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    hidden = {f"transformer.h.{layer}.{part}.weight" for layer in (0, 1) for part in parts}
    assert {names[id(p)] for p in matrices["params"]} == hidden
    assert {names[id(p)] for p in embeddings["params"]} == {"transformer.wte.weight", "transformer.wpe.weight"}
    biases = 2 * (96 + 32 + 64 + 32)
    assert sum(p.numel() for p in vectors["params"]) == biases + 5 * 2 * 32
    assert [group["weight_decay"] for group in (matrices, embeddings, vectors)] == [DECAY, DECAY, 0.0]
    assert sum(p.numel() for p in matrices["params"]) == 2 * (3_072 + 1_024 + 2 * 2_048)


def test_a_state_that_is_loaded_reaches_both_parts() -> None:
    model, other = tiny(), tiny()
    first, second = optimizer_for(model), optimizer_for(other)
    for scale, optimizer, owner in ((1.0, first, model), (-3.0, second, other)):
        step(optimizer, owner, scale)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(first, model, 2.0)
    step(second, other, 2.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_flops_are_those_that_torch_counts_and_moments_take_the_planned_bytes() -> None:
    other = {"num_key_value_heads": 4, "qk_norm": True, "tie_word_embeddings": False, "head_dim": 16}
    for keys in ({}, other, GPT2):
        model = tiny(**keys)
        optimizer = optimizer_for(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert counter.get_total_flops() == optimizer_flops(model.config.shape, "muon", 5)
        moments = {k: v for k, v in optimizer_tensors(optimizer, model).items() if not k.startswith("step.")}
        weights = sum(p.numel() for p in model.parameters())
        stored = 4 * (weights + sum(v.numel() for v in moments.values()))
        assert stored == checkpoint_bytes(model.config.shape, "muon") < checkpoint_bytes(model.config.shape)
    assert newton_schulz_flops(864, 320, 5) == newton_schulz_flops(320, 864, 5) == 5 * (4 * 320**2 * 864 + 2 * 320**3)


MUON = {"optim": "muon", "muon_momentum_warmup_steps": 5, "embedding_lr_ratio": 2.0}


def test_a_run_learns_and_counts_the_flops_of_its_optimizer(make_trainer: Make) -> None:
    plain, muon = make_trainer("plain", train_tokens=20 * 256), make_trainer("muon", train_tokens=20 * 256, **MUON)
    plain.train()
    muon.train()
    own = optimizer_flops(muon.model.config.shape, "muon", 5)
    assert muon.record.clocks.flops == plain.record.clocks.flops + 20 * own
    losses = [row["loss"] for row in read_rows(muon.output_dir / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.1
    assert muon.optimizer.param_groups[0]["momentum"] == 0.95


def test_a_resume_with_other_settings_of_the_optimizer_is_refused(make_trainer: Make) -> None:
    with pytest.raises(RunStopped):
        make_trainer(**MUON, stop_after_updates=1).train()
    for change, told in (
        ({"embedding_lr_ratio": 1.0}, "embedding_lr_ratio: 2.0 -> None"),
        ({"optim": "adamw"}, "optim: 'muon' -> None"),
        ({"muon_momentum": 0.9}, "muon_momentum: None -> 0.9"),
    ):
        with pytest.raises(ContractError, match=told):
            make_trainer(**{**MUON, **change}, resume_from_checkpoint="auto").train()


def test_gradients_that_are_not_finite_change_neither_weights_nor_moments(make_trainer: Make) -> None:
    trainer = make_trainer(**MUON, nonfinite="skip", nonfinite_limit=1, train_tokens=256, warmup_steps=0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    seen: list[bool] = []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        if trainer.skipped_batches:
            return gradient
        untouched = all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
        seen.append(untouched and not trainer.optimizer.state)
        return gradient * math.nan

    trainer.model.model.layers[0].mlp.gate_proj.weight.register_hook(poison)
    trainer.train()
    assert trainer.skipped_batches == 1
    assert seen
    assert all(seen)
    assert all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
