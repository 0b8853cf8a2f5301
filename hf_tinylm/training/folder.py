"""The folder of a run: one writer at a time, an honest word on how the last one ended, and room on its disk."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from ..contract import SWEEP
from ..errors import ConfigError, ContractError
from ..files import TEMPORARY_PREFIX
from .metrics import EVENTS, METRICS, read_rows

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; the heartbeat below still speaks
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
FAULTS = "faults.log"
# A holder touches its lock this often; where locks do not reach, it counts as alive until it is silent for longer.
HEARTBEAT_SECONDS = 10.0
SILENCE_SECONDS = 120.0
_UNKNOWN = "?"
_TEMPORARY = re.compile(rf"^{re.escape(TEMPORARY_PREFIX)}.+-[0-9a-f]{{8}}$")


class RunLock:
    """Holds `OUT/run.lock` while this process writes the run; a crash releases it and leaves its content as a trace."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / LOCK
        self.faults = output_dir / FAULTS
        self._file: IO[str] | None = None
        self._faults_file: IO[str] | None = None
        self._released = threading.Event()

    def acquire(self) -> str | None:
        """Take the lock; how the previous process ended when it did not release it, else None.

        Raises:
            ContractError: another process is writing this run.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file, holder = self._open()
        trace = self._last_words(holder) if holder else None
        file.seek(0)
        file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": round(time.time(), 3)}, file)
        file.flush()
        self._file = file
        self._released.clear()
        threading.Thread(target=self._beat, args=(file,), daemon=True, name="heartbeat").start()
        self._faults_file = self.faults.open("a", encoding="utf-8")  # a crash of the interpreter writes its stack here
        faulthandler.enable(self._faults_file)
        return trace

    def release(self) -> None:
        """Give the lock back: the run ended in a way it knows of."""
        if self._file is None:
            return
        faulthandler.disable()  # before its file goes
        with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):  # a notebook's stderr is no file
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
        if self._faults_file is not None:
            self._faults_file.close()
            if self.faults.exists() and self.faults.stat().st_size == 0:
                self.faults.unlink()
        self._released.set()
        self.path.unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def _open(self) -> tuple[IO[str], dict[str, Any]]:
        """The lock file, locked, and what its last holder wrote there."""
        while True:
            file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8")
            age = time.time() - os.fstat(file.fileno()).st_mtime
            holder = self._holder(file)
            held = self._why_held(file, holder, age)
            if held is not None:
                file.close()
                raise ContractError(
                    f"{self.path.parent} is being written by process {holder.get('pid', _UNKNOWN)} on "
                    f"{holder.get('host', _UNKNOWN)}{held}. Wait for it, stop it, or give another output_dir."
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    return file, holder
            file.close()  # its holder released and removed it between our opening and our locking

    @staticmethod
    def _why_held(file: IO[str], holder: dict[str, Any], age: float) -> str | None:
        """None when the lock is ours now, else a word on its holder. `age`: seconds since it last spoke."""
        reaches = fcntl is not None and holder.get("host") in (None, _UNKNOWN, socket.gethostname())
        if fcntl is not None:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return ""
            except OSError:  # a file system without locks: the heartbeat decides
                reaches = False
        if not holder or reaches or age >= SILENCE_SECONDS:
            return None
        return f" (it spoke {age:.0f} s ago; after {SILENCE_SECONDS:.0f} s of silence it counts as dead)"

    def _beat(self, file: IO[str]) -> None:
        """Show processes that the lock does not reach that this one is alive, however long an update takes."""
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError, ValueError):  # a slow disk must not end the run over a heartbeat
                os.utime(file.fileno())

    @staticmethod
    def _holder(file: IO[str]) -> dict[str, Any]:
        try:
            found = json.loads(file.read() or "{}")
        except ValueError:
            found = None
        return (
            found if isinstance(found, dict) else {"pid": _UNKNOWN, "host": _UNKNOWN}
        )  # torn by a crash in its first moment

    def _last_words(self, holder: dict[str, Any]) -> str:
        folder = self.path.parent
        rows, events = read_rows(folder / METRICS), read_rows(folder / EVENTS)
        words = f"The previous process ({holder.get('pid')} on {holder.get('host')}) ended uncleanly"
        words += f" after update {rows[-1]['step']:,}" if rows else " before its first update"
        words += f"; its last event was {events[-1]['event']}" if events else ""
        if self.faults.exists() and self.faults.stat().st_mtime > holder.get("started", 0):  # not of an earlier crash
            words += f"; {self.faults} holds the stack of its crash" if self.faults.stat().st_size else ""
        return words + "."


def is_start_that_was_killed(output_dir: Path) -> bool:
    """Whether a folder holds nothing but a sweep, or what a process leaves that was killed before it wrote run.json."""
    return output_dir.is_dir() and all(
        path.name in (LOCK, FAULTS, SWEEP) or _TEMPORARY.match(path.name) for path in output_dir.iterdir()
    )


def leftovers(output_dir: Path) -> list[Path]:
    """Temporary files and folders of writes that were killed. Whoever holds the lock may remove them."""
    return [path for path in output_dir.glob(f"{TEMPORARY_PREFIX}*") if _TEMPORARY.match(path.name)]


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files under a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if not file.is_dir())


def remove_leftovers(output_dir: Path) -> None:
    """Remove what killed writes left; only under the lock of the run."""
    for path in leftovers(output_dir):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


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
