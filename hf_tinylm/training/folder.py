"""The folder of a run: one writer at a time, an honest word on how the last one ended, and room on its disk."""

from __future__ import annotations

import contextlib
import faulthandler
import re
import shutil
import sys
from pathlib import Path
from typing import IO, Any

from ..contract import SWEEP
from ..errors import ConfigError
from ..files import TEMPORARY_PREFIX
from ..locks import FileLock
from .metrics import EVENTS, METRICS, read_rows

LOCK = "run.lock"
FAULTS = "faults.log"
_TEMPORARY = re.compile(rf"^{re.escape(TEMPORARY_PREFIX)}.+-[0-9a-f]{{8}}$")


class RunLock:
    """Holds `OUT/run.lock` while this process writes the run; a crash releases it and leaves its content as a trace."""

    def __init__(self, output_dir: Path) -> None:
        self._lock = FileLock(output_dir / LOCK, output_dir, "another output_dir")
        self.path = self._lock.path
        self.faults = output_dir / FAULTS
        self._faults_file: IO[str] | None = None

    def acquire(self) -> str | None:
        """Take the lock; how the previous process ended when it did not release it, else None.

        Raises:
            ContractError: another process is writing this run.
        """
        holder = self._lock.acquire()
        trace = self._last_words(holder) if holder else None
        self._faults_file = self.faults.open("a", encoding="utf-8")  # a crash of the interpreter writes its stack here
        faulthandler.enable(self._faults_file)
        return trace

    def release(self) -> None:
        """Give the lock back: the run ended in a way it knows of."""
        if not self._lock.held:
            return
        faulthandler.disable()  # before its file goes
        with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):  # a notebook's stderr is no file
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
        if self._faults_file is not None:
            self._faults_file.close()
            if self.faults.exists() and self.faults.stat().st_size == 0:
                self.faults.unlink()
        self._lock.release()

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
