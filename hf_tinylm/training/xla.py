"""Devices of torch_xla, such as TPUs: operations are noted, and `hand_over` runs what was noted as one program.

Operations are noted until `hand_over` makes one program of them. It is compiled once for each shape, and again where a
number that changes is a constant in it. So whatever changes from update to update (rate, counts, requests) goes to the
device as a tensor, and a value is read after its program was handed over: read earlier, it would be a program of
its own that computes the update again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate.utils import is_torch_xla_available


def uses_xla() -> bool:
    """Whether a run of this process is on a device of torch_xla.

    Accelerate takes it wherever torch_xla can be imported, before a GPU and even where a CPU is asked for, unless the
    environment says USE_TORCH_XLA=0.
    """
    return bool(is_torch_xla_available())


def xla_kind() -> str:
    """What torch_xla runs on: TPU, CPU, CUDA or NEURON."""
    import torch_xla.runtime

    return str(torch_xla.runtime.device_type())


def hand_over(device: torch.device) -> None:
    """Start what was noted for `device`, without waiting for it. Other devices need no such thing."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def average_over_processes(gradients: Sequence[torch.Tensor], processes: int) -> None:
    """Replace gradients on XLA devices by their mean over processes, which DistributedDataParallel does elsewhere."""
    import torch_xla.core.xla_model as xm

    xm.all_reduce("sum", list(gradients), scale=1.0 / processes)


def xla_notices(noise_scale: bool, processes: int) -> list[str]:
    """What whoever starts a run on such a device should know."""
    notices = []
    if noise_scale:
        notices.append("noise_scale is left out on XLA devices, where it would stop each update.")
    if processes > 1:
        notices.append(
            f"{processes} XLA processes: this way was never run by its authors, who had one device. Compare "
            "its first losses with a run on one device, see docs/tpu.md."
        )
    return notices
