"""Signals as requests: the first one ends a run cleanly at the next update border, a second one ends it at once.

A thread counts the signals, because a main thread that waits in a collective for a process that is gone would never
get to run a Python handler. Nothing heavy is imported here: a recipe installs this before its slow imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..errors import RunStopped

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# A terminal signals a launcher and its workers, and the launcher passes it on: within this time it is one request.
DUPLICATE_SECONDS = 1.0
# Variables that only torchrun and accelerate set, for the processes they start.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")


class Interrupt:
    """The request to stop, if there is one. One per process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._orphaned = False
        self._deferring = False
        self._parent: int | None = None
        self._before: dict[int, Any] | None = None  # the handlers that were there; None while not installed
        self._writing: socket.socket | None = None

    def install(self) -> None:
        """Take over SIGINT, SIGTERM and SIGHUP, except those that are ignored (nohup), until the process ends.

        Outside the main thread, and a second time, nothing happens.
        """
        if self._before is not None or threading.current_thread() is not threading.main_thread():
            return
        self._parent = os.getppid() if any(name in os.environ for name in _LAUNCHED) else None
        reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reading,), daemon=True, name="signals").start()
        taken = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before = {number: signal.signal(number, self._note) for number in taken}

    def uninstall(self) -> None:
        """Give the signals back to the handlers that were there, and forget the request."""
        if self._before is None or self._writing is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._writing.close()  # which ends the thread
        self.signal, self._orphaned, self._parent = None, False, None
        self._before = self._writing = None

    @property
    def requested(self) -> bool:
        """Whether the run is to end at the next update border: a signal came, or the launcher of this worker died."""
        if self.signal is None and self._parent is not None and os.getppid() != self._parent:
            self.signal, self._orphaned = signal.SIGTERM, True  # nobody would stop an orphan later
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as shells report it."""
        return 128 + (self.signal or signal.SIGTERM)

    @property
    def name(self) -> str:
        """What asks the run to end, in words."""
        return "The end of its launcher" if self._orphaned else signal.Signals(self.signal or signal.SIGTERM).name

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In this block a first signal only sets `requested`; outside it ends the process by `RunStopped`.

        A block that ends well without having heeded a signal raises `RunStopped` after all. Where nothing was
        installed, as in a notebook, the signals are taken over for this block only.
        """
        if self.signal is not None:
            raise self._stopped()
        borrowed = self._before is None
        self._deferring = True
        self.install()
        try:
            yield
            if self.signal is not None:
                raise self._stopped()
        finally:
            self._deferring = False
            if borrowed:
                self.uninstall()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return  # a repeated one is the other thread's matter
        self.signal = number
        if not self._deferring:
            raise self._stopped()

    def _stopped(self) -> RunStopped:
        return RunStopped(f"{self.name} came while no update was running; nothing was lost.", self.exit_code)


def _watch(reading: socket.socket) -> None:
    """End the process at a signal that comes later than a duplicate of the first one would."""
    first: float | None = None
    with reading:
        while received := reading.recv(1):
            if received[0] not in SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
            elif time.monotonic() - first > DUPLICATE_SECONDS:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, b"stopped: a second signal came, so nothing more is saved.\n")
                os._exit(128 + received[0])


INTERRUPT = Interrupt()
# A forked child has no thread that counts, and must not write into its parent's socket: a pool that ends its workers
# by SIGTERM would end the run.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=INTERRUPT.uninstall)
