"""Rows of a JSON-lines file that another process is writing: each call reads only what was appended since the last."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np


class Follower:
    """Follows one file, which may be absent, torn at its end, or replaced by a shorter one when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # whole lines that are no JSON object
        self._file: IO[bytes] | None = None  # kept open: its inode cannot be given to the file that replaces it
        self._offset = 0  # after the last whole line that was read

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """The whole rows since the last call, and whether they are all there are: the file was replaced."""
        block, replaced = self.read()
        rows, damaged = parse(block)
        self.damaged += damaged
        return rows, replaced

    def read(self) -> tuple[bytes, bool]:
        """`poll` before its lines are parsed. A last line without its line break waits for the next call."""
        replaced = self._file is not None and self._was_replaced()
        if replaced:
            self.close()
        if self._file is None:
            if not self.path.is_file():
                return b"", replaced
            self._file, self._offset, self.damaged = self.path.open("rb"), 0, 0
        self._file.seek(self._offset)
        block = self._file.read()
        block = block[: block.rfind(b"\n") + 1]
        self._offset += len(block)
        return block, replaced

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _was_replaced(self) -> bool:
        assert self._file is not None
        held = os.fstat(self._file.fileno())
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return True
        return (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino) or there.st_size < self._offset


def parse(block: bytes) -> tuple[list[dict[str, Any]], int]:
    """The rows of whole lines, and how many lines are none.

    All lines are parsed as one array, twice as fast as one by one; only if that fails each is tried alone.
    """
    lines = [line for line in block.split(b"\n") if line.strip()]
    found: Any = None
    collects = gc.isenabled()
    gc.disable()  # it would search the growing rows for cycles again and again: a third of the time
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads("[" + b",".join(lines).decode("utf-8") + "]")
    if collects:
        gc.enable()
    if found is not None and len(found) == len(lines):
        rows = [row for row in found if isinstance(row, dict)]
        return rows, len(found) - len(rows)
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # counted by the caller: it is no row
        if isinstance(row, dict):
            rows.append(row)
    return rows, len(lines) - len(rows)


def number(row: Any, key: str) -> float | None:
    """A finite number of a row, or None: a row of an older version may lack it, and a file may hold anything."""
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond any float
        return None


def column(rows: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """`number` of every row, (rows,) float64, with nan for None; fast where a column holds nothing but numbers."""
    held = getattr(rows, "numbers", None)  # `rows.Updates` has read them already
    if held is not None:
        found: np.ndarray = held(key)
        return found
    values = [row.get(key) for row in rows]
    if set(map(type, values)) <= {float, int, type(None)}:
        try:
            found = np.array(values, dtype=np.float64)
        except OverflowError:  # an integer beyond any float
            found = np.array([np.inf])
        if not np.isinf(found).any():
            return found
    return np.array([np.nan if (value := number(row, key)) is None else value for row in rows], dtype=np.float64)
