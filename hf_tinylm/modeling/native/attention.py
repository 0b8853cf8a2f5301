"""Causal attention over whole windows on a processor's matrix tiles (AMX): `attention.c`.

torch's attention on such processors takes two fifths of an update of a model of 10 million parameters, this one a fifth
of that, with gradients at least as near to float64.

Shapes: B windows, T positions, H query heads, K key/value heads, d channels of a head.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from .build import library

# Heads of other sizes do not fill tiles; longer windows would need more memory than they save time.
CHANNELS, LONGEST = 32, 8_192


class _Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("windows", "heads", "kv_heads", "positions", "channels")]


@functools.cache
def prepared() -> ctypes.CDLL:
    """The library, in a process that may use the tiles: without the system's leave they are no instructions.

    Raises:
        OSError: it refuses them, or `build.library` fails.
    """
    if library().attention_prepare() != 0:
        raise OSError("the system does not let this process use the tiles")
    return library()


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale x query keys^T, each position with those up to it) values, in bfloat16.

    Args:
        query: (B, H, T, d); `key` and `value` (B, K, T, d), K dividing H. Anything but bfloat16 is rounded to it.

    Returns:
        (B, T, H, d) bfloat16.
    """
    out, _ = _forward(*(_readable(part) for part in (query, key, value)), scale)
    return out


def _readable(x: torch.Tensor) -> torch.Tensor:
    """bfloat16, with the channels of a head side by side."""
    x = x.to(torch.bfloat16)
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("hf_tinylm::causal_attention", mutates_args=(), device_types="cpu")
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (B, T, H, d), and log sums of exponentials in base 2 (B, H, T)."""
    out, log_sums = _empty_forward(query, key, value, scale)
    inputs = (query, key, value)
    _call("attention_forward", [*inputs], inputs, query, key, scale, [out, log_sums])
    return out, log_sums


@_forward.register_fake
def _empty_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    windows, heads, positions, channels = query.shape
    log_sums = query.new_empty((windows, heads, positions), dtype=torch.float32)
    return query.new_empty((windows, positions, heads, channels)), log_sums


@torch.library.custom_op("hf_tinylm::causal_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    upstream: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, each (B, T, heads, d); `out` and its gradient are (B, T, H, d)."""
    gradients = _empty_backward(query, key, value, out, upstream, log_sums, scale)
    inputs = (query, key, value, out.transpose(1, 2), upstream.transpose(1, 2))
    _call("attention_backward", [*inputs, log_sums], inputs, query, key, scale, list(gradients))
    return gradients


@_backward.register_fake
def _empty_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = (part.new_empty(part.transpose(1, 2).shape) for part in (query, key, value))
    return first, second, third


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


def _gradients(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, log_sums = ctx.saved_tensors
    found = _backward(query, key, value, out, _readable(upstream), log_sums, ctx.scale)
    return (*(part.transpose(1, 2) for part in found), None)


_forward.register_autograd(_gradients, setup_context=_keep)


def _call(
    name: str,
    read: list[torch.Tensor],
    strided: tuple[torch.Tensor, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    written: list[torch.Tensor],
) -> None:
    """Call a function of the library: what it reads, the strides of that, the sizes, and what it writes."""
    strides = [step for part in strided for step in part.stride()[:3]]
    windows, heads, positions, channels = query.shape
    failed = getattr(prepared(), name)(
        *(ctypes.c_void_p(part.data_ptr()) for part in read),
        (ctypes.c_int64 * len(strides))(*strides),
        _Sizes(windows, heads, key.shape[1], positions, channels),
        ctypes.c_float(scale),
        ctypes.c_int(torch.get_num_threads()),
        *(ctypes.c_void_p(part.data_ptr()) for part in written),
    )
    if failed:
        raise MemoryError(f"No memory for attention over windows of {positions:,} positions. Give fewer threads.")


def largest_error() -> float:
    """Of output and gradients of a small case, beside float64: the norm of the difference over that of the value."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 75, 64), (2, 2, 75, 64), (2, 2, 75, 64))
    inputs = [torch.randn(shape, generator=draw).bfloat16().requires_grad_() for shape in shapes]
    upstream = torch.randn(2, 75, 4, 64, generator=draw).bfloat16()
    query, key, value = inputs
    found = causal_attention(query, key, value, 0.125)
    wide = [part.detach().double().requires_grad_() for part in inputs]
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(wide[0], wide[1], wide[2], is_causal=True, scale=0.125, enable_gqa=True).transpose(1, 2)
    pairs = [(found, expected)]
    gradients = torch.autograd.grad(found, inputs, upstream)
    pairs += zip(gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=True)
    return max(float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs)
