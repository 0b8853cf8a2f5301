"""`python -m benchmarks.learn`: a run gets exactly the tokens that were asked for, whatever the size of its updates."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.config import load_config

ROOT = Path(__file__).parents[2]
TINY = ["--hidden_size", "32", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--num_key_value_heads", "2"]
TINY += ["--intermediate_size", "32", "--vocab_size", "64", "--torch_compile", "false", "--output_dir", "unused"]
BATCHES = ["--per_device_train_batch_size", "1", "--global_batch_tokens", "512", "--warmup_steps", "1"]


@pytest.fixture
def learn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.learn")


def test_a_batch_that_grows_is_swept_over_exactly_as_many_tokens(learn: Any) -> None:
    """4,000 targets: three updates of 512 and one of 1,024 until 2,560, then 1,024 and the 416 that are left."""
    ids = np.random.default_rng(0).integers(0, 64, 512 * 12 + 1).astype(np.uint16)
    task = learn.Task(None, ids, ids[: 512 * 2 + 1], np.full(64, 2), {})
    config = load_config("speedrun-10m", [*TINY, *BATCHES, "--batch_growth", "[[1_100, 1_024]]"])
    (found,) = learn.measure(learn.System("growing", task, config), 1, None, 4_000)
    assert (found["tokens"], found["updates"], found["planned_updates"]) == (4_000, 6, 6)
    assert [point["tokens"] for point in found["curve"]] == [512, 1_024, 1_536, 2_560, 3_584, 4_000]
    assert all(2.0 < point["bits_per_byte"] < 4.0 for point in found["curve"])  # log2(64) / 2 bytes, at random
    assert config.training.train_tokens == load_config("speedrun-10m").training.train_tokens


def test_the_peer_makes_whole_updates(learn: Any) -> None:
    plan = learn.System("stock Trainer", None).plan(40_000)
    assert (plan.updates, plan.train_tokens, plan.last_update_tokens) == (2, 32_768, 16_384)


def test_growth_within_a_time_is_refused(
    learn: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    growth = ["--batch_growth", "[[1_100, 8_192]]"]
    monkeypatch.setattr("sys.argv", ["learn", "--text", "unread.txt", "--minutes", "1", *growth])
    with pytest.raises(SystemExit) as caught:
        learn.main()
    assert caught.value.code == 2
    assert "give --tokens for batch_growth" in capsys.readouterr().err
