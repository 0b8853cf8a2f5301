"""When a run is compiled, and that only its training pass is."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from hf_tinylm.training import compiling
from hf_tinylm.training.compiling import FEWEST_FLOPS, compile_training, compiles

LONG, SHORT = 10 * FEWEST_FLOPS["cpu"], 0.1 * FEWEST_FLOPS["cpu"]


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
