"""Saving off the critical path: copy to host memory, then write in the background, one write at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..errors import TrainingError
from ..files import fsync_path
from .checkpoint import Snapshot, last_good, rotate_checkpoints, write_checkpoint
from .metrics import EVENTS, METRICS, Events


class HostCopies:
    """Copies of tensors in host memory whose buffers are kept, so that only the first snapshot pays for allocation."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """The tensors as they are now; valid until the next call with this `prefix`."""
        copies = {}
        for name, tensor in tensors.items():
            key = prefix + name
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                pin = tensor.device.type == "cuda"
                buffer = self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            buffer.copy_(tensor.detach(), non_blocking=True)
            copies[name] = buffer
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


class CheckpointSaver:
    """Writes, verifies by manifest, and rotates the checkpoints of one run, on its main process.

    Args:
        keep: newest checkpoints that stay; None keeps all. Milestones and the best one stay besides.
        milestone_steps: every checkpoint at a multiple of this stays for good.
        background: write in a thread; otherwise `save` returns when the checkpoint is in place.
    """

    def __init__(
        self, output_dir: Path, events: Events, keep: int | None, milestone_steps: int | None, background: bool = True
    ) -> None:
        self.output_dir = output_dir
        self.events = events
        self.keep = keep
        self.milestone_steps = milestone_steps
        self.background = background
        self.host = HostCopies()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether a write that ended has failed; `wait` raises it."""
        return self._failure is not None

    def save(self, take_snapshot: Callable[[HostCopies], Snapshot]) -> float:
        """Copy the state and start to write it; seconds that the caller was held up (a write in flight is waited for).

        Raises:
            TrainingError: the previous write failed, or this one when not in the background.
        """
        began = time.monotonic()
        self.wait()
        snapshot = take_snapshot(self.host)
        stalled = time.monotonic() - began
        if self.background:
            # not a daemon: the interpreter waits for the write before it ends
            self._thread = threading.Thread(target=self._write, args=(snapshot, stalled), name="checkpoint")
            self._thread.start()
            return time.monotonic() - began
        self._write(snapshot, None, began)
        self.wait()
        return time.monotonic() - began

    def wait(self) -> None:
        """Wait for the write in flight.

        Raises:
            TrainingError: it failed; older checkpoints are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise TrainingError(
                f"The checkpoint could not be written to {self.output_dir}: {failure}. {last_good(self.output_dir)} "
                "Make room or repair the disk, then resume with resume_from_checkpoint: auto."
            ) from failure

    def _write(self, snapshot: Snapshot, stalled: float | None, began: float | None = None) -> None:
        started = time.monotonic()
        try:
            for name in (METRICS, EVENTS):  # a checkpoint that survives a power cut must find the rows before it
                if (self.output_dir / name).exists():
                    fsync_path(self.output_dir / name)
            folder = write_checkpoint(self.output_dir, snapshot)
            seconds = time.monotonic() - started
            size = sum(path.stat().st_size for path in folder.iterdir())
            removed = rotate_checkpoints(self.output_dir, self.keep, self.milestone_steps)
            parameters = sum(tensor.numel() for tensor in snapshot.weights.values())
            stall = stalled if stalled is not None else time.monotonic() - (began or started)
            self.events.add(
                "saved",
                snapshot.step,
                checkpoint=folder.name,
                bytes=size,
                bytes_per_parameter=round(size / parameters, 3),
                stall_seconds=round(stall, 4),
                write_seconds=round(seconds, 4),
                removed=[path.name for path in removed],
            )
        except BaseException as failure:
            self._failure = failure
