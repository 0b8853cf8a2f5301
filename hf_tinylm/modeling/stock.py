"""Our weights as stock `LlamaForCausalLM`, `Qwen3ForCausalLM` or `GPT2LMHeadModel`, which every other program opens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ..errors import ConfigError
from ..files import atomic_folder, read_json
from ..tokenization.load import write_tokenizer_files
from .configuration import TinyGPT2Config, TinyLMConfig
from .gpt2 import stock_gpt2_configuration
from .model import TinyLMForCausalLM

Dtype = Literal["float32", "bfloat16"]
_STOCK_CLASSES: dict[type, type[PreTrainedModel]] = {
    LlamaConfig: LlamaForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    GPT2Config: GPT2LMHeadModel,
}


def stock_configuration(config: TinyLMConfig) -> LlamaConfig | Qwen3Config | GPT2Config:
    """The stock configuration of the same model, padding rows trimmed."""
    common: dict[str, Any] = {
        "vocab_size": config.num_tokens,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _first(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
    }
    if isinstance(config, TinyGPT2Config):
        return stock_gpt2_configuration(config, **common)
    shared: dict[str, Any] = {
        **common,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.theta},
    }
    return Qwen3Config(**shared) if config.qk_norm else LlamaConfig(**shared)


def stock_model(model: TinyLMForCausalLM, attn_implementation: str | None = None) -> PreTrainedModel:
    """A stock model on the CPU with copies of `model`'s weights, in evaluation mode and the same dtype.

    The generation configuration names the same special ids, of a chat model every one that ends a reply, and asks for
    mild sampling.
    """
    config = stock_configuration(model.config)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    stock_class: Any = _STOCK_CLASSES[type(config)]
    with torch.device("meta"):
        stock = stock_class(config)
    rows = model.config.num_tokens
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor[:rows] if name in model.vocabulary_weights else tensor
        state[name] = tensor.detach().to("cpu", copy=True).contiguous()
    stock.load_state_dict(state, strict=True, assign=True)
    if not isinstance(config, GPT2Config):  # buffers of rotary positions are not in the state and are still meta
        stock.model.rotary_emb = type(stock.model.rotary_emb)(config)
    stock.tie_weights()
    stock.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.9,
    )
    return stock.eval()


def _first(ids: int | list[int] | None) -> int | None:
    """Many readers of config.json take one end id only."""
    return ids[0] if isinstance(ids, list) else ids


def save_stock_model(
    model: TinyLMForCausalLM,
    folder: Path,
    tokenizer: Any = None,
    replace: bool = True,
    dtype: Dtype = "float32",
    max_shard_size: str | None = None,
) -> None:
    """Write `model` (and its tokenizer) as a folder that bare `AutoModelForCausalLM` opens; the folder appears whole.

    One tensor for tied embeddings, padding rows trimmed. `config.json` names the rotary base and the dtype in both
    places where readers look for them.

    Args:
        dtype: of the safetensors; bfloat16 rounds each weight to 8 significant bits.
        max_shard_size: such as 500MB; larger models become several files and an index. None: transformers decides.

    Raises:
        ConfigError: a size that is none.
    """
    if max_shard_size is not None and not re.fullmatch(r"[1-9]\d*(KB|MB|GB|KiB|MiB|GiB)", max_shard_size):
        raise ConfigError(f"max_shard_size={max_shard_size!r} is no size. Give one such as 500MB or 5GB.")
    stock = stock_model(model).to(getattr(torch, dtype))
    cut = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    with atomic_folder(folder, replace=replace) as temporary:
        stock.save_pretrained(temporary, **cut)
        config = read_json(temporary / "config.json")
        if "rope_parameters" in config:
            config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # transformers 4 and most other readers
        config["torch_dtype"] = dtype
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.model_max_length = int(model.config.max_position_embeddings)
            write_tokenizer_files(tokenizer, temporary)
