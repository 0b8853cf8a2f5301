"""The folder of a run: one writer at a time, an honest word on how the last one ended, and room on its disk."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError, ContractError
from .metrics import EVENTS, METRICS, read_rows

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; the heartbeat below still speaks
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
FAULTS = "faults.log"
# A holder touches its lock this often; another host believes it is alive until it has been silent for longer.
HEARTBEAT_SECONDS = 10.0
SILENCE_SECONDS = 120.0


class RunLock:
    """Holds `OUT/run.lock` while this process writes the run; a crash releases it and leaves its content as a trace."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / LOCK
        self.faults = output_dir / FAULTS
        self._file: IO[str] | None = None
        self._faults_file: IO[str] | None = None
        self._touched = 0.0

    def acquire(self) -> str | None:
        """Take the lock; how the previous process ended when it did not release it, else None.

        Raises:
            ContractError: another process is writing this run.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        file = os.fdopen(descriptor, "r+", encoding="utf-8")
        age = time.time() - os.fstat(file.fileno()).st_mtime
        holder = self._holder(file)
        if self._is_held(file, holder, age):
            file.close()
            raise ContractError(
                f"{self.path.parent} is being written by process {holder.get('pid', '?')} "
                f"on {holder.get('host', '?')}. Wait for it, stop it, or give another output_dir."
            )
        trace = self._last_words(holder) if holder else None
        file.seek(0)
        file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": round(time.time(), 3)}, file)
        file.flush()
        self._file, self._touched = file, time.monotonic()
        self._faults_file = self.faults.open("a", encoding="utf-8")  # a crash of the interpreter writes its stack here
        faulthandler.enable(self._faults_file)
        return trace

    def touch(self) -> None:
        """Show other hosts that this process is alive; cheap, called at every update."""
        if self._file is not None and time.monotonic() - self._touched > HEARTBEAT_SECONDS:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):  # a full or slow disk must not end the run over a heartbeat
                os.utime(self._file.fileno())

    def release(self) -> None:
        """Give the lock back: the run ended in a way it knows of."""
        if self._file is None:
            return
        faulthandler.enable()  # to stderr again, before its file goes
        if self._faults_file is not None:
            self._faults_file.close()
            if self.faults.exists() and self.faults.stat().st_size == 0:
                self.faults.unlink()
        self.path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _is_held(self, file: IO[str], holder: dict[str, Any], age: float) -> bool:
        if fcntl is not None:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        elsewhere = bool(holder) and holder.get("host") != socket.gethostname()
        return elsewhere and age < SILENCE_SECONDS

    @staticmethod
    def _holder(file: IO[str]) -> dict[str, Any]:
        try:
            found = json.loads(file.read() or "{}")
        except ValueError:
            return {"pid": "?", "host": "?"}  # torn by a crash in its very first moment
        return found if isinstance(found, dict) else {}

    def _last_words(self, holder: dict[str, Any]) -> str:
        folder = self.path.parent
        rows, events = read_rows(folder / METRICS), read_rows(folder / EVENTS)
        words = f"The previous process ({holder.get('pid')} on {holder.get('host')}) ended uncleanly"
        words += f" after update {rows[-1]['step']:,}" if rows else " before its first update"
        words += f"; its last event was {events[-1]['event']}" if events else ""
        if self.faults.exists() and self.faults.stat().st_size:
            words += f"; {self.faults} holds the stack of its crash"
        return words + "."


def check_disk(output_dir: Path, needed: int, what: str) -> None:
    """Refuse to start when the volume of `output_dir` has less than `needed` bytes free.

    Raises:
        ConfigError: with both numbers.
    """
    place = output_dir
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ConfigError(
            f"The volume of {output_dir} has {free / 1e9:.2f} GB free and the run needs {needed / 1e9:.2f} GB "
            f"({what}). Free space, lower save_total_limit, or give an output_dir on another volume."
        )
