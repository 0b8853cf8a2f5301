"""`TinyGPT2ForCausalLM`: stock `GPT2Model` under the loss, the padding and the outputs of `TinyLMForCausalLM`.

LayerNorm, learned positions, gelu_new, biases. Parameter names are those of `GPT2LMHeadModel`, so weights move to the
stock class unchanged. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import nn
from transformers import GPT2Config, GPT2Model
from transformers import initialization as init
from transformers.pytorch_utils import Conv1D

from .configuration import TinyGPT2Config, TinyLMConfig
from .model import CACHE_KEY, TinyLMForCausalLM, TinyLMPreTrainedModel

_TAKES_CACHE = "cache" in inspect.signature(inspect.unwrap(GPT2Model.forward)).parameters


class GPT2Stack(GPT2Model):
    """Stock `GPT2Model`, called as `TinyLMModel` is."""

    def forward(self, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        """Token ids (B, T) to normalised hidden states (B, T, D)."""
        return super().forward(*args, **{"cache" if _TAKES_CACHE else CACHE_KEY: cache}, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, initializer_range); projections into the residual stream divided by sqrt(2 x layers).

        As stock, which scales them where it meets the parent of a projection: transformers passes over modules without
        parameters of their own in classes that it does not own.
        """
        super()._init_weights(module)
        residual = (part for name, part in self.named_modules() if name.endswith(".c_proj"))
        if isinstance(module, Conv1D) and any(module is projection for projection in residual):
            std = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.weight, mean=0.0, std=std)


class TinyGPT2ForCausalLM(TinyLMForCausalLM):
    """GPT-2 with a next-token loss that needs no logits to be returned; everything else is `TinyLMForCausalLM`'s."""

    config_class = TinyGPT2Config
    base_model_prefix = "transformer"
    vocabulary_weights = ("transformer.wte.weight", "lm_head.weight")
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012
    _no_split_modules = ["GPT2Block"]  # noqa: RUF012
    _supports_flex_attn = False

    def __init__(self, config: TinyLMConfig) -> None:
        TinyLMPreTrainedModel.__init__(self, config)
        self.transformer = GPT2Stack(config)  # type: ignore[arg-type]  # it reads our configuration by GPT-2's names
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def model(self) -> Any:
        """The decoder stack, by the name that the shared forward pass has for it."""
        return self.transformer


def stock_gpt2_configuration(config: TinyLMConfig, **shared: Any) -> GPT2Config:
    """The configuration of stock `GPT2LMHeadModel`; `shared` are keys that all stock configurations have."""
    assert isinstance(config, TinyGPT2Config)
    return GPT2Config(
        n_positions=config.max_position_embeddings,
        n_embd=config.hidden_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_inner=config.intermediate_size,
        layer_norm_epsilon=config.layer_norm_epsilon,
        attn_pdrop=config.attention_dropout or 0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        **shared,
    )


# Keys of a stock config.json that would change the function, with the value that this model computes.
_COMPUTED = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def from_stock_gpt2(config: GPT2Config) -> tuple[TinyGPT2Config, list[str]]:
    """Our configuration of a stock one, and what it asks for that this model does not compute."""
    unsupported = [f"{k} {getattr(config, k)}" for k, value in _COMPUTED.items() if getattr(config, k, value) != value]
    found = TinyGPT2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner or 4 * config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        layer_norm_epsilon=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        attention_dropout=config.attn_pdrop,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return found, unsupported
