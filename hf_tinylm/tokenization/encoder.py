"""Encode raw text fast: the merges of a `tokenizers` tokenizer, run by tiktoken, with the same ids."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TokenizerError
from .load import BackendTokenizer, backend_json, is_byte_level, special_ids, split_steps, token_bytes
from .special import END_OF_TEXT, QWEN2_SPLIT

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# tiktoken's regular expressions keep a stack entry per character of a run: at a million spaces they give up (an error,
# in some versions a panic). Runs this long are rare and go to `tokenizers`.
LONG_RUN = 50_000
_LONG_RUN_PATTERN = re.compile(rf"\S{{{LONG_RUN}}}|\s{{{LONG_RUN}}}")

# Source: GPT-2, encoder.py; what a ByteLevel step with use_regex splits by.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class FastEncoder:
    """Encode raw texts: no special token is added, and text that spells one yields ordinary ids.

    `engine` is "tiktoken" where it can represent the tokenizer (byte-level BPE with a plain split, no normalizer), else
    "tokenizers", with a logged notice. Threads may share an encoder: both engines release the interpreter lock.

    Args:
        tokenizer: what to encode as.
        engine: "tokenizers" to keep tiktoken out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | BackendTokenizer, engine: str | None = None) -> None:
        self._reference = reference_encoder(tokenizer)
        self._tiktoken: tiktoken.Encoding | None = None
        if engine != "tokenizers":
            reason = why_not_tiktoken(tokenizer)
            if reason is None:
                self._tiktoken = _tiktoken_encoding(tokenizer)
            else:
                logger.warning("Encoding with tokenizers (slower than tiktoken): the tokenizer has %s.", reason)

    @property
    def engine(self) -> str:
        """The library that encodes: tiktoken or tokenizers."""
        return "tokenizers" if self._tiktoken is None else "tiktoken"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 (n,).

        Raises:
            TokenizerError: a text holds half a surrogate pair, which UTF-8 cannot spell.
        """
        for text in texts:
            _require_utf8(text)
        if self._tiktoken is None:
            return self._encode_reference(texts)
        return [self._encode(text) for text in texts]

    def differs(self, text: str, ids: np.ndarray) -> bool:
        """Whether `ids` are not what the `tokenizers` library gives for `text`."""
        return not np.array_equal(self._encode_reference([text])[0], ids)

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids` (n,), special tokens spelled out."""
        return str(self._reference.decode(ids.tolist(), skip_special_tokens=False))

    def _encode(self, text: str) -> np.ndarray:
        assert self._tiktoken is not None
        if len(text) >= LONG_RUN and _LONG_RUN_PATTERN.search(text):
            return self._encode_reference([text])[0]
        return self._tiktoken.encode_to_numpy(text, allowed_special=set(), disallowed_special=())

    def _encode_reference(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._reference.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def reference_encoder(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> Tokenizer:
    """A copy of the tokenizer's backend that reads the spelling of a special token as ordinary text."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    return reference


def why_not_tiktoken(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> str | None:
    """What tiktoken cannot represent of a tokenizer, in words; None when it can represent all."""
    backend = backend_json(tokenizer)
    model = backend["model"]
    if not is_byte_level(backend):
        return "tokens that are not bytes"
    if backend.get("normalizer") is not None:
        return f"a normalizer ({backend['normalizer']['type']})"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            return f"the BPE option {option}"
    if any(token["id"] not in special_ids(backend) for token in backend["added_tokens"]):
        return "added tokens that are not special"
    if _split_pattern(backend) is None:
        return "a split other than one regular expression"
    vocabulary, merges = model["vocab"], model["merges"]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]
    ids = [vocabulary["".join(pair)] for pair in pairs]
    if any(low >= high for low, high in itertools.pairwise(ids)):
        return "merges whose order is not the order of ids"  # tiktoken merges by id
    if len(set(token_bytes(tokenizer).values()) & {bytes([byte]) for byte in range(256)}) < 256:
        return "no token for some bytes"
    return None


def ids_of_pieces_are_exact(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> bool:
    """Whether a text that is cut before a space after a printable ASCII character has the ids of its pieces, joined.

    Known of the two split expressions in use: neither continues a word from such a character into a space.
    """
    backend = backend_json(tokenizer)
    return why_not_tiktoken(tokenizer) is None and _split_pattern(backend) in (QWEN2_SPLIT, _GPT2_SPLIT)


def _split_pattern(backend: dict[str, Any]) -> str | None:
    """The one regular expression that splits text into words, or None when the split is something else."""
    steps = split_steps(backend)
    if steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2_SPLIT if steps[0].get("use_regex", True) else None
    first = steps[0]
    regex = first.get("pattern", {}).get("Regex") if first["type"] == "Split" else None
    plain = first.get("behavior") == "Isolated" and not first.get("invert") and not steps[-1].get("use_regex", True)
    return regex if plain and len(steps) == 2 else None


def _tiktoken_encoding(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> tiktoken.Encoding:
    import tiktoken

    pattern = _split_pattern(backend_json(tokenizer))
    assert pattern is not None
    ranks = {spelled: id_ for id_, spelled in token_bytes(tokenizer).items()}
    # Never allowed, so never found. Without any special token its search for them stops at every character of a text,
    # which takes longer than encoding does.
    unused = {END_OF_TEXT: max(ranks.values()) + 1}
    return tiktoken.Encoding("hf_tinylm", pat_str=pattern, mergeable_ranks=ranks, special_tokens=unused)


def _require_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"a text holds U+{ord(text[error.start]):04X} at character {error.start:,}, half a surrogate pair, which "
            f"is not valid Unicode text. Remove it from the source."
        ) from error
