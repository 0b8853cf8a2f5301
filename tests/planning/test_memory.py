"""The estimate of memory against what autograd keeps, and against the resident memory of a training process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tinylm.modeling.factory import new_model
from hf_tinylm.planning.memory import MemorySettings, activation_bytes, peak_memory
from hf_tinylm.planning.shape import ModelShape
from hf_tinylm.sections import ModelSection

ROWS, LENGTH, VOCABULARY = 2, 48, 211
# Every two-dimensional weight has another number of elements than any activation of one token count, so that the
# bfloat16 copies of weights that autograd keeps as well can be told from activations.
SHAPE = {"hidden_size": 40, "num_attention_heads": 10, "head_dim": 8, "intermediate_size": 104}


def bytes_kept(bf16: bool, documents: bool, **model: Any) -> int:
    """Bytes of the storages that a forward pass keeps for the backward pass, without weights and copies of them."""
    section = ModelSection(**SHAPE, **model)
    built = new_model(section, VOCABULARY, LENGTH, seed=0).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    sizes = {parameter.numel() for parameter in built.parameters() if parameter.ndim == 2}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.numel() not in sizes:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    places = {"position_ids": torch.arange(LENGTH).remainder(20)[None].expand(ROWS, -1)} if documents else {}
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        built(input_ids=ids, shift_labels=ids, num_items_in_batch=1, **places)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kv_heads", [10, 2])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(
    ("attention", "documents"), [("sdpa", False), ("sdpa", True), ("eager", False)], ids=["sdpa", "documents", "eager"]
)
def test_a_layer_keeps_exactly_what_the_estimate_counts(
    bf16: bool, kv_heads: int, qk_norm: bool, attention: str, documents: bool
) -> None:
    model = {"num_key_value_heads": kv_heads, "qk_norm": qk_norm, "attn_implementation": attention}
    measured = [bytes_kept(bf16, documents, num_hidden_layers=layers, **model) for layers in (2, 3)]
    settings = MemorySettings(ROWS * LENGTH, LENGTH, bf16, False, attention == "eager", documents)
    counted = [
        activation_bytes(ModelShape(VOCABULARY, 40, layers, 10, kv_heads, 104, 8, qk_norm), settings)
        for layers in (2, 3)
    ]
    assert counted[1] - counted[0] == measured[1] - measured[0]


def test_the_parts_are_those_of_float32_training() -> None:
    shape = ModelShape(1_000, 64, 2, 4, 2, 128, 16)
    parts = peak_memory(shape, MemorySettings(512, 256, bf16=True))
    n = shape.parameters
    assert (parts["weights"], parts["gradients"], parts["moments"]) == (4 * n, 4 * n, 8 * n)
    assert parts["bf16_weights"] == 2 * shape.decayed_parameters
    assert peak_memory(shape, MemorySettings(512, 256, bf16=False))["bf16_weights"] == 0
    assert "checkpoint_copy" not in parts
    assert peak_memory(shape, MemorySettings(512, 256, bf16=True, on_cpu=True))["checkpoint_copy"] == 12 * n


# What a process prints: its highest resident memory, in bytes, after an update, a save, and another update.
TRAIN = """
import json, resource, sys, tempfile
import numpy as np, torch
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.arguments import LMTrainingArguments
from hf_tinylm.training.trainer import LMTrainer
asked = json.loads(sys.argv[1])
torch.set_num_threads(1)
rows, length, vocabulary = asked["rows"], asked["length"], asked["vocabulary"]
windows = TokenWindows([np.random.default_rng(0).integers(0, vocabulary, 9 * rows * length)], length, "permutation", 0)
with tempfile.TemporaryDirectory() as folder:
    LMTrainer(
        new_model(ModelSection(**asked["model"]), vocabulary, length, 0),
        LMTrainingArguments(
            output_dir=folder + "/run", use_cpu=True, bf16=asked["bf16"], per_device_train_batch_size=rows,
            global_batch_tokens=2 * rows * length, train_tokens=2 * 2 * rows * length, save_strategy="steps",
            save_steps=1, save_total_limit=1, report_to="none", disable_tqdm=True,
            gradient_checkpointing=asked["checkpointing"], torch_compile=asked["compiled"],
        ),
        windows,
    ).train()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
# vocabulary, hidden, layers, heads, key-value heads, ffn, rows, T: about 5, 20 and 45 million parameters
SIZES = {
    "5M": (8_000, 256, 4, 4, 2, 768, 8, 256),
    "20M": (16_000, 384, 8, 6, 2, 1_024, 4, 256),
    "45M": (16_000, 512, 12, 8, 4, 1_408, 4, 256),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "precision"), [*itertools.product(SIZES, ("bf16", "fp32")), ("5M", "checkpointed"), ("20M", "compiled")]
)
def test_resident_memory_of_a_run_is_within_15_percent_of_the_estimate(size: str, precision: str) -> None:
    vocabulary, hidden, layers, heads, kv_heads, ffn, rows, length = SIZES[size]
    model = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    model |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "head_dim": 64}
    bf16, checkpointing, compiled = precision != "fp32", precision == "checkpointed", precision == "compiled"
    asked = {"model": model, "vocabulary": vocabulary, "rows": rows, "length": length}
    asked |= {"bf16": bf16, "checkpointing": checkpointing, "compiled": compiled}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(asked)], capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = int(done.stdout.split()[-1])
    shape = ModelShape(vocabulary, hidden, layers, heads, kv_heads, ffn, 64)
    settings = MemorySettings(rows * length, length, bf16, checkpointing, on_cpu=True, compiled=compiled)
    parts = peak_memory(shape, settings)
    assert sum(parts.values()) == pytest.approx(measured, rel=0.15), parts
