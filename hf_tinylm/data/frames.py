"""Messages between a process and its workers over pipes: a line of JSON and blocks of bytes, never pickle."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

_LENGTH = struct.Struct("<I")


def write_frame(file: IO[bytes], header: dict[str, Any], *blocks: bytes | memoryview) -> None:
    """Write one message; `header` holds plain values.

    Raises:
        BrokenPipeError: the other end is gone.
    """
    text = json.dumps({**header, "sizes": [len(block) for block in blocks]}).encode()
    file.write(_LENGTH.pack(len(text)) + text)
    for block in blocks:
        file.write(block)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next message; None when the other end closed the pipe or died within a message."""
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    text = file.read(_LENGTH.unpack(length)[0])
    try:
        header = json.loads(text)
    except ValueError:
        return None
    sizes = header.pop("sizes")
    blocks = [file.read(size) for size in sizes]
    return (header, blocks) if [len(block) for block in blocks] == sizes else None
