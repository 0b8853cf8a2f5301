"""One writer at a time: a lock file that a crash releases, and whose content says who left it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any

from .errors import ContractError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; the heartbeat below still speaks
    fcntl = None  # type: ignore[assignment]

# A holder touches its lock this often; where locks do not reach, it counts as alive until it is silent for longer.
HEARTBEAT_SECONDS = 10.0
SILENCE_SECONDS = 120.0
UNKNOWN = "?"


class FileLock:
    """Holds the file `path` while this process writes `what`.

    Args:
        path: the lock file; it is there while the lock is held, and after a crash.
        what: the folder that is written, for the error.
        instead: what to give in place of it, such as "another output_dir".
    """

    def __init__(self, path: Path, what: Path, instead: str) -> None:
        self.path, self.what, self.instead = path, what, instead
        self._file: IO[str] | None = None
        self._released = threading.Event()

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def acquire(self) -> dict[str, Any]:
        """Take the lock; the host, pid and start of a holder that did not release it, else nothing.

        Raises:
            ContractError: another process holds it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file, holder = self._open()
        file.seek(0)
        file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": round(time.time(), 3)}, file)
        file.flush()
        self._file = file
        self._released.clear()
        threading.Thread(target=self._beat, args=(file,), daemon=True, name="heartbeat").start()
        return holder

    def release(self, trace: dict[str, Any] | None = None) -> None:
        """Give the lock back and remove its file, or leave in it the `trace` that `acquire` found."""
        if self._file is None:
            return
        self._released.set()
        if trace:
            self._file.seek(0)
            self._file.truncate()
            json.dump(trace, self._file)
            self._file.flush()
        else:
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
                    f"{self.what} is being written by process {holder.get('pid', UNKNOWN)} on "
                    f"{holder.get('host', UNKNOWN)}{held}. Wait for it, stop it, or give {self.instead}."
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    return file, holder
            file.close()  # its holder released and removed it between our opening and our locking

    @staticmethod
    def _why_held(file: IO[str], holder: dict[str, Any], age: float) -> str | None:
        """None when the lock is ours now, else a word on its holder. `age`: seconds since it last spoke."""
        reaches = fcntl is not None and holder.get("host") in (None, UNKNOWN, socket.gethostname())
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
            found if isinstance(found, dict) else {"pid": UNKNOWN, "host": UNKNOWN}
        )  # torn by a crash in its first moment
