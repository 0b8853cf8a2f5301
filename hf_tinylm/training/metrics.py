"""metrics.jsonl and events.jsonl: one JSON object a line, appended as the run goes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ..contract import EVENTS, METRICS
from ..errors import TrainingError
from ..files import read_rows, write_text
from ..planning.devices import peak_of
from .checkpoint import last_good

__all__ = ["EVENTS", "METRICS", "Events", "JsonLines", "peak_flops", "read_rows"]


def positions_computed(row: dict[str, Any]) -> int:
    """Positions that the run has computed up to a row of an update; earlier versions wrote down its targets alone."""
    return int(row.get("positions", row["supervised_tokens"]))


def peak_flops(asked: float | None, device: torch.device, bf16: bool) -> float | None:
    """FLOP/s of one device: as asked, else the published dense bf16 peak of the GPU; None when it is not known."""
    if asked is not None or device.type != "cuda" or not bf16:
        return asked
    return peak_of(torch.cuda.get_device_name())


class JsonLines:
    """An append-only file of JSON rows, flushed row by row. `enabled=False` (other ranks) writes nothing."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self.path = path
        self.enabled = enabled
        self._writing = threading.Lock()  # the threads of checkpoints and of the mirror tell events too
        self._ends_whole = False  # known to end with a whole line

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; values that JSON has no word for (nan, inf) are refused.

        Raises:
            TrainingError: the row could not be written, as on a full disk.
        """
        if not self.enabled:
            return
        line = json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            with self._writing:
                if not self._ends_whole:
                    _mend_last_line(self.path)
                self._ends_whole = False
                with self.path.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(line)
                self._ends_whole = True
        except OSError as error:
            raise TrainingError(
                f"{self.path} could not be written: {error}. {last_good(self.path.parent)} "
                "Make room or repair the disk, then resume with resume_from_checkpoint: auto."
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """Every whole row; a torn last line, left by a crash, is passed over."""
        return read_rows(self.path)

    def begin_with(self, path: Path, step: int) -> None:
        """Have the rows of another file up to `step`, and no others."""
        if self.enabled:
            rows = [row for row in read_rows(path) if row["step"] <= step]
            write_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def drop_after(self, step: int) -> int:
        """Remove rows whose `step` is beyond `step`, atomically; the number removed."""
        rows = self.rows()
        kept = [row for row in rows if row["step"] <= step]
        if self.enabled and self.path.exists():
            write_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        return len(rows) - len(kept)


def _mend_last_line(path: Path) -> None:
    """Cut off a row that a crash has torn, or end one that lacks its line break: the next row needs its own line."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        content = file.read()
        start = content.rfind(b"\n") + 1
        if start == len(content):
            return
        try:
            json.loads(content[start:])
        except ValueError:
            file.truncate(start)
        else:
            file.write(b"\n")


class Events(JsonLines):
    """events.jsonl: what happened, when, at which step."""

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Append `{time, event, step, ...}`; time in seconds since 1970."""
        self.append({"time": round(time.time(), 3), "event": event, "step": step, **facts})
