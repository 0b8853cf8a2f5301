"""Train a small language model from raw text to a chat model in llama.cpp, with runs you can trust.

The public names below load on first use, so that importing the package stays instant.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "TinyLMConfig": "modeling.configuration",
    "TinyLMForCausalLM": "modeling.model",
    "LMTrainer": "training.trainer",
    "LMTrainingArguments": "training.arguments",
    "RunConfig": "config",
    "load_config": "config",
    "TokenWindows": "data.windows",
    "load_shards": "data.shards",
    "load_tokenizer": "tokenization.load",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
