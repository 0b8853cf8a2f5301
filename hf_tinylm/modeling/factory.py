"""Make or load the model of a run: always float32 weights, always every expected tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from ..errors import CheckpointError, ConfigError
from ..files import read_record
from ..model_folder import require_model_folder
from ..sections import ModelSection
from .configuration import TinyGPT2Config, TinyLMConfig, model_configuration
from .gpt2 import TinyGPT2ForCausalLM, from_stock_gpt2
from .model import TinyLMForCausalLM

MODEL_CLASSES: dict[type[TinyLMConfig], type[TinyLMForCausalLM]] = {
    TinyLMConfig: TinyLMForCausalLM,
    TinyGPT2Config: TinyGPT2ForCausalLM,
}
for _config_class, _model_class in MODEL_CLASSES.items():
    AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
    AutoModelForCausalLM.register(_config_class, _model_class, exist_ok=True)


def new_model(
    model: ModelSection, vocab_size: int, sequence_length: int, seed: int, **token_ids: Any
) -> TinyLMForCausalLM:
    """A freshly initialised float32 model on the CPU; the weights depend on shape and seed alone."""
    set_seed(seed)
    config = model_configuration(model, vocab_size, sequence_length, **token_ids)
    return _built(config, model.attn_implementation)


def meta_model(model: ModelSection, vocab_size: int, sequence_length: int) -> TinyLMForCausalLM:
    """The same model without memory for weights, to count and to plan."""
    config = model_configuration(model, vocab_size, sequence_length)
    with torch.device("meta"):
        return MODEL_CLASSES[type(config)](config)


def _built(config: TinyLMConfig, attn_implementation: str) -> TinyLMForCausalLM:
    """A freshly initialised float32 model of either architecture."""
    built = MODEL_CLASSES[type(config)]._from_config(config, dtype=torch.float32)
    built.set_attn_implementation(attn_implementation)
    return built


def untrained_like(
    folder: Path, model: ModelSection, vocab_size: int, sequence_length: int, **token_ids: Any
) -> TinyLMForCausalLM:
    """A float32 model of the shape in `folder`, to copy weights into, with attention as in `model`.

    Raises:
        ConfigError: the folder is no model, one of a kind that this package does not have, or one that has fewer than
            `vocab_size` tokens or reads fewer than `sequence_length` of them.
    """
    config = read_configuration(folder)
    if config.num_tokens < vocab_size:
        raise ConfigError(
            f"{folder} has {config.num_tokens:,} tokens and the tokenizer {vocab_size:,}. Give the model's own: "
            "--tokenizer_path DIR."
        )
    if config.max_position_embeddings < sequence_length:
        raise ConfigError(
            f"sequence_length={sequence_length:,} is more than the {config.max_position_embeddings:,} tokens that "
            f"{folder} reads. Give {config.max_position_embeddings:,} or less."
        )
    config.update({"attention_dropout": model.attention_dropout, **token_ids})
    return _built(config, model.attn_implementation)


def load_model(folder: Path, attn_implementation: str = "sdpa") -> TinyLMForCausalLM:
    """A `TinyLMForCausalLM` from a checkpoint of ours or from a stock `llama`/`qwen3`/`gpt2` folder, in float32.

    Raises:
        ConfigError: the folder is no model, or a model whose shape this package does not have.
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    config = read_configuration(folder)
    model = _built(config, attn_implementation)
    load_weights(model, weight_files(folder))
    return model.eval()


def read_configuration(folder: Path) -> TinyLMConfig:
    """The `TinyLMConfig` of a model folder, ours or stock.

    Raises:
        ConfigError: the folder is no model, a damaged one, or one whose shape this package does not have.
    """
    require_model_folder(folder)
    read_record(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers has no class for a value that its configurations cannot hold
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder / 'config.json'} does not describe a model: {reason}") from error
    if isinstance(config, TinyLMConfig):
        return config
    if config.model_type == "gpt2":
        found, foreign = from_stock_gpt2(config)
        if foreign:
            raise ConfigError(f"{folder} uses {', '.join(foreign)}, which this package's model does not have.")
        return found
    if config.model_type not in ("llama", "qwen3"):
        raise ConfigError(f"{folder} holds a {config.model_type} model; llama, qwen3, gpt2 or tinylm is needed.")
    values = config.to_dict()
    unsupported = [k for k in ("attention_bias", "mlp_bias", "use_sliding_window") if values.get(k)]
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        unsupported.append(f"rope_type {rope['rope_type']}")
    if values.get("hidden_act", "silu") != "silu":
        unsupported.append(f"hidden_act {values['hidden_act']}")
    if unsupported:
        raise ConfigError(f"{folder} uses {', '.join(unsupported)}, which this package's model does not have.")
    known = set(TinyLMConfig().to_dict()) - {"model_type", "architectures", "transformers_version", "dtype"}
    return TinyLMConfig(
        qk_norm=config.model_type == "qwen3", **{k: v for k, v in values.items() if k in known - {"qk_norm"}}
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, single or sharded.

    Raises:
        CheckpointError: there are none, or a shard is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} does not exist; the model's weights are incomplete.")
    return [folder / name for name in names]


def load_weights(model: TinyLMForCausalLM, files: list[Path]) -> None:
    """Copy tensors into `model`; every expected tensor must be there once, and nothing else.

    Raises:
        CheckpointError: naming the first tensor that is missing, unknown or of another shape.
    """
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except Exception as error:  # safetensors raises its own class for a truncated or foreign file
            raise CheckpointError(f"{file} cannot be read as safetensors ({error}).") from error
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
        state.pop("lm_head.weight", None)
    for name in sorted(set(expected) ^ set(state)):
        kind = "is missing from" if name in expected else "is not expected in"
        raise CheckpointError(f"Tensor {name} {kind} {files[0].parent}.")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"Tensor {name} of {files[0].parent} has shape {tuple(tensor.shape)}; "
                f"the model needs {tuple(expected[name].shape)}."
            )
    model.load_state_dict(state, strict=False)
    model.tie_weights()
