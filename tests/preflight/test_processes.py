"""Preflight of a run of two processes: what is different on one of them is found on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Run by both processes; one launch for all cases, because importing torch is slow.
DRIVER = """
import dataclasses, json, os, sys
from pathlib import Path
from runpy import run_path
from unittest import mock
import torch
torch.set_num_threads(1)
from hf_tinylm.errors import VerificationError
from hf_tinylm.files import bundled
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.training import trainer as trainers

RANK, OUT = int(os.environ["RANK"]), Path(sys.argv[1])
recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
own_init = TinyLMForCausalLM._from_config.__func__
own_plan, own_batches = trainers.plan_of_windows, trainers.micro_batches


def other_weights(cls, *args, **kwargs):
    model = own_init(cls, *args, **kwargs)
    with torch.no_grad():
        model.model.norm.weight += 1e-4 * RANK
    return model


def same_windows(dataset, plan, process, *rest):
    return own_batches(dataset, plan, 0, *rest)


def fewer_updates(args, dataset, world_size):
    plan = own_plan(args, dataset, world_size)
    return dataclasses.replace(plan, train_tokens=plan.train_tokens - (RANK if plan.updates > 2 else 0) * 256)


found = {}
plants = {
    "weights": mock.patch.object(TinyLMForCausalLM, "_from_config", classmethod(other_weights)),
    "windows": mock.patch.object(trainers, "micro_batches", same_windows),
    "updates": mock.patch.object(trainers, "plan_of_windows", fewer_updates),
    "none": mock.patch.dict(os.environ),
}
for name, plant in plants.items():
    with plant:
        try:
            settings = ["--config", sys.argv[2], "--output_dir", str(OUT / name), "--preflight", "true"]
            found[name] = recipe(settings)
        except VerificationError as error:
            found[name] = str(error)
(OUT / f"found-{RANK}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_both_processes_stop_at_weights_windows_or_updates_that_do_not_agree(tiny_config: Path, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "driver.py"), str(tmp_path), str(tiny_config)],
        env=variables, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    failed = {name: str(words).partition("failed: ")[2].partition(".")[0] for name, words in first.items()}
    assert failed["weights"] == "processes", done.stderr[-3000:]
    assert set(failed["windows"].split("; ")[0].split(", ")) <= {"windows", "targets"}
    assert "windows" in failed["windows"]
    assert failed["updates"] == "windows"
    assert first["none"] == second["none"] == 0
    assert [name for name in ("weights", "windows", "updates") if second[name] == 0] == []
    assert len((tmp_path / "none" / "metrics.jsonl").read_text().splitlines()) == 8
    assert not list(tmp_path.glob("**/.tmp-*"))
