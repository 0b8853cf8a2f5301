"""The plan command as a function, and the least that it plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.cli import main


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """`plan("--config", "demo")` runs `hf-tinylm plan ... --json` in this process and gives its object."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["plan", *arguments, "--json"]) == code
        printed = capsys.readouterr()
        assert printed.out.count("\n") == 1, "one object, and nothing else on stdout"
        found: dict[str, Any] = json.loads(printed.out)
        return found

    return run


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A configuration without sources, shards, tokenizer or output folder."""
    path = tmp_path / "bare.yaml"
    path.write_text("training: {global_batch_tokens: 8192, train_tokens: 100_000}\ndata: {sequence_length: 256}\n")
    return str(path)
