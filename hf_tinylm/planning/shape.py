"""The size of a model from its shape alone: parameters by part, FLOPs per token, bytes of its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError
from ..gguf_plan import GGUFType, file_bytes, needs_llamacpp
from ..sections import ModelSection


@dataclass(frozen=True)
class ModelShape:
    """What decides a model's size. `vocab_size` counts embedding rows, padding included."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    architecture: Literal["llama", "gpt2"] = "llama"
    learned_positions: int = 0  # of gpt2

    @classmethod
    def from_config(cls, model: ModelSection, vocab_size: int) -> ModelShape:
        """The shape of a configured model for a tokenizer of `vocab_size` tokens, rows padded as configured."""
        padding = model.pad_vocab_to_multiple_of
        return cls(
            vocab_size=-(-vocab_size // padding) * padding,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_hidden_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads or model.num_attention_heads,
            intermediate_size=model.intermediate_size,
            head_dim=model.head_dim or model.hidden_size // model.num_attention_heads,
            qk_norm=model.qk_norm,
            tie_word_embeddings=model.tie_word_embeddings,
            architecture=model.architecture,
            learned_positions=(model.max_position_embeddings or 0) if model.architecture == "gpt2" else 0,
        )

    @classmethod
    def from_model_config(cls, values: Mapping[str, Any]) -> ModelShape:
        """The shape that the config.json of a `llama`, `qwen3`, `gpt2` or `tinylm` folder gives.

        Raises:
            ConfigError: a key is missing or is no number.
        """
        try:
            values = in_llama_words(values)
            gpt2 = str(values.get("model_type", "")).endswith("gpt2")
            heads, width = int(values["num_attention_heads"]), int(values["hidden_size"])
            return cls(
                vocab_size=int(values["vocab_size"]),
                hidden_size=width,
                num_hidden_layers=int(values["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(values.get("num_key_value_heads") or heads),
                intermediate_size=int(values["intermediate_size"]),
                head_dim=int(values.get("head_dim") or width // heads),
                qk_norm=bool(values.get("qk_norm", values.get("model_type") == "qwen3")),
                tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
                architecture="gpt2" if gpt2 else "llama",
                learned_positions=int(values["max_position_embeddings"]) if gpt2 else 0,
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise ConfigError(f"config.json gives no shape of a llama, qwen3 or gpt2 model ({error!r}).") from error

    @property
    def parts(self) -> dict[str, int]:
        """Parameters by part; a tied output projection has none of its own."""
        width, layers, inner = self.hidden_size, self.num_hidden_layers, self.intermediate_size
        if self.architecture == "gpt2":
            return {
                "embedding": self.vocab_size * width,
                "positions": self.learned_positions * width,
                "attention": layers * 4 * width * width,
                "feed_forward": layers * 2 * width * inner,
                "norms": (2 * layers + 1) * 2 * width,
                "biases": layers * (5 * width + inner),
                "output_projection": 0 if self.tie_word_embeddings else self.vocab_size * width,
            }
        return {
            "embedding": self.vocab_size * width,
            "attention": layers * width * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads),
            "feed_forward": layers * 3 * width * inner,
            "norms": (2 * layers + 1) * width,
            "qk_norms": layers * 2 * self.head_dim if self.qk_norm else 0,
            "output_projection": 0 if self.tie_word_embeddings else self.vocab_size * width,
        }

    @property
    def undecayed_parameters(self) -> int:
        """Norm gains: two per layer and a final one, and two per layer of head size with QK-norm; GPT-2's biases."""
        return sum(self.parts.get(part, 0) for part in ("norms", "qk_norms", "biases"))

    @property
    def decayed_parameters(self) -> int:
        """Every tensor with two dimensions, the tied embedding once."""
        return self.parameters - self.undecayed_parameters

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        return sum(self.parts.values())

    def flops_per_token(self) -> int:
        """Training FLOPs per token without attention: 6N. Source: Kaplan et al. 2020, arXiv 2001.08361."""
        return 6 * self.parameters

    def flops_per_token_with_attention(self, sequence_length: int) -> int:
        """6N + 12 x layers x width x T. Source: PaLM, arXiv 2204.02311, appendix B."""
        return self.flops_per_token() + 12 * self.num_hidden_layers * self.attention_width * sequence_length

    def flops_per_token_causal(self, sequence_length: int) -> int:
        """6N + 6 x layers x width x T: only the half of the attention matrix that a causal model needs."""
        return self.flops_per_token() + 6 * self.num_hidden_layers * self.attention_width * sequence_length

    def flops_per_token_with_recomputation(self) -> int:
        """8N that the hardware computes when every layer's forward pass is repeated in the backward pass."""
        return 8 * self.parameters

    @property
    def attention_width(self) -> int:
        """Width of the query side of attention, `heads x head_dim` (equal to hidden_size in the usual case)."""
        return self.num_attention_heads * self.head_dim

    @property
    def hidden_matrices(self) -> dict[tuple[int, int], int]:
        """How many matrices of each (rows, columns) the attention and feed-forward layers hold."""
        width, inner, keys = self.hidden_size, self.intermediate_size, self.num_key_value_heads * self.head_dim
        of_layer = [(self.attention_width, width), (keys, width), (keys, width), (width, self.attention_width)]
        of_layer += [(inner, width), (inner, width), (width, inner)]
        if self.architecture == "gpt2":  # queries, keys and values are one matrix, and there is no gate
            of_layer = [(width, 3 * width), (width, width), (width, inner), (inner, width)]
        found: dict[tuple[int, int], int] = {}
        for rows, columns in of_layer:
            found[rows, columns] = found.get((rows, columns), 0) + self.num_hidden_layers
        return found

    @property
    def gguf_f16_bytes(self) -> int:
        """About 2 bytes per parameter."""
        return 2 * self.parameters


# How a stock GPT-2 config.json spells what all others call by Llama's names.
_GPT2_WORDS = {
    **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    **{"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"},
}


def in_llama_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json under the names that `llama` has; only a stock `gpt2` one has others."""
    if values.get("model_type") != "gpt2":
        return dict(values)
    found = {**values, **{name: values.get(word) for name, word in _GPT2_WORDS.items()}}
    if found["intermediate_size"] is None and isinstance(found["hidden_size"], int):
        found["intermediate_size"] = 4 * found["hidden_size"]
    return {**found, "tie_word_embeddings": values.get("tie_word_embeddings", True)}


def export_bytes(shape: ModelShape, kinds: Sequence[GGUFType]) -> int:
    """How many bytes the GGUF files of these types take together, with the F32 file that K-quants are made from."""
    exact: list[GGUFType] = ["f32"] if any(needs_llamacpp(kind) for kind in kinds) else []
    return sum(file_bytes(shape, kind) for kind in (*kinds, *exact))


def uniform_loss(vocab_size: int) -> float:
    """Loss in nats of a model that gives every token the same probability, ln V."""
    return math.log(vocab_size)
