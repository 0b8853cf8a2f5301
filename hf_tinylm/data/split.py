"""The one rule that tells validation documents from training documents, and copies from originals."""

from __future__ import annotations

import hashlib

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
