"""Bounded pieces of input on their way from a reader to an encoder, and the account of what was not used."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

# A chunk is what one worker has in hand: about this much text, unless one row of a table is larger.
CHUNK_BYTES = 2**20
CHUNK_DOCUMENTS = 1024
# Places of bad bytes that a manifest lists for each source; all of them are counted.
OFFSETS_LISTED = 100


@dataclass
class Skipped:
    """What was not used as it stood, counted by reason; `first` is where each reason was met first.

    Reasons: empty, white_space, null, missing; short, long, language, licence (filters); not_utf8 (policy skip).
    `bad_lines` and `bad_bytes` count what is not UTF-8, skipped or replaced, `bad_places` lists the first of them.
    """

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    bad_lines: int = 0
    bad_bytes: int = 0
    bad_places: list[str] = field(default_factory=list)

    def add(self, reason: str, place: str) -> None:
        """Count one record."""
        self.counts[reason] += 1
        self.first.setdefault(reason, place)

    def add_bad(self, places: list[str], bad_bytes: int) -> None:
        """Count a line (or value) that is not UTF-8: where its runs of bad bytes begin, and their bytes."""
        self.bad_lines += 1
        self.bad_bytes += bad_bytes
        self.bad_places += places[: OFFSETS_LISTED - len(self.bad_places)]

    def merge(self, later: Skipped) -> None:
        """Add the account of what was read after this one."""
        self.counts.update(later.counts)
        self.first = {**later.first, **self.first}
        self.bad_lines += later.bad_lines
        self.bad_bytes += later.bad_bytes
        self.bad_places += later.bad_places[: OFFSETS_LISTED - len(self.bad_places)]

    def not_utf8(self) -> dict[str, Any]:
        """What a manifest says of bytes that are not UTF-8: lines or values, bytes, and where the first ones are."""
        return {"lines": self.bad_lines, "bytes": self.bad_bytes, "places": self.bad_places}

    def take(self) -> Skipped:
        """The account so far; this one begins again."""
        taken = Skipped(**vars(self))
        vars(self).update(vars(Skipped()))
        return taken

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads back."""
        return {
            "counts": dict(self.counts),
            "first": self.first,
            "bad_lines": self.bad_lines,
            "bad_bytes": self.bad_bytes,
            "bad_places": self.bad_places,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Skipped:
        """What `to_json` wrote."""
        return cls(**{**values, "counts": Counter(values["counts"])})


@dataclass
class Chunk:
    """Consecutive records of one file, not yet interpreted.

    `kind` says what `payload` is: "text" whole documents one after the other (valid UTF-8, `pieces` holds the offset
    and the bytes of each), "jsonl" whole lines, "rows" a record batch as an Arrow stream (text column first), "ids"
    token ids of whole documents (`pieces` counts in ids).

    `first` is the number of the first line or row, from 1; `offset` the byte of the file where the payload begins.
    A text chunk that is a `part` holds one piece of a large document, which `continues` in the next chunk or ends.
    `read` counts bytes of the source's files read so far, for a progress bar.
    """

    kind: Literal["text", "jsonl", "rows", "ids"]
    path: str
    payload: bytes
    first: int = 1
    offset: int = 0
    unit: str = "line"
    pieces: list[tuple[int, int]] = field(default_factory=list)
    part: bool = False
    continues: bool = False
    skipped: Skipped = field(default_factory=Skipped)
    read: int = 0
