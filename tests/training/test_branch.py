"""Runs that go on from a checkpoint of another run's stable rates, to an end of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.config import load_config
from hf_tinylm.errors import CheckpointError, ConfigError, ContractError, RunStopped
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
LONG = {
    **{"optim": "muon", "lr_schedule": "wsd", "decay_fraction": 0.5, "train_tokens": 16 * 256, "min_lr_ratio": 0.0},
    **{
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": None,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "eval_tokens": 1024,
    },
}
SHORT = {**LONG, "train_tokens": 8 * 256 - 51}


def untimed(folder: Path) -> list[dict[str, Any]]:
    clocks = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")
    return [{k: v for k, v in row.items() if k not in clocks} for row in read_rows(folder / "metrics.jsonl")]


def test_a_branch_of_the_stable_part_equals_a_run_of_that_budget_bit_for_bit(
    make_trainer: Make, ragged_windows: Make
) -> None:
    """16 updates decay after 8; branches at 3 and 4 end after 8 and decay after 4. One is stopped and resumed."""
    shape = {"model": {"attention_dropout": 0.1}}
    runs = {}
    for name, fields in (("long", LONG), ("short", SHORT)):
        runs[name] = make_trainer(name, train=ragged_windows("permutation"), **shape, **fields)
        runs[name].train()
    for step in (3, 4):
        start = runs["long"].output_dir / f"checkpoint-{step:08d}"
        fields = {**shape, **SHORT, "branch_from": str(start)}
        with pytest.raises(RunStopped):
            make_trainer(f"at{step}", train=ragged_windows("permutation"), **fields, stop_after_updates=2).train()
        again = {**fields, "resume_from_checkpoint": "auto"}
        branch = make_trainer(f"at{step}", train=ragged_windows("permutation"), **again)
        branch.train()
        assert untimed(branch.output_dir) == untimed(runs["short"].output_dir)
        for name in ("model.safetensors", "optimizer.safetensors", "rng-00000.safetensors"):
            first, second = (
                load_file(run.output_dir / "checkpoint-00000008" / name) for run in (runs["short"], branch)
            )
            assert first.keys() == second.keys()
            assert all(torch.equal(first[key], second[key]) for key in first), (step, name)
        events = read_rows(branch.output_dir / "events.jsonl")
        assert (events[0]["event"], events[0]["step"], events[0]["branch_from"]) == ("started", step, str(start))
        recorded = json.loads((branch.output_dir / "run.json").read_text())["identity"]["training"]["branch_from"]
        assert recorded["parent_identity"]["training"]["train_tokens"] > branch.plan.train_tokens


def test_a_branch_that_was_not_possible_from_there_is_refused_and_leaves_the_folder_free(make_trainer: Make) -> None:
    long = make_trainer("long", **LONG)
    long.train()
    start = {step: str(long.output_dir / f"checkpoint-{step:08d}") for step in (4, 5, 12)}
    for step, fields, told in (
        (5, SHORT, "is after update 5, but update 5 had rate 0.001 there and has 0.00075 here"),
        (
            12,
            {**LONG, "train_tokens": 32 * 256},
            "is after update 12, but update 9 had rate 0.000875 there and has 0.001",
        ),
        (
            4,
            {**SHORT, "learning_rate": 2e-3},
            r"differs in more than its end; training\.learning_rate: 0\.001 -> 0\.002",
        ),
        (4, {**SHORT, "optim": "adamw"}, r"training\.optim: 'muon' -> None"),
    ):
        with pytest.raises(ContractError, match=told):
            make_trainer("child", **fields, branch_from=start[step]).train()
    (Path(start[4]) / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        make_trainer("child", **SHORT, branch_from=start[4]).train()
    shutil.copytree(start[5], long.output_dir.parent / "checkpoint-00000005")
    with pytest.raises(CheckpointError, match=r"has no run\.json"):
        make_trainer("child", **SHORT, branch_from=str(long.output_dir.parent / "checkpoint-00000005")).train()
    assert not (long.output_dir.parent / "child" / "run.json").exists()


def test_a_run_has_one_beginning() -> None:
    with pytest.raises(ConfigError, match="init_from and branch_from both say where the run starts"):
        load_config(None, ["--init_from", "a", "--branch_from", "b"])
