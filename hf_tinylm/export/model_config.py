"""The numbers of a stock config.json that a GGUF file repeats, or the reason why llama.cpp computes another model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ExportError
from ..model_folder import OWN_MODEL_TYPES
from ..planning import ModelShape
from ..planning.shape import in_llama_words

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

# What llama.cpp's `gpt2` computes. Source: llama.cpp, src/models/gpt2.cpp.
_GPT2_COMPUTATION = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}


@dataclass(frozen=True)
class ExportedConfig:
    """A model as config.json states it; the vocabulary of `shape` counts padding rows too."""

    shape: ModelShape
    context_length: int
    norm_eps: float
    rope_theta: float | None  # None: positions are learned

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        if self.shape.architecture == "gpt2":
            return "gpt2"
        return "qwen3" if self.shape.qk_norm else "llama"


def read_exported_config(config: dict[str, Any]) -> ExportedConfig:
    """What a config.json states, stock or of a checkpoint, in either form of its rope settings.

    Raises:
        ExportError: a key is missing, or asks for something that llama.cpp's llama or qwen3 does not compute.
    """
    kind = config.get("model_type")
    if kind not in ("llama", "qwen3", "gpt2", *OWN_MODEL_TYPES):
        raise ExportError(
            f"config.json has model_type {kind!r}; llama, qwen3 or gpt2 is needed. Export the run's final folder."
        )
    config = in_llama_words(config)
    if kind in ("gpt2", "tinylm_gpt2"):
        return _gpt2(config)
    _refuse_bad_numbers(config, "rms_norm_eps")
    _refuse_unknown_computation(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if kind != "qwen3" else None)
    if head_dim is None or head_dim % 2:
        raise ExportError(f"config.json has head_dim {head_dim}; an even number is needed.")
    shape = ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        intermediate_size=config["intermediate_size"],
        head_dim=head_dim,
        qk_norm=kind == "qwen3" or bool(config.get("qk_norm")),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    return ExportedConfig(
        shape=shape,
        context_length=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=_rope_theta(config),
    )


def _gpt2(config: dict[str, Any]) -> ExportedConfig:
    """What a config.json of GPT-2 states."""
    _refuse_bad_numbers(config, "layer_norm_epsilon")
    for key, computed in _GPT2_COMPUTATION.items():
        if config.get(key, computed) != computed:
            raise ExportError(f"config.json has {key} {config[key]!r}; llama.cpp computes {computed!r} for gpt2.")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if width % heads:
        raise ExportError(f"config.json has n_embd {width}, which {heads} heads do not divide.")
    shape = ModelShape(
        vocab_size=config["vocab_size"],
        hidden_size=width,
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=config["intermediate_size"],
        head_dim=width // heads,
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        architecture="gpt2",
        learned_positions=config["max_position_embeddings"],
    )
    return ExportedConfig(shape, config["max_position_embeddings"], config["layer_norm_epsilon"], None)


def _refuse_bad_numbers(config: dict[str, Any], norm_eps: str) -> None:
    missing = [key for key in (*_COUNTS, norm_eps) if config.get(key) is None]
    if missing:
        raise ExportError(f"config.json lacks {', '.join(missing)}.")
    for key in (*_COUNTS, "num_key_value_heads", "head_dim"):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ExportError(f"config.json has {key} {value!r}; a whole number from 1 up is needed.")
    heads, key_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if key_heads and heads % key_heads:
        raise ExportError(f"config.json has {heads} query heads, which {key_heads} key/value heads do not divide.")
    epsilon = config[norm_eps]
    if not isinstance(epsilon, float) or not epsilon > 0:
        raise ExportError(f"config.json has {norm_eps} {epsilon!r}; a number above 0 is needed.")


def _refuse_unknown_computation(config: dict[str, Any]) -> None:
    if config.get("hidden_act") != "silu":
        raise ExportError(
            f"config.json has hidden_act {config.get('hidden_act')!r}; llama.cpp computes silu for this architecture."
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            raise ExportError(
                f"config.json has {key}={config[key]!r}, which cannot be exported. A model without it is needed."
            )
    if config.get("pretraining_tp", 1) not in (1, None):
        raise ExportError(f"config.json has pretraining_tp={config['pretraining_tp']}; 1 is needed.")
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ExportError(f"config.json has layer_types {sorted(layer_types)}; only full_attention can be exported.")


def _rope_theta(config: dict[str, Any]) -> float:
    """The rope base from `rope_parameters` (transformers 5) or `rope_theta` (4); both, if given, must agree."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" or rope.get("factor") not in (None, 1, 1.0):
        raise ExportError(f"config.json has rope type {kind!r}; only the default rope can be exported.")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ExportError(
            "config.json rotates only a part of each head (partial_rotary_factor); the whole head is needed."
        )
    given = {float(value) for value in (rope.get("rope_theta"), config.get("rope_theta")) if value is not None}
    if len(given) != 1:
        raise ExportError(
            f"config.json gives {sorted(given) or 'no'} rope_theta; exactly one is needed, in rope_parameters or alone."
        )
    return given.pop()
