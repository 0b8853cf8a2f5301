from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.sections import ModelSection

VOCABULARY = 101
CONTEXT = 32


@pytest.fixture
def make_model() -> Callable[..., TinyLMForCausalLM]:
    """A small model whose weights are large enough for logits to vary; keyword arguments are keys of ModelSection."""

    def make(heads: int = 8, kv_heads: int = 2, gain: float = 2.0, vocab_size: int = VOCABULARY, **keys: Any) -> Any:
        hidden = keys.pop("hidden_size", heads * 8)
        section = ModelSection(
            hidden_size=hidden,
            num_hidden_layers=keys.pop("num_hidden_layers", 3),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=keys.pop("intermediate_size", 96),
            **keys,
        )
        model = new_model(section, vocab_size, CONTEXT, seed=1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # gains that differ by channel, or a wrong order would not be seen
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
                else:
                    parameter.mul_(gain)
        return model.eval()

    return make


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of random ids, (2, 32)."""
    return torch.randint(4, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(3))
