"""The loss of each source, in validation always and in training on request, adds up to the loss of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional

from hf_tinylm.data.shards import Shard
from hf_tinylm.data.target_sources import TargetSources
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import ConfigError
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
NAMES = ["web", "none", "code"]
LENGTH = 32


def windows_of(order: str, ids: int, seed: int) -> TokenWindows:
    """Documents of 1 to 24 ids of two sources; those of `code` use other ids, so that the losses differ."""
    generator = np.random.default_rng(seed)
    ends = np.unique(np.append(np.cumsum(generator.integers(1, 25, ids // 10)).clip(max=ids), ids))
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    rows = generator.integers(0, 2, len(ends)) * 2
    of_ids = np.repeat(rows, np.diff(offsets))
    stream = np.where(of_ids == 0, generator.integers(4, 20, ids), generator.integers(20, 101, ids)).astype(np.uint16)
    shard = Shard("s", Path("s"), stream, offsets, pa.array([NAMES[row] for row in rows]), len(rows))
    return TokenWindows([stream], LENGTH, order, 7, sources=TargetSources([shard], NAMES))  # type: ignore[arg-type]


@torch.no_grad()
def reference(model: Any, windows: TokenWindows, count: int) -> tuple[dict[str, float], dict[str, int]]:
    """Loss and targets of each source from a stock model's logits; a source is known by its ids."""
    ids = torch.from_numpy(windows.gather(range(count)))
    nats = functional.cross_entropy(model(ids[:, :-1]).logits.transpose(1, 2).double(), ids[:, 1:], reduction="none")
    own = {"web": ids[:, 1:] < 20, "code": ids[:, 1:] >= 20}
    return {k: float(nats[v].mean()) for k, v in own.items()}, {k: int(v.sum()) for k, v in own.items()}


SETTINGS = {"train_tokens": 3 * 8 * LENGTH, "warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 3}


def test_training_and_validation_tell_the_loss_of_each_source(make_trainer: Make) -> None:
    train, validation = windows_of("permutation", 3_000, 0), windows_of("sequential", 800, 1)
    trainer = make_trainer(train=train, evaluation=validation, eval_tokens=20 * LENGTH, source_loss=True, **SETTINGS)
    before, before_counts = reference(stock_model(trainer.model), train, 8)
    logged: dict[str, float] = {}
    trainer.log = lambda logs, *_: logged.update(logs)
    trainer.train()
    after, after_counts = reference(stock_model(trainer.model), validation, 20)
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    assert all(set(row["loss_by_source"]) == {"web", "code"} for row in rows[:3])
    assert abs(before["web"] - before["code"]) > 1e-3, "losses that are equal prove nothing"
    for found, expected, counts, total in (
        (rows[0]["loss_by_source"], before, before_counts, rows[0]["loss"]),
        (rows[3]["eval_loss_by_source"], after, after_counts, rows[3]["eval_loss"]),
    ):
        assert found == pytest.approx(expected, abs=1e-5)
        weighted = sum(found[name] * counts[name] for name in counts) / sum(counts.values())
        assert weighted == pytest.approx(total, abs=1e-6)
    assert logged["eval_loss/code"] == rows[3]["eval_loss_by_source"]["code"]


def test_targets_beyond_the_budget_count_for_no_source(make_trainer: Make) -> None:
    train = windows_of("permutation", 3_000, 0)
    settings = {"train_tokens": 8 * LENGTH - 50, "warmup_steps": 0}
    trainer = make_trainer(train=train, source_loss=True, **settings)
    sums: list[np.ndarray] = []
    count = trainer._count
    trainer._count = lambda result, seconds: (sums.append(result.source_sums), count(result, seconds))
    trainer.train()
    flat = train.target_sources(range(8)).ravel()[: 8 * LENGTH - 50]
    assert sums[0][1].tolist() == np.bincount(flat, minlength=3).tolist()
    row = read_rows(trainer.output_dir / "metrics.jsonl")[0]
    assert sums[0][0].sum() / sums[0][1].sum() == pytest.approx(row["loss"], abs=1e-6)


def test_looking_at_sources_changes_no_bit_of_the_run_and_is_off_unless_asked_for(make_trainer: Make) -> None:
    found = []
    for asked in (True, False):
        trainer = make_trainer(str(asked), train=windows_of("permutation", 3_000, 0), source_loss=asked, **SETTINGS)
        trainer.train()
        assert ("loss_by_source" in read_rows(trainer.output_dir / "metrics.jsonl")[0]) is asked
        found.append(trainer.model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_windows_that_do_not_know_their_sources_are_refused(make_trainer: Make) -> None:
    with pytest.raises(ConfigError, match="do not know their sources"):
        make_trainer(source_loss=True)
    trainer = make_trainer(**SETTINGS)
    trainer.train()
    assert "eval_loss_by_source" not in read_rows(trainer.output_dir / "metrics.jsonl")[3]
