"""What one process tells all others, whichever way they are connected, and how it leaves them."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import torch

_TAG = "hf_tinylm.gathered"
LOOKS = 5  # in a row at which all threads must rest: one that waits for Python's lock rests too, but not for long


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


def rest_before_exit() -> None:
    """Have Python end only when threads of the process group have put away their last exchange.

    Where such a thread owns a tensor of ours it asks for Python's lock to free it. If Python is ending it is ended for
    that, and takes the process with it ("terminate called without an active exception", SIGABRT) after all work was
    done; if the lock is held by whoever joins the thread, neither goes on (torch 2.13: ProcessGroupGloo).
    """
    atexit.unregister(wait_for_threads)
    atexit.register(wait_for_threads)


def wait_for_threads(seconds: float = 5.0) -> None:
    """Give Python's lock away until no other thread of this process wants to run, or for so long."""
    at_rest, until = 0, time.monotonic() + seconds
    while at_rest < LOOKS and time.monotonic() < until:
        time.sleep(0.01)
        at_rest = 0 if _another_runs() else at_rest + 1


def _another_runs() -> bool:
    """Whether the system has another thread of this process running or ready; False where it does not say."""
    own = str(threading.get_native_id())
    for state in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if state.parent.name != own and state.read_text(errors="replace").rpartition(")")[2].split()[0] == "R":
                return True
    return False
