"""Bytes that should be UTF-8: refused, replaced or skipped, and never without a count and a place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from ..errors import DataError
from .chunks import Skipped

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BLOCK_BYTES = 2**20
# A longer line is treated in parts, so that one line of a terabyte needs no memory of that size.
LONGEST_LINE = 2**24
# With `surrogateescape`, each byte that is not UTF-8 becomes one character of this range.
_BAD = re.compile("[\udc80-\udcff]+")


def decode(content: bytes, policy: str, path: str, offset: int, skipped: Skipped) -> str | None:
    """`content` (a line or a value at byte `offset` of a file) as text; None when the policy is to skip it.

    Raises:
        DataError: it is not UTF-8 and the policy is strict.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        if policy == "strict":
            raise DataError(
                f"{path} is not valid UTF-8: byte 0x{content[error.start]:02x} at offset {offset + error.start:,} "
                f"({error.reason}). Convert the file to UTF-8, remove the bad bytes, or set utf8: replace or "
                f"utf8: skip for this source."
            ) from error
    places, bad_bytes = _bad_runs(content, path, offset)
    skipped.add_bad(places, bad_bytes)
    if policy == "skip":
        skipped.add("not_utf8", places[0])
        return None
    return content.decode("utf-8", "replace")


def refuse_utf16(beginning: bytes, path: str) -> None:
    """Refuse a file that says it is UTF-16, under every policy: most of its lines would pass as UTF-8 full of zeros.

    Raises:
        DataError: with what converts it.
    """
    if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 text; UTF-8 is needed. Convert it: iconv -f UTF-16 -t UTF-8 IN > OUT")


def valid_blocks(file: IO[bytes], path: str, policy: str, skipped: Skipped) -> Iterator[bytes]:
    """The content of a file in blocks of whole lines, each valid UTF-8; lines that are not go by the policy.

    A byte order mark at the start is an encoding sign, not text.

    Raises:
        DataError: a line is not UTF-8 and the policy is strict, or the file is UTF-16.
    """
    offset, rest = 0, b""
    while True:
        block = file.read(BLOCK_BYTES)
        content = rest + block
        if offset == 0:
            refuse_utf16(content, path)
        if not content:
            return
        end = _end_of_lines(content) if block else len(content)
        if end == 0:
            rest = content
            continue
        part, rest = content[:end], content[end:]
        start = len(BYTE_ORDER_MARK) if offset == 0 and part.startswith(BYTE_ORDER_MARK) else 0
        yield _valid(part[start:], path, offset + start, policy, skipped)
        offset += end


def _end_of_lines(content: bytes) -> int:
    """Bytes up to the last line end; 0 to read on; of a line that is too long, up to its last whole character."""
    end = content.rfind(b"\n") + 1
    if end or len(content) < LONGEST_LINE:
        return end
    end = len(content)
    while end > len(content) - 4 and content[end - 1] & 0xC0 == 0x80:
        end -= 1
    return end - 1


def _valid(part: bytes, path: str, offset: int, policy: str, skipped: Skipped) -> bytes:
    try:
        part.decode("utf-8")
        return part
    except UnicodeDecodeError:
        pass  # one of the lines is bad: look at each
    kept = []
    for line in _lines(part):
        text = decode(line, policy, path, offset, skipped)
        offset += len(line)
        if text is not None:
            kept.append(text.encode("utf-8"))
    return b"".join(kept)


def _lines(part: bytes) -> list[bytes]:
    """Lines that end in a line feed, with it."""
    *complete, last = part.split(b"\n")
    return [line + b"\n" for line in complete] + ([last] if last else [])


def _bad_runs(content: bytes, path: str, offset: int) -> tuple[list[str], int]:
    """Places where runs of bad bytes begin, and the number of bad bytes."""
    text = content.decode("utf-8", "surrogateescape")
    places, bad, done, position = [], 0, 0, offset
    for run in _BAD.finditer(text):
        position += len(text[done : run.start()].encode("utf-8"))
        places.append(f"{path} at byte {position:,}")
        size = run.end() - run.start()
        position, done, bad = position + size, run.end(), bad + size
    return places, bad
