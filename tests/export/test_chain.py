"""The whole road in miniature for the shape that other converters get wrong: QK-norm, 15 query and 5 key heads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_tinylm.export.llamacpp import LlamaCppServer
from hf_tinylm.export.parity import Reference
from hf_tinylm.files import bundled


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_kill_resume_export_and_generate_in_llama_cpp(tiny_config: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    run = tmp_path / "run"
    command = [sys.executable, str(bundled("recipes", "pretrain.py")), "--config", str(tiny_config)]
    command += ["--hidden_size", "64", "--num_attention_heads", "15", "--num_key_value_heads", "5", "--head_dim", "32"]
    command += ["--qk_norm", "true", "--rope_theta", "500_000", "--train_tokens", str(40 * 256), "--save_steps", "10"]
    command += ["--output_dir", str(run), "--run_name", "tiny", "--gguf", "f16", "q4_0", "--verify", "true"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (run / "checkpoint-00000010" / "manifest.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert not (run / "DONE.json").exists()

    resumed = [*command, "--resume_from_checkpoint", "auto"]
    done = subprocess.run(resumed, capture_output=True, text=True, env=dict(os.environ), timeout=150)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert "resumed" in events
    assert json.loads((run / "DONE.json").read_text())["updates"] == 40
    assert json.loads((run / "final" / "config.json").read_text())["model_type"] == "qwen3"
    assert done.stdout.count("with 0 mismatches") == 2

    reference = Reference(run / "final")
    prompt = reference.encode(["Emma said that"], False)[0]
    wanted = reference.greedy(prompt, 12, set())[0]
    with LlamaCppServer(run / "tiny-F16.gguf", threads=1) as server:
        assert server.generate(prompt, 12).ids == wanted
    with LlamaCppServer(run / "tiny-Q4_0.gguf", threads=1) as server:
        assert len(server.generate(prompt, 12).ids) == 12
    assert (run / "tiny-Q4_0.gguf").stat().st_size < 0.5 * (run / "tiny-F16.gguf").stat().st_size
