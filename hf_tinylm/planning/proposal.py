"""From a size and a budget to a whole configuration, by stated rules. A starting proposal, not an optimum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import nearest_multiple
from ..errors import ConfigError
from .shape import ModelShape

SMALLEST, LARGEST = 2_000_000, 1_000_000_000  # parameters
HEAD_DIM = 64
BLOCK = 256  # weights in a block of llama.cpp's 4-bit types; rows of other lengths fall back to larger types
_VOCABULARIES = (2_048, 4_096, 8_192, 16_384, 32_768)
_WIDTH_OVER_DEPTH = 48
_INNER_OVER_WIDTH = 8 / 3
_SIZE_TOLERANCE = 0.03
_MUON_OVER_ADAMW = 4  # rates: that of speedrun-10m, which was swept, is so many times AdamW's by the rule (1.5e-3)
_HIGHEST = {"hidden_size": 65_536, "num_attention_heads": 1_024, "num_hidden_layers": 512}

RULES = {
    "vocab_size": "the largest of 2,048 4,096 8,192 16,384 32,768 whose embedding is at most a quarter of the size",
    "hidden_size": "a multiple of 256, so that 4-bit exports need no fallbacks, with width / depth near 48 (20 to 130)",
    "num_hidden_layers": "chosen together with width and feed-forward size",
    "num_attention_heads": "hidden_size / 64",
    "num_key_value_heads": "a quarter of the attention heads, at least 2 where there are 2",
    "intermediate_size": "a multiple of 256 near 8/3 of the width that brings the parameters nearest to the size",
    "train_tokens": "as given, else 20 tokens per parameter",
    "sequence_length": "256 below 10M parameters, 512 below 30M, 1,024 below 250M, then 2,048",
    "global_batch_tokens": "the power of two nearest to 5.86 x sqrt(train_tokens), 4,096 to 524,288, in whole windows",
    "per_device_train_batch_size": "8, or what the batch holds; find-batch measures a better one",
    "learning_rate": "6e-4 x (100M / parameters)^0.4, one digit, at most 2e-3; muon: 4 x that; sweep compares others",
    "warmup_steps": "a twelfth of the updates, at most 1,000",
}


def propose(size: int, tokens: int | None, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `RULES`, in that order. Keys in `fixed` are taken as they are, and the others follow from them.

    Raises:
        ConfigError: the size is out of range, or no shape with the fixed keys comes near it.
    """
    if not SMALLEST <= size <= LARGEST:
        raise ConfigError(f"size={size:,} parameters is out of range; give {SMALLEST:,} to {LARGEST:,}.")
    for key, value in fixed.items():
        highest = _HIGHEST.get(key, 2**63)
        if key in RULES and isinstance(value, int) and not (0 if key == "warmup_steps" else 1) <= value <= highest:
            raise ConfigError(f"{key}={value:,} is out of range for a proposal; give 1 to {highest:,}.")
    tied = bool(fixed.get("tie_word_embeddings", True))
    shape = _nearest_shape(size, fixed, tied)
    train_tokens = fixed.get("train_tokens", tokens or 20 * shape.parameters)
    if not isinstance(train_tokens, int):
        raise ConfigError(f"train_tokens={train_tokens} gives no batch and no warmup. Give a number: --tokens 1B.")
    length = fixed.get("sequence_length", _sequence_length(size))
    batch = fixed.get("global_batch_tokens", _batch(train_tokens, length))
    updates = -(-train_tokens // batch)
    rate = min(2e-3, float(f"{6e-4 * (100e6 / shape.parameters) ** 0.4:.0e}"))
    rate *= _MUON_OVER_ADAMW if fixed.get("optim") == "muon" else 1
    found = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "train_tokens": train_tokens,
        "sequence_length": length,
        "global_batch_tokens": batch,
        "per_device_train_batch_size": math.gcd(8, max(1, batch // length)),
        "learning_rate": rate,
        "warmup_steps": min(1_000, updates // 12),
    }
    return {**found, **{key: value for key, value in fixed.items() if key in found}}


def _nearest_shape(size: int, fixed: Mapping[str, Any], tied: bool) -> ModelShape:
    """The shape whose width / depth and feed-forward size are nearest to the rules among those of about the size."""
    qk_norm = bool(fixed.get("qk_norm", False))
    candidates = []
    for width in _options(fixed, "hidden_size", range(BLOCK, 9 * BLOCK, BLOCK)):
        heads = fixed.get("num_attention_heads", max(1, width // HEAD_DIM))
        key_value = fixed.get("num_key_value_heads") or _quarter(heads)
        head_dim = fixed.get("head_dim") or max(1, width // heads)
        vocabulary = fixed.get("vocab_size", _vocabulary(size, width, tied))
        for inner in _options(fixed, "intermediate_size", _inner_sizes(width)):
            one = ModelShape(vocabulary, width, 1, heads, key_value, inner, head_dim, qk_norm, tied)
            depths = _near_depths(one, size, any_depth=fixed.get("hidden_size") is not None)
            for layers in _options(fixed, "num_hidden_layers", depths):
                shape = replace(one, num_hidden_layers=layers)
                candidates.append((_distance(shape, size), shape))
    shape = min(candidates, key=lambda candidate: candidate[0])[1]
    if abs(shape.parameters / size - 1) > 0.1:
        raise ConfigError(
            f"No shape with the given keys has about {size:,} parameters; the nearest has {shape.parameters:,}. "
            "Change the size, or leave out one of the given keys."
        )
    return shape


def _distance(shape: ModelShape, size: int) -> tuple[float, float]:
    """How far a shape is from the size, as far as that is beyond the tolerance, then from the usual proportions."""
    miss = abs(math.log(shape.parameters / size))
    aspect = abs(math.log2(shape.hidden_size / shape.num_hidden_layers / _WIDTH_OVER_DEPTH))
    inner = abs(math.log2(shape.intermediate_size / shape.hidden_size / _INNER_OVER_WIDTH))
    return max(0.0, miss - _SIZE_TOLERANCE), aspect + 2 * inner + 5 * miss


def _options(fixed: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    return [fixed[key]] if fixed.get(key) is not None else otherwise


def _inner_sizes(width: int) -> list[int]:
    """Multiples of 256 between twice and three and a half times the width, at least one."""
    lowest = max(BLOCK, -(-2 * width // BLOCK) * BLOCK)
    return list(range(lowest, max(lowest, int(3.5 * width)) + 1, BLOCK))


def _near_depths(one: ModelShape, size: int, any_depth: bool) -> list[int]:
    """Depths that bring the shape, given with one layer, nearest to the size from below and above.

    Width / depth stays between 20 and 130, a very deep and a very shallow model, unless the width is given.
    """
    width, layer = one.hidden_size, replace(one, num_hidden_layers=2).parameters - one.parameters
    shallowest, deepest = (1, 512) if any_depth else (-(-width // 130), width // 20)
    wanted = 1 + (size - one.parameters) // layer
    return sorted({min(max(depth, shallowest), deepest) for depth in (wanted, wanted + 1)})


def _vocabulary(size: int, width: int, tied: bool) -> int:
    embeddings = width * (1 if tied else 2)
    return max((v for v in _VOCABULARIES if v * embeddings <= size / 4), default=_VOCABULARIES[0])


def _quarter(heads: int) -> int:
    """Key-value heads: the divisor of `heads` nearest to a quarter of them, from 2 on where there are 2."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and (n > 1 or heads % 2)]
    return min(divisors, key=lambda n: abs(n - heads / 4))


def _sequence_length(size: int) -> int:
    return next(length for limit, length in ((10e6, 256), (30e6, 512), (250e6, 1024), (math.inf, 2048)) if size < limit)


def _batch(train_tokens: int, length: int) -> int:
    power = 2 ** round(math.log2(5.86 * math.sqrt(train_tokens)))
    return nearest_multiple(min(2**19, max(2**12, power)), length)
