"""`TinyLMForCausalLM`: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases, optional per-head QK-norm.

Parameter names are those of `LlamaForCausalLM` (with QK-norm, of `Qwen3ForCausalLM`), so weights move to the stock
classes unchanged. Shapes in the comments: B rows, T positions, D hidden size, H query heads, K key/value heads, d head
size, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration import TinyLMConfig
from .loss import normalised, shifted, summed_loss
from .projected_loss import ChunkLoss, chunk_loss, projected_loss

# transformers 5.2x renamed the key/value cache of its outputs and of the mask builder; both names are in use.
CACHE_KEY = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
_MASK_PARAMETERS = frozenset(inspect.signature(create_causal_mask).parameters)


class TinyLMRMSNorm(nn.Module):
    """x / rms(x) x gain, over the last dimension; computed in `compute_dtype`. Source: arXiv 1910.07467."""

    compute_dtype = torch.float32  # as stock Llama does, whatever the dtype of x

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.compute_dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class TinyLMRotaryEmbedding(nn.Module):
    """Cosines and sines of rotary positions for `head_dim` channels. Source: RoFormer, arXiv 2104.09864."""

    inv_freq: torch.Tensor

    def __init__(self, config: TinyLMConfig) -> None:
        super().__init__()
        self.theta = config.theta
        self.head_dim = config.head_size
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> torch.Tensor:
        """theta ** (-2i/d) for i in 0..d/2-1, float32."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return 1.0 / (self.theta**exponents)

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Two (B, 1, T, d) tensors; angles are computed in float32 even under autocast."""
        with torch.autocast(device_type=position_ids.device.type, enabled=False):
            angles = position_ids[:, None, :, None].float() * self.inv_freq.float()
            angles = torch.cat((angles, angles), dim=-1)
            return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to (B, heads, T, d); channel i is paired with channel i + d/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype of autocast's matrix products: one copy for all projections that read it, not one for each."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class ResidualProjection(nn.Linear):
    """A projection whose output is added to the residual stream; it starts smaller in a deeper model."""


class TinyLMAttention(nn.Module):
    """Causal grouped-query attention through transformers' attention interface."""

    is_causal = True
    whole_windows: Callable[..., torch.Tensor] | None = None  # a kernel for windows without a mask, in training passes

    def __init__(self, config: TinyLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_size
        self.num_key_value_groups = config.num_attention_heads // config.key_value_heads
        self.scaling = self.head_dim**-0.5
        query_width = config.num_attention_heads * self.head_dim
        key_width = config.key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = ResidualProjection(query_width, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = TinyLMRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = TinyLMRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        x = as_multiplied(x)
        query = self.q_proj(x).view(batch, length, -1, self.head_dim)
        key = self.k_proj(x).view(batch, length, -1, self.head_dim)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query = rotate(query.transpose(1, 2), *rotary)
        key = rotate(key.transpose(1, 2), *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.training and self.whole_windows is not None and attention_mask is None and cache is None:
            output = self.whole_windows(query, key, value, self.scaling)
            return self.o_proj(output.reshape(batch, length, -1))
        if query.device.type == "xla":  # whose autocast passes over attention
            query, key, value = as_multiplied(query), as_multiplied(key), as_multiplied(value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = float(self.config.attention_dropout or 0.0) if self.training else 0.0
        output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(output.reshape(batch, length, -1))


class TinyLMMLP(nn.Module):
    """SwiGLU feed-forward block. Source: arXiv 2002.05202."""

    def __init__(self, config: TinyLMConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualProjection(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = as_multiplied(x)
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class TinyLMDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: TinyLMConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = TinyLMAttention(config, layer_idx)
        self.mlp = TinyLMMLP(config)
        self.input_layernorm = TinyLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = TinyLMRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attention_mask, cache, **kwargs)
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyLMPreTrainedModel(PreTrainedModel):
    """Loading, saving and width-aware initialisation."""

    config: TinyLMConfig
    config_class = TinyLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TinyLMDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal(0, initializer_range); projections into the residual stream divided by sqrt(2 x layers).

        Source of the residual scaling: GPT-2 (Radford et al. 2019), section 2.3.
        """
        std = self.config.initializer_range
        residual_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        if isinstance(module, ResidualProjection):
            init.normal_(module.weight, mean=0.0, std=residual_std)
        elif isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, TinyLMRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, TinyLMRotaryEmbedding):
            init.copy_(module.inv_freq, module.frequencies())


def _document_bounds(position_ids: torch.Tensor, rows: int) -> dict[str, Any]:
    """Where documents begin and end in the rows of a batch laid end to end, as flash attention takes it.

    By itself it would look for positions that restart in a batch of one row only.

    Args:
        position_ids: (rows, T), or (1, T) for all rows.
    """
    position_ids = position_ids.expand(rows, -1)
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1
    total = torch.tensor([begins.numel()], device=begins.device)
    bounds = torch.cat((begins.flatten().nonzero().flatten(), total)).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


class TinyLMModel(TinyLMPreTrainedModel):
    """The decoder stack: token ids to normalised hidden states (B, T, D)."""

    def __init__(self, config: TinyLMConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TinyLMDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = TinyLMRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = TinyLMRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        plain = attention_mask is None and position_ids is None and cache is None
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + x.shape[1], device=x.device)[None]
        mask = None
        if not plain and cache is None and attention_mask is None and "flash" in self.config._attn_implementation:
            kwargs = {**kwargs, **_document_bounds(position_ids, len(x))}
        if not (plain and self.config._attn_implementation == "sdpa"):  # sdpa masks a whole plain window by itself
            mask = self._causal_mask(x, attention_mask, position_ids, cache)
        rotary = self.rotary_emb(position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, mask, cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE_KEY: cache})

    def _causal_mask(self, x: torch.Tensor, attention_mask: Any, position_ids: torch.Tensor, cache: Any) -> Any:
        """The mask that the configured attention needs; positions that restart keep documents apart."""
        arguments = {
            "config": self.config,
            "inputs_embeds": x,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": cache,
            "past_key_values": cache,
            "cache_position": position_ids[0],
        }
        return create_causal_mask(**{name: value for name, value in arguments.items() if name in _MASK_PARAMETERS})


@dataclass
class TinyLMOutput(CausalLMOutputWithPast):
    """The output of stock models, and the loss of each target (B, T) when it was asked for."""

    target_losses: torch.Tensor | None = None


class TinyLMForCausalLM(TinyLMPreTrainedModel, GenerationMixin):
    """Language model with a next-token loss that needs no logits to be returned.

    While training, a forward pass with labels returns the loss alone (`logits` is None): copies of the logits would be
    the largest tensors of the run.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    vocabulary_weights: tuple[str, ...] = ("model.embed_tokens.weight", "lm_head.weight")  # with one row a token
    accepts_loss_kwargs = True
    loss_of_chunk: ChunkLoss = staticmethod(chunk_loss)  # a compiled or native one takes its place in a compiled run

    def __init__(self, config: TinyLMConfig) -> None:
        super().__init__(config)
        self.model = TinyLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Any = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        return_logits: bool | None = None,
        return_target_losses: bool = False,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[torch.Tensor, ...]:
        """Run the model.

        Args:
            input_ids: (B, T) token ids.
            labels: (B, T) the same ids, shifted here; -100 is not supervised.
            shift_labels: (B, T) targets already shifted: position t holds the target of input t. Wins over `labels`.
            num_items_in_batch: supervised targets that the summed loss is divided by; None: those of this batch.
            logits_to_keep: compute logits of the last n positions only (0: all).
            return_logits: None: unless a loss is computed while training.
            return_target_losses: also give the loss of each target; the loss itself stays what it is.

        Returns:
            `loss` in nats (scalar, with labels), `logits` (B, T, V) in the compute dtype (None while training with
            labels), the key/value cache, and `target_losses` (B, T) in nats without a gradient, if asked for.
        """
        if shift_labels is None and labels is not None:
            shift_labels = shifted(labels)
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and shift_labels is None and not self.training
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache if cache is not None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        if shift_labels is None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            hidden = hidden[:, keep, :]
        if return_logits is None:
            return_logits = shift_labels is None or not self.training
        weight = self.lm_head.weight
        if self.config.num_tokens < len(weight):  # the gradient of a slice is a copy of the whole
            weight = weight[: self.config.num_tokens]
        logits = functional.linear(hidden, weight) if return_logits else None
        loss = each = None
        if shift_labels is not None:
            if return_target_losses:
                each = torch.zeros(shift_labels.shape, device=hidden.device)
            if logits is None or each is not None:
                loss_of_chunk = self.loss_of_chunk if self.training else chunk_loss
                total = projected_loss(hidden, weight, shift_labels, loss_of_chunk, each)
            else:
                total = summed_loss(logits, shift_labels)
            loss = normalised(total, shift_labels, num_items_in_batch)
        result = TinyLMOutput(
            loss=loss,
            logits=None if logits is None else self._padded(logits),
            target_losses=each,
            **{CACHE_KEY: outputs.get(CACHE_KEY)},
        )
        return result if return_dict else result.to_tuple()

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, tokens) as (B, T, V): padding rows have probability zero."""
        padding = self.config.vocab_size - self.config.num_tokens
        return functional.pad(logits, (0, padding), value=-math.inf) if padding else logits
