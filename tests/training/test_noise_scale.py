"""The share of an update that is signal, against gradients whose mean and covariance are known."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tinylm.errors import RunStopped
from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.noise_scale import NoiseMeter, adam_signal_of_noise, noise_scale, unbiased
from hf_tinylm.training.trainer import LMTrainer

Make = Callable[..., LMTrainer]

# A model whose gradient at each target is MEAN + noise of a known, uneven covariance: the loss is linear in weights.
# Run in this process, and by each of two that torch.distributed joins.
PROBLEM = """
import contextlib, json, os, sys
import torch
from hf_tinylm.training.noise_scale import NoiseMeter
from hf_tinylm.training.update import Update

SIZE, UPDATES, ROWS, BATCHES = 600, 200, 4, 8   # elements, updates; windows a micro-batch, micro-batches an update
spread = torch.linspace(0.5, 1.5, SIZE)
MEAN = torch.full((SIZE,), 2.0 / SIZE**0.5)
TRUE = float((spread**2).sum() / (MEAN**2).sum())   # tr(Sigma) / |G|^2

class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))

    def forward(self, input_ids, shift_labels, num_items_in_batch, **wanted):
        return type("Output", (), {"loss": (input_ids.sum((0, 1)) @ self.weight) / num_items_in_batch})

class Processes:
    def __init__(self, count):
        self.num_processes, self.device = count, torch.device("cpu")

    def no_sync(self, model):
        return model.no_sync() if self.num_processes > 1 else contextlib.nullcontext()

    def reduce(self, tensor, reduction):
        torch.distributed.all_reduce(tensor)
        return tensor

