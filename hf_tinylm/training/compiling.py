"""Compilation of the training pass: when it pays, and only for training, so that nothing else compiles anew."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ..files import cache_folder
from ..modeling.model import TinyLMForCausalLM
from ..modeling.projected_loss import compilable_chunk_loss
from ..planning.compilation import compiling_pays


def compiles(asked: bool | str, flops: float, device: str) -> tuple[bool, str | None]:
    """Whether to compile, and why not where `auto` was asked and it would have paid.

    Args:
        asked: true, false, or `auto`: a run of enough `flops`, where a compiler works.
    """
    if asked != "auto":
        return bool(asked), None
    if not compiling_pays(flops, device):
        return False, None
    problem = compiler_problem(device)
    return problem is None, problem


@functools.cache
def compiler_problem(device: str) -> str | None:
    """What hinders compilation on this machine, in one line; None when a small function compiled and ran."""
    keep_compiled_code()
    try:
        torch.compile(_probe)(torch.zeros(64, device=device))
    except Exception as error:  # whatever the compiler, its headers or its driver raise
        return f"torch.compile fails here: {' '.join(str(error).split())[:200]}"
    return None


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x + 1.0).sin()


def keep_compiled_code() -> None:
    """Keep what is compiled where a reboot leaves it, unless the environment says where; the next start is faster."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))


def compile_training(model: TinyLMForCausalLM, backend: str | None, mode: str | None) -> None:
    """Compile the forward pass that the model runs in training mode; evaluation and sampling stay as they are.

    The method is replaced, not the module: parameter names stay what they are.
    """
    keep_compiled_code()
    plain, backend = model.forward, backend or "inductor"
    compiled = torch.compile(plain, backend=backend, mode=mode)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if model.training else plain)(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    model.loss_of_chunk = torch.compile(compilable_chunk_loss, backend=backend, mode=mode)
