"""Our weights as stock `LlamaForCausalLM` or `Qwen3ForCausalLM`, which every other program knows how to open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ..files import atomic_folder, read_json
from ..tokenization.load import write_tokenizer_files
from .configuration import TinyLMConfig
from .model import TinyLMForCausalLM


def stock_configuration(config: TinyLMConfig) -> LlamaConfig | Qwen3Config:
    """The stock configuration of the same model, padding rows trimmed."""
    shared: dict[str, Any] = {
        "vocab_size": config.num_tokens,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "attention_dropout": config.attention_dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _first(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
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
    stock_class: Any = Qwen3ForCausalLM if model.config.qk_norm else LlamaForCausalLM
    with torch.device("meta"):
        stock = stock_class(config)
    rows = model.config.num_tokens
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor[:rows] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
        state[name] = tensor.detach().to("cpu", copy=True).contiguous()
    stock.load_state_dict(state, strict=True, assign=True)
    stock.model.rotary_emb = type(stock.model.rotary_emb)(config)  # its buffers are not in the state and are still meta
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


def save_stock_model(model: TinyLMForCausalLM, folder: Path, tokenizer: Any = None, replace: bool = True) -> None:
    """Write `model` (and its tokenizer) as a folder that bare `AutoModelForCausalLM` opens; the folder appears whole.

    Float32 safetensors, one tensor for tied embeddings, padding rows trimmed. `config.json` names the rotary base in
    both places where readers look for it.
    """
    stock = stock_model(model)
    with atomic_folder(folder, replace=replace) as temporary:
        stock.save_pretrained(temporary)
        config = read_json(temporary / "config.json")
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # transformers 4 and most other readers
        config["torch_dtype"] = "float32"
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.model_max_length = int(model.config.max_position_embeddings)
            write_tokenizer_files(tokenizer, temporary)
