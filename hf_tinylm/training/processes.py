"""What one process tells all others, whichever way they are connected, and how it leaves them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import RunStopped

_TAG = "hf_tinylm.gathered"
_TRAINERS: weakref.WeakSet[Any] = weakref.WeakSet()


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


@contextlib.contextmanager
def group_left_at_exit(trainer: Any) -> Iterator[None]:
    """Have this process leave the group when Python ends, if the block ends on all processes together.

    The threads of a process group live as long as any DistributedDataParallel module does. One that is still putting
    away its last exchange when Python ends asks for Python's lock, is ended for it, and takes the process with it
    ("terminate called without an active exception", SIGABRT), after all work was done. After an error nothing is done:
    leaving would wait for an exchange that nobody joins any more.
    """
    atexit.unregister(_leave_group)
    together = False
    try:
        yield
        together = True
    except RunStopped:
        together = True
        raise
    finally:
        if together and trainer.accelerator.num_processes > 1:
            _TRAINERS.add(trainer)
            atexit.register(_leave_group)


def _leave_group() -> None:
    """End the group and its threads: nothing may hold a module that reduces its gradients through it."""
    for trainer in _TRAINERS:
        trainer.model_wrapped = trainer.model
        trainer.accelerator.free_memory()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
