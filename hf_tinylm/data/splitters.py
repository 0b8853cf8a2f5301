"""Cut a text file into documents, and documents that are too large into pieces that encode as the whole does."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import ConfigError
from .chunks import CHUNK_BYTES

_PARAGRAPHS = re.compile(r"paragraphs_([1-9]\d{0,17})")
_BLANK_LINE = re.compile(rb"\n[ \t\r\x0b\f]*\n")
_BLANK_LINE_OR_END = re.compile(rb"\n[ \t\r\x0b\f]*(?:\n|\Z)")
_BLANK_LINES = re.compile(rb"(?:[ \t\r\x0b\f]*\n)*")

# Where a piece may end: between a printable ASCII character and a space. Every split expression in use begins a new
# word at such a space whatever stands around it, so the ids of the pieces, joined, are the ids of the whole. A line
# feed would not do: the qwen2 expression joins it to punctuation before it.
_CUT = re.compile(rb"[!-~](?= )")
_CUT_TAIL = 2**12


# Where the document ends that begins at byte `start` of a buffer, of which `done` bytes went before: (end of its text,
# start of what follows); None when that is not in the buffer. At the end of the file the last argument is true.
FindEnd = Callable[[bytes, int, int, bool], "tuple[int, int] | None"]


@dataclass(frozen=True)
class Splitter:
    """A rule that cuts text into documents. `keeps_line_ends`: line ends at the end of a document are text."""

    find_end: FindEnd
    keeps_line_ends: bool
    skips_blank_lines: bool


def find_splitter(name: str | None) -> Splitter:
    """The rule `lines`, `paragraphs_N`, or None: the whole file is one document.

    Raises:
        ConfigError: the splitter is unknown.
    """
    if name is None:
        return Splitter(_file_end, keeps_line_ends=True, skips_blank_lines=False)
    if name == "lines":
        return Splitter(_line_end, keeps_line_ends=False, skips_blank_lines=False)
    paragraphs = _PARAGRAPHS.fullmatch(name)
    if paragraphs is None:
        raise ConfigError(f"splitter {name!r} is unknown; use lines, paragraphs_N (such as paragraphs_4096), or none.")
    return Splitter(_paragraphs_end(int(paragraphs[1])), keeps_line_ends=False, skips_blank_lines=True)


def split_text(
    blocks: Iterable[bytes], splitter: Splitter, offset: int = 0, cut_large: bool = True
) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, bytes, whether the document goes on in the next piece) of a text that arrives in blocks.

    With `cut_large`, a document above `CHUNK_BYTES` comes in pieces of about that size. Memory: one block and one
    piece, unless a document offers no place to cut. `offset` is the place of the first byte; offsets count the bytes
    of the blocks.
    """
    buffer, done, anything = b"", 0, False
    for block, ended in _with_end(blocks):
        buffer += block
        start = 0
        while True:
            if splitter.skips_blank_lines and not done:
                start = _after_blank_lines(buffer, start, ended)
            if start == len(buffer) and not (ended and (done or (not anything and splitter.keeps_line_ends))):
                break
            found = splitter.find_end(buffer, start, done, ended)
            end, following = found or (len(buffer), 0)
            cut = _place_to_cut(buffer, start) if cut_large and end - start > CHUNK_BYTES else None
            if cut is not None and cut < end:
                yield offset + start, buffer[start:cut], True
                start, done = cut, done + cut - start
            elif found is None:
                break
            else:
                content = buffer[start:end]
                yield offset + start, content if splitter.keeps_line_ends else content.rstrip(b"\r\n"), False
                start, done = following, 0
            anything = True
        buffer, offset = buffer[start:], offset + start


def _file_end(buffer: bytes, start: int, done: int, ended: bool) -> tuple[int, int] | None:
    return (len(buffer), len(buffer)) if ended else None


def _line_end(buffer: bytes, start: int, done: int, ended: bool) -> tuple[int, int] | None:
    end = buffer.find(b"\n", start)
    return (end, end + 1) if end >= 0 else _file_end(buffer, start, done, ended)


def _paragraphs_end(size: int) -> FindEnd:
    """The first blank line after `size` bytes; the blank lines at a cut belong to no document."""

    def find_end(buffer: bytes, start: int, done: int, ended: bool) -> tuple[int, int] | None:
        pattern = _BLANK_LINE_OR_END if ended else _BLANK_LINE
        blank = pattern.search(buffer, start + max(size - done - 1, 0))
        if blank is None:
            return _file_end(buffer, start, done, ended)
        return blank.start() + 1, blank.end()

    return find_end


def _after_blank_lines(buffer: bytes, start: int, ended: bool) -> int:
    blank = _BLANK_LINES.match(buffer, start)
    after = blank.end() if blank else start
    return len(buffer) if ended and not buffer[after:].strip() else after


def _place_to_cut(buffer: bytes, start: int) -> int | None:
    """The last place to cut within `CHUNK_BYTES`, else the first one after; None when the buffer holds none."""
    limit = start + CHUNK_BYTES
    for low in (max(start, limit - _CUT_TAIL), start):
        places = deque(_CUT.finditer(buffer, low, limit + 1), maxlen=1)
        if places:
            return places[0].end()
    later = _CUT.search(buffer, limit)
    return later.end() if later else None


def _with_end(blocks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    for block in blocks:
        yield block, False
    yield b"", True
