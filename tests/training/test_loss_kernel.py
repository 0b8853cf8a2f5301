"""Which kernel computes the loss of a run, and that one that is wrong does not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

from hf_tinylm.files import read_rows
from hf_tinylm.modeling import native
from hf_tinylm.modeling.projected_loss import chunk_loss, compilable_chunk_loss
from hf_tinylm.training import loss_kernel
from hf_tinylm.training.agreement import _start_facts
from hf_tinylm.training.loss_kernel import LossKernel, choose_loss_kernel, difference_from_torch
from hf_tinylm.training.trainer import LMTrainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Make = Callable[..., LMTrainer]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that liger-kernel is installed in that version, with that kernel, and that it is for CPUs too."""

    def install(kernel: Any, version: str = "0.8.5") -> None:
        monkeypatch.setattr(loss_kernel, "KERNEL_DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(loss_kernel, "installed_version", lambda: version)
        monkeypatch.setattr(loss_kernel, "liger_chunk_loss", lambda: kernel)

    return install


def too_large(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = chunk_loss(logits, targets)
    logits.mul_(1.01)
    return losses


def of_a_wrong_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chunk_loss(logits, targets) + 1e-4


def without_the_target(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = chunk_loss(logits, targets)
    logits[torch.arange(len(targets)), targets] += 1
    return losses


def truncating(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Rounds gradients toward zero where bfloat16 rounds to the nearest."""
    wide = logits.float()
    losses = chunk_loss(wide, targets)
    logits.copy_((wide.view(torch.int32) & ~0xFFFF).view(torch.float32))
    return losses


def subtracting_after_rounding(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Takes 1 from a probability that is rounded already: a certain target's gradient is gone."""
    losses = chunk_loss(logits.clone(), targets)
    logits.copy_(torch.softmax(logits.float(), dim=-1))
    logits[torch.arange(len(targets)), targets] -= 1
    return losses


def deaf_to_nan(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chunk_loss(logits.nan_to_num_(), targets)


def missing_argument(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise TypeError("dynamic_func() missing 1\nrequired positional argument")


@pytest.mark.parametrize(
    ("asked", "device", "version", "why", "refused"),
    [
        ("torch", CUDA, "0.8.5", "loss_kernel=torch was asked for", False),
        ("auto", CPU, "0.8.5", "liger-kernel is for CUDA, and this run is on cpu", False),
        ("auto", CUDA, None, "not installed (pip install 'hf-tinylm[cuda-kernels]')", False),
        ("auto", CUDA, "0.7.3", "liger-kernel 0.7.3 is installed, 0.8 or later is needed", True),
        ("auto", CUDA, "unknown", "liger-kernel unknown is installed, 0.8 or later is needed", True),
    ],
)
def test_torch_computes_the_loss_where_there_is_no_kernel_for_it(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: torch.device, version: str | None, why: str, refused: bool
) -> None:
    monkeypatch.setattr(loss_kernel, "installed_version", lambda: version)
    monkeypatch.setattr(loss_kernel, "liger_chunk_loss", lambda: pytest.fail("it is not looked at"))
    found = choose_loss_kernel(asked, device, 211, torch.bfloat16)
    assert (found.name, found.of_chunk, found.refused) == ("torch", None, refused)
    assert why in found.told


def test_a_package_that_is_absent_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernel, "PACKAGE", "no-such-package-as-this")
    assert loss_kernel.installed_version() is None
    monkeypatch.setattr(loss_kernel, "PACKAGE", "torch")
    assert loss_kernel.installed_version() is not None


@pytest.mark.parametrize("version", ["0.8.0", "0.10.1", "1.0rc1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_as_exact_as_torch_is_used(installed: Callable[..., None], dtype: torch.dtype, version: str) -> None:
    installed(compilable_chunk_loss, version)
    found = choose_loss_kernel("auto", CPU, 5_003, dtype)
    assert found.told.startswith(f"loss kernel liger-kernel {version}: its loss and gradients on this device")
    assert found.of_chunk is compilable_chunk_loss


@pytest.mark.parametrize(
    ("kernel", "dtypes", "why"),
    [
        (too_large, DTYPES, "the gradient of the hidden states is "),
        (of_a_wrong_loss, DTYPES, "the loss is "),
        (without_the_target, DTYPES, "the gradient of the hidden states is "),
        (truncating, (torch.bfloat16,), "the gradient of the "),
        (subtracting_after_rounding, (torch.bfloat16, torch.float16), "the gradient of the "),
        (deaf_to_nan, DTYPES, "its loss hides a logit that is not a number"),
        (missing_argument, DTYPES, "it fails here: dynamic_func() missing 1 required positional argument"),
    ],
)
def test_a_kernel_that_is_wrong_is_not_used(
    installed: Callable[..., None], kernel: Any, dtypes: tuple[torch.dtype, ...], why: str
) -> None:
    installed(kernel)
    for dtype in dtypes:
        found = choose_loss_kernel("auto", CPU, 5_003, dtype)
        assert (found.name, found.of_chunk, found.refused) == ("torch", None, True)
        assert found.told.startswith(f"loss kernel torch: liger-kernel 0.8.5 is not used, as {why}")


def test_a_kernel_whose_bits_change_from_call_to_call_is_not_used(installed: Callable[..., None]) -> None:
    calls = count()

    def other_bits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = chunk_loss(logits, targets)
        logits[0, 0] *= 1 + 1e-6 * next(calls)  # within what is allowed
        return losses

    installed(other_bits)
    found = choose_loss_kernel("auto", CPU, 211, torch.float32)
    assert found.refused
    assert found.why.endswith("has other bits the second time")


def test_the_comparison_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert difference_from_torch(chunk_loss, CPU, 211, torch.float32) is None
    assert torch.equal(torch.rand(3), expected)


def test_a_run_trains_with_the_kernel_says_so_in_run_json_and_notices_when_it_is_gone(
    make_trainer: Make, installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def kernel(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(len(targets))
        return compilable_chunk_loss(logits, targets)

    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}
    make_trainer("plain", **settings).train()
    installed(kernel)
    with_kernel = make_trainer(**settings)
    calls.clear()
    with_kernel.train()
    assert calls == [2 * 32] * 4 * 6  # micro-batches of six updates
    losses = [
        [row["loss"] for row in read_rows(folder / "metrics.jsonl")]
        for folder in (with_kernel.output_dir, with_kernel.output_dir.parent / "plain")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    contracts = [
        json.loads((folder / "run.json").read_text())
        for folder in (with_kernel.output_dir, with_kernel.output_dir.parent / "plain")
    ]
    assert contracts[0]["execution"]["loss_kernel"] == "liger-kernel 0.8.5"
    assert "loss_kernel" not in contracts[1]["execution"]
    assert contracts[0]["identity"] == contracts[1]["identity"]
    assert _start_facts(with_kernel)["loss kernel"] == "liger-kernel 0.8.5"

    for name in ("checkpoint-00000006", "DONE.json"):  # as after a stop at update 3
        path = with_kernel.output_dir / name
        if path.is_dir():
            (path / "manifest.json").unlink()
        elif path.exists():
            path.unlink()
    capsys.readouterr()
    make_trainer(**settings, loss_kernel="torch").train("auto")
    assert "loss_kernel: 'liger-kernel 0.8.5' -> None" in capsys.readouterr().err


def test_a_run_goes_on_without_a_wrong_kernel_and_says_why(
    make_trainer: Make, installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    installed(too_large)
    trainer = make_trainer(eval_strategy="no")
    trainer.train()
    told = "loss kernel torch: liger-kernel 0.8.5 is not used, as the gradient of the hidden states is "
    assert f"notice: {told}" in capsys.readouterr().err
    warned = [row["reason"] for row in read_rows(trainer.output_dir / "events.jsonl") if row["event"] == "warned"]
    assert [reason for reason in warned if reason.startswith(told)]
    assert "loss_kernel" not in json.loads((trainer.output_dir / "run.json").read_text())["execution"]


INTERPRETED = """
import json, sys, torch
from hf_tinylm.modeling.projected_loss import chunk_loss, projected_loss
from hf_tinylm.training.loss_kernel import difference_from_torch, liger_chunk_loss

kernel, found = liger_chunk_loss(), {}
for name in ("float32", "float16", "bfloat16"):
    found[name] = [difference_from_torch(kernel, torch.device("cpu"), v, getattr(torch, name)) for v in (211, 50_257)]

generator = torch.Generator().manual_seed(0)
logits = 4.0 * torch.randn(12, 40_000, generator=generator)
logits[3] = torch.where(torch.arange(40_000) == 7, 90.0, -90.0)
targets = torch.randint(40_000, (12,), generator=generator)
targets[2], targets[3] = -100, 7
exact = torch.log_softmax(logits.double(), -1)
gradient = exact.exp()
rows = targets >= 0
losses = torch.where(rows, -exact[torch.arange(12), targets.clamp(min=0)], 0.0)
gradient[torch.arange(12)[rows], targets[rows]] -= 1
gradient[~rows] = 0
rounded = logits.bfloat16()
wide = rounded.float()
own = kernel(logits, targets)
found["loss"] = float((own - losses).abs().max())
found["gradient"] = float((logits - gradient).abs().max())
kernel(rounded, targets), kernel(wide, targets)
found["truncated"] = bool(torch.equal(rounded.float(), (wide.view(torch.int32) & ~0xFFFF).view(torch.float32)))

hidden = torch.randn(2, 300, 24, generator=generator, dtype=torch.float64)
weight = torch.randn(211, 24, generator=generator, dtype=torch.float64)
labels = torch.randint(211, (2, 300), generator=generator)
labels[0, ::3] = -100
each, results = torch.zeros(2, 300), []
for of_chunk, dtype in ((chunk_loss, torch.float64), (kernel, torch.float32)):
    h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
    seen = torch.zeros(2, 300, dtype=dtype)
    (projected_loss(h, w[:200], labels.clamp(max=199), of_chunk, seen) / 17).backward()
    results.append((seen.double(), h.grad.double(), w.grad.double()))
found["projected"] = [float((a - b).norm() / a.norm()) for a, b in zip(*results)]
found["padding"] = float(results[1][2][200:].abs().max())
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_the_real_kernel_is_as_exact_as_torch_under_tritons_interpreter() -> None:
    """Its arithmetic, without a GPU. Interpreted, a store to bfloat16 truncates, which the comparison refuses."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["float32"] == found["float16"] == [None, None]
    assert found["truncated"]
    assert all("gradient" in reason for reason in found["bfloat16"])
    assert found["loss"] < 1e-5
    assert found["gradient"] < 1e-6
    assert max(found["projected"]) < 1e-6
    assert found["padding"] == 0.0


def test_torch_keeps_its_loss_on_processors_with_a_native_kernel_too(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_vectors", lambda: True)
    monkeypatch.setattr(native, "has_tiles", lambda: False)
    monkeypatch.setattr(native, "loss_problem", lambda: None)
    model = make_trainer().model
    assert native.use_native_kernels(model, 32, "torch") is None
    assert native.native_kernels_of(model) == "none"
    assert native.use_native_kernels(model, 32) is None
    assert native.native_kernels_of(model) == "loss"


def test_one_sentence_says_what_is_used_and_why() -> None:
    assert LossKernel("torch", "so it is").told == "loss kernel torch: so it is"
