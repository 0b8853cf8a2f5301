"""What is put around the model for training: checkpointed activations, compilation, autocast, several processes."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from ..modeling.model import TinyLMForCausalLM
from .allocator import keep_freed_memory
from .arguments import LMTrainingArguments
from .compiling import compile_training


def wrapped_for_training(model: TinyLMForCausalLM, args: LMTrainingArguments, accelerator: Accelerator) -> nn.Module:
    """The module whose forward and backward passes train `model`, on this process's device. Called once.

    DistributedDataParallel reduces straight into the gradients, which are views of its buckets.
    """
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs or {"use_reentrant": False})
    if args.torch_compile:
        compile_training(model, args.torch_compile_backend, args.torch_compile_mode)
    if args.device.type == "cpu":
        keep_freed_memory()
    bucket = {} if args.ddp_bucket_cap_mb is None else {"bucket_cap_mb": args.ddp_bucket_cap_mb}
    accelerator.ddp_handler = DistributedDataParallelKwargs(
        broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=bool(args.ddp_static_graph), **bucket
    )
    wrapped: nn.Module = accelerator.prepare_model(model)
    return wrapped
