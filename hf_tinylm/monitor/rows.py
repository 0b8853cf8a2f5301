"""The updates of a run, read a block of lines at a time: columns of numbers at once, a row as a dict when it is asked.

A run of 200,000 updates is 60 MB of JSON. Arrow reads its numbers several times faster than `json` makes its dicts; a
block that Arrow refuses, or would read otherwise than `json`, is read by `json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import pyarrow as pa

from .follow import column, number, parse

_LARGEST_LINE = 2**24  # bytes that Arrow reads at a time


@dataclass
class Block:
    """What lines of metrics.jsonl hold.

    Attributes:
        updates: their lines, in order.
        numbers: (updates,) float64 by key, nan where a row has no finite number.
        flags: (updates,) int8 by key, 1 true, 0 false, -1 neither.
        evaluations: rows with an `eval_loss`.
        damaged: lines that are no JSON object.
    """

    updates: list[bytes] = field(default_factory=list)
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    flags: dict[str, np.ndarray] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0


def read_block(block: bytes) -> Block:
    """Sort the rows of whole lines: an evaluation has an `eval_loss`, an update the tokens so far and none."""
    lines = [line for line in block.split(b"\n") if line.strip()]
    if not lines:
        return Block()
    table = _arrow_table(lines)
    return _by_json(block) if table is None else _by_arrow(lines, table)


def _arrow_table(lines: list[bytes]) -> Any:
    """Arrow's reading of the lines; None when it is not one row a line, or refuses them."""
    from pyarrow import json as arrow_json

    options = arrow_json.ReadOptions(use_threads=False, block_size=_LARGEST_LINE)
    try:
        table = arrow_json.read_json(pa.BufferReader(b"\n".join(lines)), read_options=options)
    except (pa.ArrowException, UnicodeDecodeError):  # a damaged line, or a key with values of several types
        return None
    return table if table.num_rows == len(lines) else None


def _by_arrow(lines: list[bytes], table: Any) -> Block:
    numbers, flags = {}, {}
    for name, values in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            found = _joined(values, pa.float64(), np.nan)
            numbers[name] = np.where(np.isfinite(found), found, np.nan)
        elif pa.types.is_boolean(values.type):
            flags[name] = _joined(values, pa.int8(), -1)
    nothing = np.full(len(lines), np.nan)
    scored = ~np.isnan(numbers.get("eval_loss", nothing))
    updates = ~scored & ~np.isnan(numbers.get("supervised_tokens", nothing))
    return Block(
        lines if updates.all() else [lines[place] for place in np.flatnonzero(updates)],
        {name: values[updates] for name, values in numbers.items()},
        {name: values[updates] for name, values in flags.items()},
        [json.loads(lines[place]) for place in np.flatnonzero(scored)],
    )


def _joined(values: Any, kind: Any, missing: float) -> np.ndarray:
    """One array of a column's chunks. Arrow's own way to numpy imports pandas, which takes longer than the reading."""
    chunks = [np.from_dlpack(chunk.cast(kind, safe=False).fill_null(missing)) for chunk in values.chunks]
    return np.concatenate(chunks)


def _by_json(block: bytes) -> Block:
    rows, damaged = parse(block)
    scored = [row for row in rows if number(row, "eval_loss") is not None]
    updates = [row for row in rows if number(row, "eval_loss") is None and number(row, "supervised_tokens") is not None]
    numbers, flags = {}, {}
    for key in {key for row in updates for key in row}:
        numbers[key] = column(updates, key)
        flags[key] = np.array([int(v) if isinstance(v := row.get(key), bool) else -1 for row in updates], np.int8)
    return Block([json.dumps(row).encode() for row in updates], numbers, flags, scored, damaged)


class Updates(Sequence[dict[str, Any]]):
    """Updates in their order. `keep` is how many of the last are kept; None: all."""

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._lines: list[bytes] = []
        self._numbers: dict[str, np.ndarray] = {}
        self._flags: dict[str, np.ndarray] = {}

    def add(self, block: Block) -> None:
        """Append the updates of a block."""
        if not block.updates:
            return
        here, new = len(self._lines), len(block.updates)
        self._lines += block.updates
        for held, added, missing in ((self._numbers, block.numbers, np.nan), (self._flags, block.flags, -1)):
            for key in held.keys() | added.keys():
                kind = added[key].dtype if key in added else held[key].dtype
                before, after = np.full(here, missing, kind), np.full(new, missing, kind)
                held[key] = np.concatenate([held.get(key, before), added.get(key, after)])
        if self._keep is not None and len(self._lines) > self._keep:
            self._lines = self._lines[-self._keep :]
            for held in (self._numbers, self._flags):
                held.update({key: values[-self._keep :] for key, values in held.items()})

    def numbers(self, key: str) -> np.ndarray:
        """(updates,) float64 of a key, nan where a row has no finite number."""
        return self._numbers[key] if key in self._numbers else np.full(len(self._lines), np.nan)

    def share(self, key: str) -> float | None:
        """Of the rows that say true or false under a key, the share that says true; None when none does."""
        told = self._flags.get(key, np.empty(0, np.int8))
        told = told[told >= 0]
        return float(told.mean()) if len(told) else None

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [json.loads(line) for line in self._lines[place]]
        found: dict[str, Any] = json.loads(self._lines[place])
        return found
