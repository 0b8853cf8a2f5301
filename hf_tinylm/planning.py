"""The arithmetic of a run, from shapes alone: parameters, updates, FLOPs, bytes. Needs neither torch nor data.

Units: parameters and tokens are counts (a token is a supervised target), sizes are bytes, rates are per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .config import nearest_multiple
from .errors import ConfigError
from .gguf_plan import GGUFType, needs_llamacpp, plan_shape
from .sections import ModelSection, TrainingSection


@dataclass(frozen=True)
class ModelShape:
    """What decides a Llama-style model's size. `vocab_size` counts embedding rows, padding included."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int
    qk_norm: bool = False
    tie_word_embeddings: bool = True

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
        )

    @property
    def embedding_parameters(self) -> int:
        """Token embedding and, when untied, the output projection."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def decayed_parameters(self) -> int:
        """Every tensor with two dimensions, the tied embedding once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        return self.embedding_parameters + self.num_hidden_layers * (attention + feed_forward)

    @property
    def undecayed_parameters(self) -> int:
        """Norm gains: two per layer and a final one, and two per layer of head size with QK-norm."""
        per_layer = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_hidden_layers * per_layer + self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        return self.decayed_parameters + self.undecayed_parameters

    def flops_per_token(self) -> int:
        """Training FLOPs per token without attention: 6N. Source: Kaplan et al. 2020, arXiv 2001.08361."""
        return 6 * self.parameters

    def flops_per_token_with_attention(self, sequence_length: int) -> int:
        """6N + 12 x layers x width x T. Source: PaLM, arXiv 2204.02311, appendix B."""
        return self.flops_per_token() + 12 * self.num_hidden_layers * self.attention_width * sequence_length

    def flops_per_token_causal(self, sequence_length: int) -> int:
        """6N + 6 x layers x width x T: only the half of the attention matrix that a causal model needs."""
        return self.flops_per_token() + 6 * self.num_hidden_layers * self.attention_width * sequence_length

    @property
    def attention_width(self) -> int:
        """Width of the query side of attention, `heads x head_dim` (equal to hidden_size in the usual case)."""
        return self.num_attention_heads * self.head_dim

    @property
    def checkpoint_bytes(self) -> int:
        """Float32 weights and two float32 Adam moments: 12 bytes per parameter."""
        return 12 * self.parameters

    @property
    def gguf_f16_bytes(self) -> int:
        """About 2 bytes per parameter."""
        return 2 * self.parameters


@dataclass(frozen=True)
class UpdatePlan:
    """How a token budget is cut into updates. All counts are supervised targets unless they say windows or rows."""

    train_tokens: int
    global_batch_tokens: int
    sequence_length: int
    per_device_train_batch_size: int
    world_size: int

    @property
    def updates(self) -> int:
        """Updates of the run; the last may be partial, so the budget is spent to the token."""
        return -(-self.train_tokens // self.global_batch_tokens)

    @property
    def last_update_tokens(self) -> int:
        """Targets of the last update, 1 to `global_batch_tokens`."""
        return self.train_tokens - (self.updates - 1) * self.global_batch_tokens

    @property
    def windows_per_update(self) -> int:
        """Windows of one update over all processes."""
        return self.global_batch_tokens // self.sequence_length

    @property
    def windows_per_process(self) -> int:
        """Windows of one update on one process."""
        return self.windows_per_update // self.world_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of one update on one process."""
        return self.windows_per_process // self.per_device_train_batch_size

    def tokens_of_update(self, update: int) -> int:
        """Targets of the zero-based update."""
        return self.last_update_tokens if update == self.updates - 1 else self.global_batch_tokens

    def tokens_before(self, update: int) -> int:
        """Targets of all updates before the zero-based update."""
        return min(update * self.global_batch_tokens, self.train_tokens)


def plan_updates(
    train_tokens: int, global_batch_tokens: int, sequence_length: int, per_device_train_batch_size: int, world_size: int
) -> UpdatePlan:
    """Cut a budget into updates, windows and micro-batches.

    Raises:
        ConfigError: there is no token to train on, or the batch is not a whole number of micro-steps.
    """
    if train_tokens < 1:
        raise ConfigError(
            f"train_tokens={train_tokens:,} is nothing to train on; 1 or more are needed. "
            "Give more text, or a shorter sequence_length."
        )
    micro = per_device_train_batch_size * sequence_length * world_size
    if global_batch_tokens % micro:
        nearest = nearest_multiple(global_batch_tokens, micro)
        raise ConfigError(
            f"global_batch_tokens={global_batch_tokens:,} is not a multiple of the {micro:,} tokens of one micro-step "
            f"({per_device_train_batch_size} rows x {sequence_length} tokens x {world_size} processes). "
            f"Use {nearest:,}, or change per_device_train_batch_size."
        )
    return UpdatePlan(train_tokens, global_batch_tokens, sequence_length, per_device_train_batch_size, world_size)


def plan_of_config(
    training: TrainingSection, sequence_length: int, available_tokens: int, world_size: int = 1
) -> UpdatePlan:
    """The plan of a configured run; `train_tokens: epoch` means each of `available_tokens` once."""
    budget = available_tokens if training.train_tokens == "epoch" else training.train_tokens
    return plan_updates(
        budget, training.global_batch_tokens, sequence_length, training.per_device_train_batch_size, world_size
    )


def export_bytes(shape: ModelShape, kinds: Sequence[GGUFType]) -> int:
    """How many bytes the GGUF files of these types take together, with the F32 file that K-quants are made from."""
    exact: list[GGUFType] = ["f32"] if any(needs_llamacpp(kind) for kind in kinds) else []
    return sum(plan_shape(shape, kind).bytes for kind in (*kinds, *exact))


def uniform_loss(vocab_size: int) -> float:
    """Loss in nats of a model that gives every token the same probability, ln V."""
    return math.log(vocab_size)
