"""Signals as requests: the first one ends a run cleanly at the next update border, a second one ends it at once.

A thread reads the signals, because a main thread that waits in a collective for a process that is gone would never get
to run a Python handler. Nothing heavy is imported here: a recipe installs this before its slow imports.
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

from ..errors import RunStopped

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# A terminal signals a launcher and its workers, and the launcher passes it on: within this time it is one request.
DUPLICATE_SECONDS = 1.0
# Variables that torchrun and accelerate set for the processes they start.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND")


class Interrupt:
    """The request to stop, if there is one. One per process; `install` is called once, from the main thread."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._installed = False
        self._deferring = False
        self._first_time = 0.0
        self._parent: int | None = None

    def install(self) -> None:
        """Take over SIGINT, SIGTERM and (unless nohup ignores it) SIGHUP. Outside the main thread nothing happens."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = True
        self._parent = os.getppid() if any(name in os.environ for name in _LAUNCHED) else None
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._stop_main_thread)
        threading.Thread(target=self._watch, args=(reading, writing), daemon=True, name="signals").start()

    @property
    def requested(self) -> bool:
        """Whether the run is to end at the next update border: a signal came, or the launcher of this worker died."""
        if self.signal is None and self._parent is not None and os.getppid() != self._parent:
            self.signal = signal.SIGTERM  # nobody would stop an orphan later
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 plus the signal, as shells report it."""
        return 128 + (self.signal or signal.SIGTERM)

    @property
    def name(self) -> str:
        """The signal's name."""
        return signal.Signals(self.signal or signal.SIGTERM).name

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """In this block a first signal only sets `requested`; outside it ends the process by `RunStopped`."""
        if self.signal is not None:
            raise self._stopped()
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def _watch(self, reading: socket.socket, writing: socket.socket) -> None:
        while received := reading.recv(1):
            number = received[0]
            if number not in SIGNALS:
                continue
            if self.signal is None:
                self.signal, self._first_time = number, time.monotonic()
            elif time.monotonic() - self._first_time > DUPLICATE_SECONDS:
                os.write(2, b"stopped: a second signal came, so nothing more is saved.\n")
                os._exit(128 + number)

    def _stop_main_thread(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first_time = number, time.monotonic()
        if not self._deferring:
            raise self._stopped()

    def _stopped(self) -> RunStopped:
        return RunStopped(f"{self.name} came while no update was running; nothing was lost.", self.exit_code)


INTERRUPT = Interrupt()
