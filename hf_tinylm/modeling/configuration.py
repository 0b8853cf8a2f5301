"""Configurations of `TinyLMForCausalLM`, a `LlamaConfig` with three more settings, and of its GPT-2 form."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from transformers import LlamaConfig

from ..planning import ModelShape
from ..sections import ModelSection
from ..tokenization.special import END_OF_TEXT_ID, PAD_ID


def width_aware_std(hidden_size: int) -> float:
    """Standard deviation of initial weights, sqrt(2 / (5 x width)): 0.02 at width 1,000.

    A fixed 0.02 leaves a narrow model on the unigram plateau for hundreds of updates.

    Source: Nguyen & Salazar 2019, arXiv 1910.05895 ("small init").
    """
    return math.sqrt(2 / (5 * hidden_size))


class TinyLMConfig(LlamaConfig):
    """`LlamaConfig` plus `qk_norm`, `unpadded_vocab_size` and this package's special-token ids.

    Args:
        qk_norm: RMS-normalise each head's queries and keys before RoPE (the shape of Qwen3).
        unpadded_vocab_size: tokens that exist; embedding rows from here to `vocab_size` are padding that gets no
            probability and no gradient. None: every row is a token.
    """

    model_type = "tinylm"

    qk_norm: bool = False
    unpadded_vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = END_OF_TEXT_ID
    pad_token_id: int | None = PAD_ID
    tie_word_embeddings: bool = True

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding that are tokens."""
        return self.unpadded_vocab_size or self.vocab_size

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        parameters: Any = self.rope_parameters
        return float(parameters["rope_theta"])

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return int(self.head_dim or self.hidden_size // self.num_attention_heads)

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        return int(self.num_key_value_heads or self.num_attention_heads)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the function and the initial weights, as plain JSON values."""
        names = (
            *("vocab_size", "unpadded_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "qk_norm", "tie_word_embeddings"),
            *("max_position_embeddings", "rms_norm_eps", "initializer_range", "attention_dropout"),
        )
        found = {name: getattr(self, name) for name in names}
        return {**found, "rope_theta": self.theta}

    @property
    def shape(self) -> ModelShape:
        """What decides the number of parameters and FLOPs."""
        return ModelShape(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.key_value_heads,
            intermediate_size=self.intermediate_size,
            head_dim=self.head_size,
            qk_norm=self.qk_norm,
            tie_word_embeddings=self.tie_word_embeddings,
        )


class TinyGPT2Config(TinyLMConfig):
    """The same settings read as GPT-2's: `max_position_embeddings` learned positions, no rotation, no RMSNorm."""

    model_type = "tinylm_gpt2"
    attribute_map = {  # noqa: RUF012
        **{"n_inner": "intermediate_size", "n_layer": "num_hidden_layers", "attn_pdrop": "attention_dropout"},
    }

    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    embd_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the function and the initial weights, as plain JSON values."""
        names = (
            *("vocab_size", "unpadded_vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "tie_word_embeddings", "layer_norm_epsilon", "initializer_range"),
            "attention_dropout",
        )
        found = {name: getattr(self, name) for name in names}
        return {"architecture": "gpt2", **found, "learned_positions": self.max_position_embeddings}

    @property
    def shape(self) -> ModelShape:
        """What decides the number of parameters and FLOPs."""
        return replace(super().shape, architecture="gpt2", learned_positions=self.max_position_embeddings)


def model_configuration(model: ModelSection, vocab_size: int, sequence_length: int, **token_ids: Any) -> TinyLMConfig:
    """The configuration of a new model for a tokenizer of `vocab_size` tokens, trained on `sequence_length`."""
    shape = ModelShape.from_config(model, vocab_size)
    std = width_aware_std(model.hidden_size) if model.initializer_range == "auto" else model.initializer_range
    shared: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "unpadded_vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "initializer_range": std,
        "attention_dropout": model.attention_dropout,
        **token_ids,
    }
    if model.architecture == "gpt2":
        return TinyGPT2Config(
            max_position_embeddings=shape.learned_positions, layer_norm_epsilon=model.layer_norm_epsilon, **shared
        )
    return TinyLMConfig(
        head_dim=shape.head_dim,
        qk_norm=shape.qk_norm,
        max_position_embeddings=model.max_position_embeddings or sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=model.rms_norm_eps,
        **shared,
    )
