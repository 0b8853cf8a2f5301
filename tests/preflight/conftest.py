"""Preflight as the console script runs it, on the tiny configuration, with what was planted before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.cli import main

Preflight = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def preflight(tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Preflight:
    """Runs `hf-tinylm preflight --json` with further arguments; its checks by name. The exit code must fit them."""

    def run(*arguments: str) -> dict[str, dict[str, Any]]:
        command = ["preflight", "--config", str(tiny_config), "--output_dir", str(tmp_path / "run"), "--json"]
        code = main([*command, *arguments])
        report = json.loads(capsys.readouterr().out)
        checks = {check["name"]: check for check in report["checks"]}
        assert report["ok"] == all(check["ok"] for check in checks.values())
        assert code == (0 if report["ok"] else 1)
        assert not list(tmp_path.glob("**/.tmp-*")), "a scratch folder was left behind"
        assert not (tmp_path / "run").exists()
        return checks

    return run
