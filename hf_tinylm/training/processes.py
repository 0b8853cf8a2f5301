"""What one process tells all others, whichever way they are connected."""

from __future__ import annotations

import pickle
from typing import Any

import torch

_TAG = "hf_tinylm.gathered"


def gathered(accelerator: Any, own: Any) -> list[Any]:
    """What each process passes in, in rank order. All must call it."""
    if accelerator.num_processes == 1:
        return [own]
    if accelerator.device.type == "xla":  # torch.distributed knows nothing of these processes
        import torch_xla.core.xla_model as xm

        return [pickle.loads(told) for told in xm.rendezvous(_TAG, pickle.dumps(own))]
    found: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(found, own)
    return found
