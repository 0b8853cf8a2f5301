"""The one rule that tells validation documents from training documents, and copies from originals."""

from __future__ import annotations

import hashlib
import math

VALIDATION_RULE = "first 64 bits of SHA-256 of the white-space-normalised UTF-8 text, as a number in [0, 1), < fraction"


def content_digest(text: str) -> bytes:
    """SHA-256 (32 bytes) of the text in UTF-8 with each run of white space as one space and none at the ends.

    Two documents with the same digest count as the same document.

    Raises:
        UnicodeEncodeError: the text holds half a surrogate pair.
    """
    return hashlib.sha256(" ".join(text.split()).encode("utf-8")).digest()


def is_validation(digest: bytes, validation_fraction: float) -> bool:
    """Whether the document with this content digest belongs to the validation split.

    The digest is read as a uniform number in [0, 1) and compared with the fraction, so the answer depends on the text
    alone: not on a seed, the order of files, copies elsewhere, or the number of workers. A larger fraction keeps every
    validation document of a smaller one.
    """
    return int.from_bytes(digest[:8], "big") < validation_fraction * 2**64


class RunningDigest:
    """`content_digest` of a text that arrives in pieces, each of which begins with white space or after it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.empty = True

    def update(self, piece: str) -> None:
        """Add the next piece."""
        words = " ".join(piece.split())
        if words:
            self._hash.update((words if self.empty else " " + words).encode("utf-8"))
            self.empty = False

    def digest(self) -> bytes:
        """The digest of what was added so far."""
        return self._hash.digest()


def validation_bound(validation_fraction: float) -> int:
    """The number of 64 bits below which the first half of a digest means validation."""
    return math.ceil(validation_fraction * 2**64)
