"""Fixtures that several folders of tests share."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import yaml

from hf_tinylm.config import load_config
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.tokenizer_corpus import train_from_config
from hf_tinylm.files import bundled


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny matrices are faster on one thread, and sums do not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration on 300 KB of the bundled prose whose tokenizer (512 tokens) and shards are already written."""
    folder = tmp_path_factory.mktemp("tiny")
    with lzma.open(bundled("recipes", "corpora", "austen.txt.xz"), "rt", encoding="utf-8") as file:
        (folder / "prose.txt").write_text(file.read(300_000), encoding="utf-8")
    values = {
        "model": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            "intermediate_size": 64,
        },
        "tokenizer": {"tokenizer_path": str(folder / "tokenizer"), "vocab_size": 512},
        "data": {
            **{"shards": str(folder / "shards"), "sequence_length": 32, "validation_fraction": 0.1},
            "sources": [
                {"name": "prose", "path": str(folder / "prose.txt"), "splitter": "paragraphs_1024", "licence": "none"}
            ],
        },
        "training": {
            **{"train_tokens": 6 * 256 - 51, "global_batch_tokens": 256, "per_device_train_batch_size": 2},
            **{"learning_rate": 1e-3, "warmup_steps": 2, "eval_steps": 3, "save_steps": 2, "use_cpu": True},
            **{"bf16": False, "cpu_threads": 1, "preflight": False},
        },
        "evaluation": {"eval_tokens": 2048},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    train_from_config(load_config(str(path)), progress=False)
    prepare(load_config(str(path)), progress=False)
    return path
