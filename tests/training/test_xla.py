"""Training on a device of torch_xla, run on its CPU backend in a Python that has torch_xla: `make test-xla`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.files import read_rows
from hf_tinylm.training.trainer import LMTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # torch_xla compiles on first use

# 20 updates of four micro-batches with ragged targets, the last update partial; 46 validation windows in batches of 4.
UPDATES, BATCH_TOKENS = 20, 256
FIELDS = {
    **{"train_tokens": UPDATES * BATCH_TOKENS - 51, "eval_strategy": "steps", "eval_steps": 10},
    **{"save_strategy": "steps", "save_steps": 10, "max_grad_norm": 0.5},
}
# Runs each of its requests, and prints what torch_xla had counted by the end of each update.
PROGRAM = """
import json, sys
import numpy as np, torch
import torch_xla, torch_xla.debug.metrics as counted
from transformers import TrainerCallback
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import RunStopped
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.arguments import LMTrainingArguments
from hf_tinylm.training.trainer import LMTrainer

def stream(ids, seed=0):
    generator = np.random.default_rng(seed)
    return ((np.cumsum(generator.integers(0, 3, ids)) % 97) + 4).astype(np.uint16)

class Ragged:
    sequence_length, order = 32, "permutation"

    def __init__(self):
        self.windows = TokenWindows([stream(1_500), stream(700, 1)], 32, "permutation", 7)

    def __len__(self):
        return len(self.windows)

    def batch(self, ks):
        batch = self.windows.batch(ks)
        kept = torch.from_numpy(np.asarray(ks, dtype=np.int64) * 7919 % 32)
        mask = torch.arange(32)[None, :] > kept[:, None]
        return {**batch, "shift_labels": batch["shift_labels"].masked_fill(mask, -100)}

def number(name):
    data = counted.metric_data(name)
    return data[0] if data else 0

class Count(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_step_begin(self, *args, **kwargs):
        self.before = number("TransferFromDeviceTime")

    def on_optimizer_step(self, *args, **kwargs):
        self.reads = number("TransferFromDeviceTime") - self.before

    def on_step_end(self, *args, **kwargs):
        self.rows.append([number("CompileTime"), self.reads])

def run(folder, model, fields):
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    built = new_model(ModelSection(**{**shape, "intermediate_size": 64, **model}), 101, 32, seed=1)
    values = dict(
        learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, adam_beta2=0.95, global_batch_tokens=256,
        per_device_train_batch_size=2, per_device_eval_batch_size=4, report_to="none", disable_tqdm=True,
    )
    args = LMTrainingArguments(output_dir=folder, **{**values, **fields})
    assert args.device.type == "xla", args.device
    count = Count()
    evaluation = TokenWindows([stream(1_500, 2)], 32, "sequential", 0)
    trainer = LMTrainer(built, args, Ragged(), evaluation, callbacks=[count], token_bytes=np.arange(101) % 5)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"xla"}
    try:
        trainer.train()
    except RunStopped:
        pass
    return count.rows

