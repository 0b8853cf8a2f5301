"""The four special tokens of every tokenizer trained here, and the alphabet of byte-level tokens."""

from __future__ import annotations

from functools import cache

END_OF_TEXT = "<|endoftext|>"  # separates documents; eos of a base model
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"  # eos of a chat model
PAD = "<|pad|>"

# Position in this tuple is the id.
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD)
END_OF_TEXT_ID, IM_START_ID, IM_END_ID, PAD_ID = range(4)

SMALLEST_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

# Copied character for character: llama.cpp reproduces exactly this expression under the name "qwen2".
# Source: pre_tokenizer.pretokenizers[0].pattern of tokenizer.json, huggingface.co/Qwen/Qwen2-0.5B.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def byte_of_character() -> dict[str, int]:
    """Byte that each of the 256 characters of a byte-level vocabulary stands for.

    Bytes that print as one Latin-1 character stand for themselves; the others take the characters from U+0100 on.
    Source: Radford et al. 2019, GPT-2, encoder.py, `bytes_to_unicode`.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
