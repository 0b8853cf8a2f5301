"""metrics.jsonl and events.jsonl: one JSON object a line, appended as the run goes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from ..errors import TrainingError
from ..files import write_text
from .checkpoint import last_good

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"

# Dense bfloat16 peaks in FLOP/s, as published in each vendor's data sheet, for `mfu`.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops() -> float | None:
    """Published dense bf16 peak of this process's GPU in FLOP/s; None when it is not known, as on a CPU."""
    if not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name())


def peak_of(name: str) -> float | None:
    """The published peak of a GPU by its name, which must hold every word of an entry and no other variant's."""
    words = set(re.split(r"[\s-]+", name))
    if "NVL" in words:
        return None
    entries = sorted(_PEAK_FLOPS.items(), key=lambda entry: -len(entry[0].split()))
    return next((peak for key, peak in entries if set(key.split()) <= words), None)


class JsonLines:
    """An append-only file of JSON rows, flushed row by row. `enabled=False` (other ranks) writes nothing."""

    def __init__(self, path: Path, enabled: bool = True) -> None:
        self.path = path
        self.enabled = enabled
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

    def drop_after(self, step: int) -> int:
        """Remove rows whose `step` is beyond `step`, atomically; the number removed."""
        rows = self.rows()
        kept = [row for row in rows if row["step"] <= step]
        if self.enabled and self.path.exists():
            write_text(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
        return len(rows) - len(kept)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a JSON-lines file; none when it does not exist."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):  # not splitlines: a row may hold other characters that end a line
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # empty, or torn by a crash in the middle of an append
    return rows


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
