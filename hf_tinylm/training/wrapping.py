"""What is put around the model for training: checkpointed activations, compilation, autocast, several processes."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from ..modeling.model import TinyLMForCausalLM
from ..modeling.projected_loss import ChunkLoss
from .allocator import keep_freed_memory
from .arguments import LMTrainingArguments
from .compiling import compile_training


def wrapped_for_training(
    model: TinyLMForCausalLM,
    args: LMTrainingArguments,
    accelerator: Accelerator,
    loss_of_chunk: ChunkLoss | None = None,
) -> nn.Module:
    """The module whose forward and backward passes train `model`, on this process's device. Called once.

    A `loss_of_chunk` of its own takes the place of torch's, compiled or not.

    DistributedDataParallel reduces straight into the gradients, which are views of its buckets.
    """
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs or {"use_reentrant": False})
    if args.torch_compile:
        compile_training(model, args.torch_compile_backend, args.torch_compile_mode)
    if loss_of_chunk is not None:
        model.loss_of_chunk = loss_of_chunk
    if args.device.type == "cpu":
        keep_freed_memory()
    bucket = {} if args.ddp_bucket_cap_mb is None else {"bucket_cap_mb": args.ddp_bucket_cap_mb}
    accelerator.ddp_handler = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=bool(args.ddp_static_graph), **bucket
    )
    wrapped: nn.Module = accelerator.prepare_model(model)
    if args.device.type == "xla" and args.bf16:
        _multiply_in_run_precision(model, args, accelerator)
    return wrapped


def run_precision(args: LMTrainingArguments, accelerator: Accelerator) -> AbstractContextManager[Any]:
    """The autocast in which a run makes its matrix products.

    On TPUs Accelerate (1.15: `AcceleratorState`, `is_bf16_available(ignore_tpu=True)`) would have none, and would ask
    torch_xla to hold every float32 tensor as bfloat16 instead, weights and moments too. So it is never told.
    """
    if args.device.type == "xla":
        return torch.autocast("xla", torch.bfloat16, enabled=bool(args.bf16))
    found: AbstractContextManager[Any] = accelerator.autocast()
    return found


def _multiply_in_run_precision(model: nn.Module, args: LMTrainingArguments, accelerator: Accelerator) -> None:
    """Run the model under autocast, in training and in evaluation, as Accelerate does for other devices."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*inputs: Any, **named: Any) -> Any:
        with run_precision(args, accelerator):
            return plain(*inputs, **named)

    model.forward = forward
