"""`python -m benchmarks.gpu` where there is no GPU: its figures, its table, and its contenders on small shapes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SECONDS = {
    "ours": 0.5,
    "stock bf16 compile": 0.75,
    "stock bf16": 1.0,
    "ours, torch's loss": 0.55,
    "stock bf16 liger": 0.8,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with two GPUs pretended and a matrix product of 500 TFLOP/s."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.gpu")
    monkeypatch.setattr(module, "gpu_names", lambda: ["NVIDIA H200", "NVIDIA H200"])
    monkeypatch.setattr(module, "_matrix_peak", lambda: 5e14)
    monkeypatch.setattr(module, "installed_version", lambda: None)
    return module


@pytest.fixture
def pretended(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What contenders are asked for; each answers with its seconds, two processes with a tenth more."""
    asked: list[dict[str, Any]] = []

    def run(name: str, **arguments: Any) -> dict[str, Any]:
        asked.append({"name": name, **arguments})
        seconds = SECONDS[name] * (1.1 if arguments.get("processes") == 2 else 1.0)
        return {"seconds": [seconds] * 3, "first_update_seconds": 9.0, "peak_bytes": 2_000_000_000}

    monkeypatch.setattr(gpu, "run", run)
    return asked


def test_without_a_gpu_it_says_so(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_names", list)
    with pytest.raises(SystemExit, match="there is no GPU here"):
        gpu.measure()


def test_rates_shares_and_scaling_are_those_of_the_arithmetic(gpu: Any, pretended: list[dict[str, Any]]) -> None:
    found = gpu.measure("100M", rounds=2, updates=4, rows=32)
    tokens = 32 * 1_024
    # 12 layers of 768: q, o 768 x 768; k, v 768 x 256; three of 768 x 2,048; the tied projection 768 x 32,000
    matrices = 12 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 2_048) + 768 * 32_000
    flops = 6 * matrices + 12 * 12 * 768 * 1_024  # and scores and values of attention, 12 x layers x width x length
    ours = found["contenders"]["ours"]
    assert ours["tokens_per_second"] == tokens * 2
    assert ours["mfu"] == pytest.approx(flops * tokens * 2 / 989e12, rel=0.01, abs=1e-3)
    assert ours["share_of_matrix_flops"] == pytest.approx(flops * tokens * 2 / 5e14, rel=0.01, abs=1e-3)
    assert found["contenders"]["stock bf16"]["ours_over_it"] == 2.0
    assert found["tokens_per_second_on_all"] == round(2 * tokens / 0.55)
    assert found["scaling"] == round(1 / 1.1, 3)
    table = "\n".join(gpu.table(found))
    assert "100M: 2 x NVIDIA H200, micro-batches of 32 x 1024 tokens" in table
    assert "MFU is the share of 989.0 TFLOP/s" in table
    assert "on all 2: 119,156 tokens/s, scaling 90.9%" in table


def test_contenders_of_one_gpu_see_one_gpu(
    gpu: Any, pretended: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock Trainer would spread its batch over all that it sees (DataParallel), and the figure be another."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    gpu.measure("tiny", rounds=1)
    alone, every = [a for a in pretended if "processes" not in a], [a for a in pretended if "processes" in a]
    assert {asked["CUDA_VISIBLE_DEVICES"] for asked in alone} == {"3"}
    assert [(asked["name"], asked["processes"]) for asked in every] == [("ours", 2)]
    assert "CUDA_VISIBLE_DEVICES" not in every[0]


def test_an_unknown_or_mixed_set_of_cards_has_no_mfu_and_the_table_says_why(
    gpu: Any, pretended: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in (["Tesla T4"], ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]):
        monkeypatch.setattr(gpu, "gpu_names", lambda names=names: names)
        found = gpu.measure("tiny", rounds=1)
        assert {one["mfu"] for one in found["contenders"].values()} == {None}
        assert f"no MFU: the published bfloat16 peak of {names[0]!r} is not" in "\n".join(gpu.table(found))


def test_a_contender_that_fails_is_named_and_the_others_are_measured(
    gpu: Any, pretended: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    works = gpu.run

    def run(name: str, **arguments: Any) -> dict[str, Any]:
        if name == "stock bf16 compile" or arguments.get("processes"):
            raise SystemExit(f"error: {name} at tiny ended with 1: no compiler")
        return works(name, **arguments)

    monkeypatch.setattr(gpu, "run", run)
    found = gpu.measure("tiny", rounds=3)
    assert list(found["contenders"]) == ["ours", "stock bf16"]
    assert list(found["failed"]) == ["stock bf16 compile", "ours on 2"]
    assert (found["tokens_per_second_on_all"], found["scaling"]) == (None, None)
    assert "failed: stock bf16 compile: error: stock bf16 compile at tiny ended with 1" in "\n".join(gpu.table(found))


def test_with_liger_kernel_ours_is_measured_without_it_too(
    gpu: Any, pretended: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "installed_version", lambda: "0.8.5")
    found = gpu.measure("tiny", rounds=1)
    assert found["contenders"]["ours, torch's loss"]["ours_over_it"] == 1.1
    assert "stock bf16 liger" in found["contenders"]


def test_the_rate_of_a_product_is_two_flops_for_each_pair_of_its_cube(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = importlib.import_module("benchmarks.machine")
    clock = iter(range(100))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(clock)))  # each product takes a second
    assert machine.matrix_peak(torch.bfloat16, 64, 3) == 2 * 64**3


@pytest.mark.slow
@pytest.mark.timeout(600)  # four processes import torch and transformers, on a machine that may be busy
def test_contenders_run_in_processes_of_their_own_and_two_processes_meet(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command on the CPU: gloo in place of NCCL, and torch.compile handing functions back as they are."""
    monkeypatch.setattr(gpu, "NAMES", ("ours", "stock bf16 compile"))
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = gpu.measure("tiny", rounds=1, updates=4, rows=3)
    assert found["failed"] == {}
    assert list(found["contenders"]) == list(gpu.NAMES)
    for one in found["contenders"].values():
        assert one["tokens_per_second"] > 0
        assert one["peak_bytes"] > 50_000_000
    assert found["micro_batch"] == [3, 64]
    assert found["tokens_per_second_on_all"] > 0
    assert found["scaling"] > 0
    assert len(gpu.table(found)) == 7
