"""Fixtures that several folders of tests share."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from hf_tinylm.config import load_config
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.tokenizer_corpus import train_from_config
from hf_tinylm.files import bundled
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.chat import chat_tokenizer
from hf_tinylm.tokenization.load import load_tokenizer, save_tokenizer
from hf_tinylm.tokenization.train import train_tokenizer


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


@pytest.fixture(scope="session")
def chat_base(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model of 512 tokens and random weights, as `final` folders are."""
    folder = tmp_path_factory.mktemp("base") / "final"
    config = load_config(str(tiny_config))
    tokenizer = load_tokenizer(str(config.tokenizer.tokenizer_path))
    model = new_model(config.model, 512, 128, seed=1, bos_token_id=None, eos_token_id=0, pad_token_id=3)
    save_stock_model(model, folder, tokenizer)
    return folder


@pytest.fixture(scope="session")
def chat_settings(chat_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat configuration on the first conversations of the persona set."""
    folder = tmp_path_factory.mktemp("settings")
    for split, rows in (("train", 40), ("test", 12)):
        lines = bundled("recipes", "persona", f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    values = {
        "data": {
            "sequence_length": 128,
            "conversations": [{"name": "persona", "path": str(folder / "train.jsonl"), "licence": "none"}],
            "test_conversations": [{"name": "persona", "path": str(folder / "test.jsonl")}],
        },
        "training": {
            **{"init_from": str(chat_base), "global_batch_tokens": 1024, "per_device_train_batch_size": 2},
            **{"learning_rate": 3e-3, "warmup_steps": 1, "eval_steps": 2, "save_steps": 2, "use_cpu": True},
            **{"bf16": False, "cpu_threads": 1, "epochs": 2, "save_total_limit": None},
        },
        "export": {"gguf": ["f16"]},
    }
    (folder / "chat.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "chat.yaml"


@pytest.fixture(scope="session")
def byte_chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A chat tokenizer of 260 tokens, one a byte: what it gives can be written by hand."""
    folder = tmp_path_factory.mktemp("bytes") / "tokenizer"
    save_tokenizer(train_tokenizer(["some text"], 260)[0], folder)
    return chat_tokenizer(str(folder))


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes conversations, each a list of (role, content), as JSONL in a folder of their own."""

    def write(name: str, chats: list[list[tuple[str, str]]]) -> Path:
        path = tmp_path_factory.mktemp("chats") / name
        rows = [{"messages": [{"role": role, "content": content} for role, content in chat]} for chat in chats]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@dataclass(frozen=True)
class Hub:
    """A Hub on the loopback interface; clients are processes of their own, since they read its address when imported.

    Repositories lie as folders under `root`: `models/NAMESPACE/NAME/files`, `datasets/NAMESPACE/NAME/files`. The user
    of `env` may write to the namespaces tester and lab.
    """

    url: str
    root: Path
    env: dict[str, str]

    def files(self, repo_id: str, kind: str = "datasets") -> Path:
        """Where the files of a repository lie; `kind` is datasets or models."""
        return self.root / kind / repo_id / "files"

    def add(self, repo_id: str, *paths: Path, kind: str = "datasets", private: bool = False) -> Path:
        """Make a repository of copies of files and folders; an earlier one of that name is replaced."""
        files = self.files(repo_id, kind)
        shutil.rmtree(files.parent, ignore_errors=True)
        files.mkdir(parents=True)
        for path in paths:
            shutil.copytree(path, files / path.name) if path.is_dir() else shutil.copy(path, files)
        (files.parent / "repo.json").write_text(json.dumps({"private": private}), encoding="utf-8")
        return files

    def is_private(self, repo_id: str, kind: str = "datasets") -> bool:
        """The visibility as the server has it."""
        return bool(json.loads((self.root / kind / repo_id / "repo.json").read_text())["private"])

    @contextmanager
    def faults(self, *faults: dict[str, Any]) -> Iterator[None]:
        """Let requests fail inside the block: see `Fault` in hub_server.py for the keys."""
        self._control("PUT", "faults", list(faults))
        try:
            yield
        finally:
            self._control("PUT", "faults", [])

    def requests(self) -> list[dict[str, Any]]:
        """What was asked since the last call: {"request": "GET /api/...", "status": 200}, a broken connection is -1."""
        found: list[dict[str, Any]] = self._control("GET", "requests")
        self._control("DELETE", "requests")
        return found

    def run(self, *arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS...` as a client of this Hub."""
        command, variables = [sys.executable, *arguments], {**self.env, **env}
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=timeout, check=False)

    def cli(self, *arguments: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `hf-tinylm ARGUMENTS...` as a client of this Hub."""
        return self.run("-m", "hf_tinylm.cli", *arguments, timeout=timeout, **env)

    def _control(self, method: str, what: str, value: Any = None) -> Any:
        body = json.dumps(value).encode() if value is not None else None
        request = urllib.request.Request(f"{self.url}/_control/{what}", body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A running Hub without repositories, and an empty cache for its clients."""
    folder = tmp_path_factory.mktemp("hub")
    server = Path(__file__).with_name("hub_server.py")
    process = subprocess.Popen(
        [sys.executable, str(server), str(folder / "root")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    client = {"HF_ENDPOINT": url, "HF_TOKEN": "hf_x", "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    quiet = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    yield Hub(url, folder / "root", {**os.environ, **client, **quiet, "PYTHONPATH": str(server.parents[1])})
    process.stdin.close()
    process.wait(timeout=30)
