"""A second copy of what a run writes about itself, in another folder: for when the first is lost with its disk."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable
from pathlib import Path

from ..contract import DONE_FILE, MIRROR, RUN_FILE
from ..errors import ConfigError
from ..files import atomic_file, write_json

_PERIOD = 5.0  # seconds between copies
_END_BYTES = 512  # of a copy, by which a log that goes on is told from one that was replaced
_LAST_WAIT = 10.0  # that the end of a run waits for the last copy at most


class Mirror:
    """Copies run.json, DONE.json and what was appended to the .jsonl files of a run, from a thread of its own.

    The run never waits for it, except for its last copy and then for 10 seconds at most. A copy that fails is the last:
    `tell` hears of it once, and the run goes on.

    Args:
        run: the folder of the run.
        folder: where the copies go; None: nowhere, and nothing is done.
        tell: is called with the words of a failure, from the thread.
    """

    def __init__(self, run: Path, folder: str | None, tell: Callable[[str], None]) -> None:
        self.run = run
        self.folder = None if folder is None else Path(folder).expanduser()
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._end, self._failed = threading.Event(), False
        self._heads: dict[str, tuple[int, bytes]] = {}  # of each log: how far it was copied, and the bytes before that
        self._whole: dict[str, tuple[int, int]] = {}  # of each other file: when it was written, and its size

    def check(self, resumed: bool) -> None:
        """Refuse a folder that holds something else than this run's mirror: it may be the only copy of another run.

        Raises:
            ConfigError: it is the run's own folder, or the mirror of another run or of an earlier one.
        """
        if self.folder is None:
            return
        if self.folder.resolve() == self.run.resolve():
            raise ConfigError(f"mirror_dir={self.folder} is the output_dir itself. Give a folder on another disk.")
        try:
            recorded = (self.folder / RUN_FILE).read_bytes()
        except OSError:  # not there yet, or a disk that fails: the first copy tells
            return
        if not resumed or recorded != (self.run / RUN_FILE).read_bytes():
            raise ConfigError(
                f"mirror_dir={self.folder} holds the mirror of another run, or of an earlier one, which this one would "
                "replace. Give another folder, or move it away."
            )

    def start(self) -> None:
        """Copy what there is, and go on every five seconds."""
        if self.folder is not None and not self._failed:
            self._end.clear()
            self._thread = threading.Thread(target=self._go_on, args=(self.folder,), name="mirror", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Copy what is new and end the thread; wait for it for a moment."""
        if self._thread is None or not self._thread.is_alive():
            self.start()
        self._end.set()
        if self._thread is not None and not self._failed:
            self._thread.join(_LAST_WAIT)
            self._failed |= self._thread.is_alive()  # it hangs: it is not waited for again

    def _go_on(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / MIRROR, {"run": str(self.run.resolve()), "host": platform.node()})
            while not self._end.wait(_PERIOD if self._heads else 0.0):
                self._copy(folder)
            self._copy(folder)
        except Exception as error:  # whatever it is: a mirror must not end the run
            self._failed = True
            with contextlib.suppress(Exception):  # the run's own disk may be full, and the run tells that itself
                self._tell(f"mirror_dir={folder} gets no more copies: {error}. The run goes on without.")

    def _copy(self, folder: Path) -> None:
        """Bring the mirror up to what the run's files hold now."""
        for name in (RUN_FILE, DONE_FILE):
            if (self.run / name).is_file():
                found = (self.run / name).stat()
                if self._whole.get(name) != (found.st_mtime_ns, found.st_size):
                    _replace(folder / name, (self.run / name).read_bytes())
                    self._whole[name] = (found.st_mtime_ns, found.st_size)
        for log in sorted(self.run.glob("*.jsonl")):
            self._append(log, folder / log.name)

    def _append(self, log: Path, copy: Path) -> None:
        """Append the whole lines that are new; a log that was replaced, as by a resume, is copied whole."""
        done, end = self._heads.get(log.name, (0, b""))
        with log.open("rb") as file:
            file.seek(done - len(end))
            continued = done > 0 and file.read(len(end)) == end
            if not continued:
                file.seek(0)
            block = file.read()
        block = block[: block.rfind(b"\n") + 1]
        if not continued:
            _replace(copy, block)
            done, end = 0, b""
        elif block:
            with copy.open("ab") as target:
                target.write(block)
        self._heads[log.name] = (done + len(block), (end + block)[-_END_BYTES:])


def _replace(path: Path, content: bytes) -> None:
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