def estimate(rank, processes):
    plain = Linear()
    model = torch.nn.parallel.DistributedDataParallel(plain) if processes > 1 else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.0)
    meter = NoiseMeter(optimizer, processes)
    update = Update(Processes(processes), model, optimizer, 1.0, after_first=meter.see_first)
    generator = torch.Generator().manual_seed(5 + rank)
    for number in range(UPDATES):
        batches = []
        for _ in range(BATCHES // processes):
            gradients = MEAN + spread * torch.randn(ROWS, 2, SIZE, generator=generator)
            labels = torch.ones(ROWS, 2, dtype=torch.long)
            masked = torch.rand(ROWS, 2, generator=generator) < 0.3   # batches of different numbers of targets
            labels[masked], gradients[masked] = -100, 0.0
            batches.append({"input_ids": gradients, "shift_labels": labels})
        meter.before_update(number)
        result = update.run(batches, 0.0, meter.own)
        row = meter.row(number + 1, result.requests, result.targets, result.grad_norm)
    return row
"""


def in_this_process() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "problem"}
    exec(PROBLEM, names)
    row = names["estimate"](0, 1)
    return {**row, "true": names["TRUE"]}


def test_the_noise_scale_of_a_known_covariance_is_found_within_a_tenth_in_200_updates() -> None:
    row = in_this_process()
    assert 150 < row["true"] < 180  # updates have about 45 targets
    assert row["noise_scale"] == pytest.approx(row["true"], rel=0.1)
    assert 0 < row["noise_scale_error"] < 0.1 * row["true"]
    assert abs(row["noise_scale"] - row["true"]) < 3 * row["noise_scale_error"]


@pytest.mark.slow
def test_two_processes_find_the_noise_scale_that_one_finds(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    driver = PROBLEM + (
        "torch.distributed.init_process_group('gloo')\n"
        "row = estimate(int(os.environ['RANK']), 2)\n"
        "print(json.dumps(row))\n"
        "torch.distributed.destroy_process_group()\n"
    )
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, env={**os.environ, **address, "RANK": r}
        )
        for r in "01"
    ]
    told = [json.loads(process.communicate(timeout=170)[0].splitlines()[-1]) for process in started]
    assert told[0] == told[1]
    one = in_this_process()
    assert told[0]["noise_scale"] == pytest.approx(one["true"], rel=0.1)
    assert told[0]["noise_scale"] == pytest.approx(one["noise_scale"], rel=0.15)


def test_single_gradients_of_two_sizes_are_told_apart_without_bias() -> None:
    assert unbiased(3 + 8 / 4, 1 / 4, 3 + 8 / 64, 64) == pytest.approx((3, 8))
    assert unbiased(5.0, 1 / 64, 5.0, 64) == (None, None)  # one size only


def test_few_updates_or_no_signal_give_no_estimate() -> None:
    assert noise_scale([1.0] * 19, [50.0] * 19) == (None, None)
    assert noise_scale([1.0] * 20, [50.0] * 20) == (50.0, 0.0)
    assert noise_scale([-1.0] * 40, [50.0] * 40) == (None, None)


@pytest.mark.parametrize(
    ("betas", "updates"), [((0.9, 0.95), 500), ((0.9, 0.99), 800), ((0.8, 0.98), 500), ((0.9, 0.999), 40)]
)
def test_adams_signal_of_pure_noise_is_that_of_simulated_noise(betas: tuple[float, float], updates: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4_000))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=betas, eps=1e-12, weight_decay=0.0, fused=True)
    meter = NoiseMeter(optimizer)
    generator = torch.Generator().manual_seed(1)
    for number in range(updates):
        if number == updates - 1:
            meter._before = torch.zeros(4_000)
        parameter.grad = torch.randn(4_000, generator=generator)
        optimizer.step()
    row = meter.row(updates, (0.0, 0.0, 0.0), 1, 1.0)
    assert row["adam_signal_of_noise"] == adam_signal_of_noise(*betas, updates)
    assert row["adam_signal"] == pytest.approx(adam_signal_of_noise(*betas, updates), rel=0.03)  # 4,000 elements
    if betas[0] == 0.9 and updates > 100:
        assert row["adam_signal_of_noise"] == pytest.approx(0.183, abs=0.001)


def test_the_numbers_of_a_run_do_not_change_when_its_noise_is_measured_and_a_resume_goes_on_with_it(
    make_trainer: Make,
) -> None:
    own = {"gradient_signal", "gradient_noise", "noise_scale", "noise_scale_error", "signal_share"}
    own |= {"update_cosine", "adam_signal", "adam_signal_of_noise"}
    clocks = {"seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds"}
    fields = {"train_tokens": 24 * 256, "save_strategy": "steps", "save_steps": 19}
    rows, weights = {}, {}
    for name in ("on", "off"):
        trainer = make_trainer(name, **{**fields, "noise_scale": name == "on"})
        trainer.train()
        rows[name] = read_rows(trainer.output_dir / "metrics.jsonl")
        weights[name] = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights["on"], weights["off"], strict=True))
    assert not own & {key for row in rows["off"] for key in row}
    kept = [{k: v for k, v in row.items() if k not in own | clocks} for row in rows["on"]]
    assert kept == [{k: v for k, v in row.items() if k not in clocks} for row in rows["off"]]
    last = rows["on"][-1]
    assert rows["on"][18]["noise_scale"] is None
    assert last["noise_scale"] > 0
    assert last["signal_share"] == pytest.approx(256 / (256 + last["noise_scale"]))
    assert -1 <= rows["on"][19]["update_cosine"] <= 1
    assert rows["on"][19]["adam_signal"] > rows["on"][19]["adam_signal_of_noise"]
    with pytest.raises(RunStopped):
        make_trainer("parts", **fields, stop_after_updates=19).train()
    parts = make_trainer("parts", **fields)
    parts.train("auto")
    told = read_rows(parts.output_dir / "metrics.jsonl")
    assert [{k: row.get(k) for k in own} for row in told] == [{k: row.get(k) for k in own} for row in rows["on"]]


def test_one_micro_batch_in_one_process_gives_no_estimate(make_trainer: Make) -> None:
    trainer = make_trainer(train_tokens=22 * 64, global_batch_tokens=64)
    trainer.train()
    row = read_rows(trainer.output_dir / "metrics.jsonl")[-1]
    assert row["noise_scale"] is None
    assert row["gradient_signal"] is None
    assert math.isfinite(read_rows(trainer.output_dir / "metrics.jsonl")[19]["adam_signal"])
