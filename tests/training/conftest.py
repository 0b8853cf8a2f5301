from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.arguments import LMTrainingArguments
from hf_tinylm.training.trainer import LMTrainer

VOCABULARY, LENGTH, BATCH_WINDOWS = 101, 32, 8


def stream(ids: int, seed: int = 0) -> np.ndarray:
    """Ids that have something to learn: a noisy walk, so that gradients are not pure noise."""
    generator = np.random.default_rng(seed)
    return ((np.cumsum(generator.integers(0, 3, ids)) % (VOCABULARY - 4)) + 4).astype(np.uint16)


class RaggedWindows:
    """Windows whose targets are masked in part, differently for each window, as a pure function of its number."""

    def __init__(self, windows: TokenWindows) -> None:
        self.windows = windows
        self.sequence_length, self.order = windows.sequence_length, windows.order

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, ks: Any) -> dict[str, torch.Tensor]:
        batch = self.windows.batch(ks)
        kept = torch.from_numpy(np.asarray(ks, dtype=np.int64) * 7919 % LENGTH)
        mask = torch.arange(LENGTH)[None, :] > kept[:, None]
        return {**batch, "shift_labels": batch["shift_labels"].masked_fill(mask, -100)}


@pytest.fixture
def ragged_windows() -> Callable[[str], RaggedWindows]:
    """Masked windows in the given order, 67 an epoch over two shards: 96 of them cross an epoch and shard borders."""
    streams = [stream(1_500), stream(700, 1)]
    return lambda order: RaggedWindows(TokenWindows(streams, LENGTH, order, 7))  # type: ignore[arg-type]


@pytest.fixture
def token_windows() -> Callable[..., TokenWindows]:
    """Validation windows of a stream of that seed."""
    return lambda seed: TokenWindows([stream(1_500, seed)], LENGTH, "sequential", 0)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., LMTrainer]:
    """A small trainer; keyword arguments are fields of LMTrainingArguments, `model` holds keys of ModelSection."""

    def make(
        name: str = "run",
        model: dict[str, Any] | None = None,
        train: Any = None,
        evaluation: Any = None,
        callbacks: list[Any] | None = None,
        eval_sets: dict[str, Any] | None = None,
        run_facts: dict[str, Any] | None = None,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        **fields: Any,
    ) -> LMTrainer:
        shape = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
        }
        built = new_model(ModelSection(**{**shape, **(model or {})}), vocabulary, length, seed=1)
        values: dict[str, Any] = {
            "use_cpu": True,
            "learning_rate": 1e-3,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "global_batch_tokens": BATCH_WINDOWS * LENGTH,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 4,
            "train_tokens": 6 * BATCH_WINDOWS * LENGTH,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return LMTrainer(
            built,
            LMTrainingArguments(output_dir=str(tmp_path / name), **{**values, **fields}),
            train if train is not None else TokenWindows([stream(5_000), stream(700, 1)], LENGTH, "permutation", 7),
            evaluation if evaluation is not None else TokenWindows([stream(1_500, 2)], LENGTH, "sequential", 0),
            callbacks=callbacks,
            token_bytes=np.arange(vocabulary, dtype=np.int64) % 5,
            eval_sets=eval_sets,
            run_facts=run_facts,
        )

    return make


# Reads requests, one JSON object a line, and answers each with one: forks a driver, or tells how one ended.
SERVE = """
import json, os, runpy, sys
import torch
torch.set_num_threads(1)
import hf_tinylm.data.pack, hf_tinylm.export.hf, hf_tinylm.training.finish
import transformers.models.llama, transformers.data.data_collator

def answer(value):
    print(json.dumps(value), flush=True)

answer("ready")
child = None
while child is None and (line := sys.stdin.readline()):
    request = json.loads(line)
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        answer(os.waitstatus_to_exitcode(status) if pid else None)
        continue
    pid = os.fork()
    if pid == 0:
        child = request
    else:
        answer(pid)
if child is not None:
    os.setsid()
    output = os.open(child["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output, 1), os.dup2(output, 2)
    os.environ.update(child["environment"])
    sys.argv = child["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Forks:
    """Starts Python programs from a process that has imported everything, in a moment each.

    Attributes:
        environment: of the programs, without what a launcher sets.
    """

    def __init__(self, folder: Path) -> None:
        launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
        kept = {k: v for k, v in os.environ.items() if k not in launched and not k.startswith("ACCELERATE_")}
        self.environment = {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        (folder / "serve.py").write_text(SERVE)
        command = [sys.executable, str(folder / "serve.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
        )
        assert self._read() == "ready"

    def ask(self, **request: Any) -> Any:
        """`arguments`, `environment` and `output` (a file): start a program; its pid. `poll=pid`: exit code or None."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """The server that programs are forked from."""
    started = Forks(tmp_path_factory.mktemp("forks"))
    yield started
    started.process.kill()
    started.process.communicate(timeout=20)