print(json.dumps([run(*request) for request in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def on_xla() -> Callable[..., list[list[list[int]]]]:
    """Run requests (folder, model, fields) in one process on an XLA device of the CPU.

    Returns:
        For each run and update: programs compiled so far, and values read from the device before its step.
    """
    python = os.environ.get("HF_TINYLM_XLA_PYTHON")
    if python is None and importlib.util.find_spec("torch_xla") is not None:
        python = sys.executable
    if python is None:
        pytest.skip("needs a Python with torch_xla, whose path HF_TINYLM_XLA_PYTHON names: make test-xla")

    def run(*requests: tuple[Path, dict[str, Any], dict[str, Any]]) -> list[list[list[int]]]:
        request = json.dumps([(str(folder), model, fields) for folder, model, fields in requests])
        variables = {**os.environ, "PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}
        command = [str(python), "-c", PROGRAM, request]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.fixture(scope="module")
def runs(
    on_xla: Callable[..., list[list[list[int]]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[list[int]]]]:
    """The folder of five runs, and their counts; `resumed` is `dropped`, ended after ten updates and taken up again."""
    folder = tmp_path_factory.mktemp("xla")
    dropout = {"attention_dropout": 0.2}
    first = on_xla(
        (folder / "plain", {}, FIELDS),
        (folder / "dropped", dropout, FIELDS),
        (folder / "resumed", dropout, {**FIELDS, "stop_after_updates": 10}),
    )
    shutil.copytree(folder / "plain", folder / "moved")
    second = on_xla(
        (folder / "resumed", dropout, {**FIELDS, "resume_from_checkpoint": "auto"}),
        (folder / "bf16", {}, {**FIELDS, "bf16": True, "min_lr_ratio": 0.0}),
    )
    return folder, dict(zip(("plain", "dropped", "stopped", "resumed", "bf16"), (*first, *second), strict=True))


def losses(folder: Path, key: str = "loss") -> list[float]:
    return [row[key] for row in read_rows(folder / "metrics.jsonl") if key in row]


def checkpoint(folder: Path, name: str, step: int = UPDATES) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoint-{step:08d}" / f"{name}.safetensors")


def test_twenty_updates_equal_the_plain_cpu_run(
    runs: tuple[Path, Any], make_trainer: Callable[..., LMTrainer], ragged_windows: Callable[[str], Any]
) -> None:
    folder, _ = runs
    trainer = make_trainer("cpu", train=ragged_windows("permutation"), **FIELDS)
    trainer.train()
    for key in ("loss", "grad_norm", "eval_loss", "bits_per_byte"):
        found, expected = losses(folder / "plain", key), losses(trainer.output_dir, key)
        assert len(found) == (UPDATES if key in ("loss", "grad_norm") else 2)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=key)
    for name in ("model", "optimizer"):
        found, expected = checkpoint(folder / "plain", name), checkpoint(trainer.output_dir, name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype
            torch.testing.assert_close(found[key], tensor, atol=1e-4, rtol=0, msg=key)


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(runs: tuple[Path, Any]) -> None:
    """Dropout draws from the device's own generator, so its state is part of what is saved."""
    folder, _ = runs
    assert losses(folder / "resumed") == losses(folder / "dropped")
    assert losses(folder / "dropped") != losses(folder / "plain")
    for name in ("model", "optimizer", "rng-00000"):
        found, expected = checkpoint(folder / "resumed", name), checkpoint(folder / "dropped", name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), name


def test_nothing_is_compiled_after_the_first_updates_and_one_value_is_read_in_each(runs: tuple[Path, Any]) -> None:
    """Ragged targets, a partial last update, a rate that changes, an evaluation, a save: all are the same programs."""
    _, counts = runs
    for name in ("plain", "dropped", "bf16"):
        compiled = [programs for programs, _ in counts[name]]
        assert compiled[1] == compiled[9], f"{name}: {compiled}"
        assert compiled[10] == compiled[19], f"{name}: {compiled}"
        assert compiled[10] - compiled[9] <= 1, f"{name}: the evaluation is one program, and a save is none: {compiled}"
    assert [reads for _, reads in counts["plain"]] == [1] * UPDATES


def test_a_checkpoint_of_xla_goes_on_elsewhere(
    runs: tuple[Path, Any], make_trainer: Callable[..., LMTrainer], ragged_windows: Callable[[str], Any], tmp_path: Path
) -> None:
    folder, _ = runs
    shutil.copytree(folder / "moved", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-00000020")
    trainer = make_trainer("run", train=ragged_windows("permutation"), **FIELDS)
    trainer.train(resume_from_checkpoint="auto")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(folder / "plain"), atol=1e-4, rtol=0)


def test_bfloat16_rounds_matrix_products_and_no_weight(runs: tuple[Path, Any]) -> None:
    folder, _ = runs
    found, exact = np.array(losses(folder / "bf16")), np.array(losses(folder / "plain"))
    assert 0 < np.abs(found - exact)[:5].max() < 0.02
    for name in ("model", "optimizer"):
        kept = checkpoint(folder / "bf16", name)
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
        changed = [key for key, tensor in kept.items() if not torch.equal(tensor, tensor.bfloat16().float())]
        assert len(changed) >= len(kept) // 2, "rounded to bfloat16"
