"""When a run is compiled, and that only its training pass is."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM, TinyLMRMSNorm
from hf_tinylm.modeling.native import has_tiles, has_vectors, native_kernels_of, use_native_kernels
from hf_tinylm.planning.compilation import FEWEST_FLOPS
from hf_tinylm.sections import ModelSection
from hf_tinylm.training import compiling
from hf_tinylm.training.compiling import compile_training, compiles

LONG, SHORT = 10 * FEWEST_FLOPS["cpu"], 0.1 * FEWEST_FLOPS["cpu"]


class CountGraphs(TrainerCallback):
    """Graphs that were compiled by the beginning of each update."""

    def __init__(self, graphs: list[int]) -> None:
        self.graphs = graphs

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def expected_kernels() -> str:
    """Those of a model whose heads fill tiles."""
    return "loss, attention" if has_tiles() else "loss" if has_vectors() else "none"


def test_auto_compiles_long_runs_on_devices_with_a_working_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiler_problem", lambda device: None)
    assert compiles("auto", LONG, "cpu") == (True, None)
    assert compiles("auto", SHORT, "cpu") == (False, None)
    assert compiles("auto", LONG, "cuda") == (False, None)  # too short for a GPU
    assert compiles("auto", 1e30, "mps") == (False, None)
    assert compiles(True, SHORT, "mps") == (True, None)
    assert compiles(False, LONG, "cpu") == (False, None)


def test_without_a_compiler_auto_says_why_and_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Callable[..., object]) -> Callable[..., object]:
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", broken)
    compiling.compiler_problem.cache_clear()
    compiled, why = compiles("auto", LONG, "cpu")
    compiling.compiler_problem.cache_clear()
    assert not compiled
    assert why == "torch.compile fails here: no C++ compiler was found"


def test_compiled_code_is_kept_where_the_environment_says_or_under_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    compiling.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    compiling.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/a/cache/hf_tinylm/inductor"


def test_evaluation_takes_the_plain_path_and_parameter_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile_(function: Callable[..., object], **options: object) -> Callable[..., object]:
        return lambda *args, **kwargs: calls.append("compiled") or function(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile_)
    model = torch.nn.Linear(2, 2)
    names = list(model.state_dict())
    compile_training(model, None, None)  # type: ignore[arg-type]
    model(torch.zeros(1, 2))
    assert calls == ["compiled"]
    model.eval()(torch.zeros(1, 2))
    assert calls == ["compiled"]
    assert list(model.state_dict()) == names


def test_a_run_says_why_it_does_without_native_kernels(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(
        "hf_tinylm.training.trainer.use_native_kernels", lambda model, length, loss_kernel: "Loss is off."
    )
    make_trainer(torch_compile=True, bf16=True, train_tokens=512, warmup_steps=0).train()
    assert "notice: Loss is off. The run goes on with torch's.\n" in capsys.readouterr().err
    trainer = make_trainer("plain", torch_compile=True, train_tokens=512, warmup_steps=0)  # float32
    trainer.train()
    assert trainer.not_native is None


@pytest.mark.slow
@pytest.mark.parametrize("heads", [6, 3])  # 16 channels of a head; or 32, which fill matrix tiles
def test_the_compiled_pass_is_as_near_to_float64_as_the_plain_one(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """Within twice its error, in float32 and in bf16 autocast: loss, and the gradients of all weights together.

    Native kernels are for bf16 runs alone, so there float32 is passed over.
    """

    def one_pass(model: TinyLMForCausalLM, bf16: bool) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:], num_items_in_batch=torch.tensor(320)).loss
        loss.backward()
        gradients = [parameter.grad.double().flatten() for parameter in model.parameters()]  # type: ignore[union-attr]
        return float(loss.detach().double()), torch.cat(gradients)

    section = ModelSection(96, 3, heads, heads // 3, 192)
    ids = torch.randint(4, 611, (4, 81), generator=torch.Generator().manual_seed(3))
    model = new_model(section, 611, 80, seed=1).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # scores and logits that differ, as in a trained model
    reference = copy.deepcopy(model).double()
    monkeypatch.setattr(TinyLMRMSNorm, "compute_dtype", torch.float64)
    exact_loss, exact = one_pass(reference, bf16=False)
    monkeypatch.undo()
    plain = {bf16: one_pass(model, bf16) for bf16 in (False, True)}
    torch._dynamo.reset()
    compile_training(model, None, None)
    if heads == 3:
        assert use_native_kernels(model, 80) is None
        assert native_kernels_of(model) == expected_kernels()
        del plain[False]
    for bf16, (plain_loss, plain_gradients) in plain.items():
        loss, gradients = one_pass(model, bf16)
        assert (gradients - exact).norm() <= 2 * (plain_gradients - exact).norm()
        assert abs(loss - exact_loss) <= 2 * abs(plain_loss - exact_loss) + 1e-6 * exact_loss
        assert not torch.equal(gradients, plain_gradients)  # it is another path


@pytest.mark.slow
def test_a_run_compiles_once_through_evaluations_and_its_partial_last_update(make_trainer: Callable[..., Any]) -> None:
    """Of 5 updates the last has 179 of 256 targets; evaluations follow the second and the fourth."""
    torch._dynamo.reset()
    trainer = make_trainer(
        torch_compile=True,
        train_tokens=5 * 256 - 77,
        eval_strategy="steps",
        eval_steps=2,
        bf16=True,
        model={"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    )
    graphs: list[int] = []
    trainer.add_callback(CountGraphs(graphs))
    trainer.train()
    assert len(graphs) == 5
    assert len(set(graphs)) == 1
    assert graphs[0] >= 1
    execution = json.loads((trainer.output_dir / "run.json").read_text())["execution"]
    assert execution["native_kernels"] == expected_kernels()
