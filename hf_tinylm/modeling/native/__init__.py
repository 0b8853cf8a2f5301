"""Kernels in C for training on processors with AVX-512 and bfloat16, a part of compiled runs, which have a compiler."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable

from ..model import TinyLMAttention, TinyLMForCausalLM
from . import attention, loss
from .build import has_tiles, has_vectors, library

# Of the norm of a result; bfloat16 rounds by up to 2^-9, and a sum of rounded products stays below twice that.
TOLERANCE = 2.0**-7


def use_native_kernels(model: TinyLMForCausalLM, sequence_length: int, loss_kernel: str = "auto") -> str | None:
    """Have the training passes of `model`, in bfloat16, use the kernels that fit it and this processor.

    Args:
        loss_kernel: `torch` leaves the loss to torch.

    Returns:
        What is wrong on a processor that could use them, in one line; None when they are used, or have no place here.
    """
    if not has_vectors():
        return None
    if loss_kernel != "torch":
        if (problem := loss_problem()) is not None:
            return problem
        model.loss_of_chunk = loss.native_chunk_loss
    layers = [module for module in model.modules() if isinstance(module, TinyLMAttention)]
    sizes = {layer.head_dim for layer in layers}
    fits = sequence_length <= attention.LONGEST and bool(sizes) and not any(size % attention.CHANNELS for size in sizes)
    if not fits or model.config.attention_dropout or model.config._attn_implementation != "sdpa" or not has_tiles():
        return None
    if (problem := attention_problem()) is not None:
        return problem
    for layer in layers:
        layer.whole_windows = attention.causal_attention
    return None


def native_kernels_of(model: TinyLMForCausalLM) -> str:
    """Which native kernels the training passes of `model` use, in words."""
    found = ["loss"] if model.loss_of_chunk is loss.native_chunk_loss else []
    attends = any(getattr(module, "whole_windows", None) is not None for module in model.modules())
    return ", ".join([*found, *(["attention"] if attends else [])]) or "none"


@functools.cache
def loss_problem() -> str | None:
    """What hinders the loss kernel on this machine, in one line; None when it compiled and computes what torch does."""
    return _problem("loss", library, loss.largest_error)


@functools.cache
def attention_problem() -> str | None:
    """The same of attention."""
    return _problem("attention", attention.prepared, attention.largest_error)


def _problem(name: str, prepare: Callable[[], object], largest_error: Callable[[], float]) -> str | None:
    try:
        prepare()
        found = largest_error()
    except (OSError, MemoryError, RuntimeError, subprocess.SubprocessError) as error:
        return f"The native kernel of {name} cannot be used here: {' '.join(str(error).split())[:200]}"
    if found <= TOLERANCE:  # not of NaN
        return None
    return f"The native kernel of {name} is off by {found:.1e} here, more than {TOLERANCE:.1e}."
