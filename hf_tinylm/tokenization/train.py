"""Train a byte-level BPE tokenizer whose ids llama.cpp reproduces exactly, in bounded memory and time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from .special import END_OF_TEXT, PAD, QWEN2_SPLIT, SMALLEST_VOCAB_SIZE, SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@dataclass
class _Sample:
    """What the trainer has read: counts of the sample, in bytes of UTF-8 and in words (pieces of the split)."""

    documents: int = 0
    bytes: int = 0
    capped: bool = False
    words_cut: int = 0


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    sample_bytes: int = 1_000_000_000,
    max_word_bytes: int = 64,
    min_frequency: int = 2,
    progress: bool = False,
) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    """Learn `vocab_size` tokens (4 special, 256 bytes, the rest merges) from `texts`, the same ones every time.

    Args:
        texts: documents; reading stops after `sample_bytes` bytes of UTF-8.
        vocab_size: tokens wanted, exactly.
        sample_bytes: most text that merges are counted on, bytes.
        max_word_bytes: longer words are cut into pieces of this size for training only, and counted in the report.
        min_frequency: a pair must occur this often to become a token.
        progress: show the trainer's progress bars.

    Returns:
        The tokenizer, and a report: `vocab_size documents bytes capped words_cut`.

    Raises:
        TokenizerError: `vocab_size` is below 260, or the text does not hold that many tokens.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise TokenizerError(
            f"vocab_size={vocab_size} is too small; {SMALLEST_VOCAB_SIZE} is the least possible "
            f"({len(SPECIAL_TOKENS)} special tokens and 256 bytes). Raise vocab_size."
        )
    from tokenizers import pre_tokenizers, trainers

    backend = byte_level_backend(cut_words_at=max_word_bytes)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    sample = _Sample()
    backend.train_from_iterator(_read_sample(texts, sample, sample_bytes, max_word_bytes), trainer)
    learned = backend.get_vocab_size()
    if learned != vocab_size:
        raise TokenizerError(
            f"vocab_size={vocab_size:,} was asked, but {sample.bytes:,} bytes of text hold only {learned:,} tokens "
            f"that occur at least {min_frequency} times. Use --vocab_size {learned}, or add text."
        )
    backend.pre_tokenizer = byte_level_backend().pre_tokenizer
    return wrap_backend(backend), {"vocab_size": learned, **asdict(sample)}


def byte_level_backend(cut_words_at: int | None = None) -> Tokenizer:
    """An empty BPE with the qwen2 split over bytes, no normalizer and no prefix space.

    `cut_words_at` cuts words into pieces of that many bytes; only for training, where one word of a megabyte would
    cost more than all others together.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    steps = [
        pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    if cut_words_at is not None:
        # After ByteLevel each character is one byte, and none is a line break.
        steps.append(pre_tokenizers.Split(Regex(f".{{{cut_words_at}}}"), "isolated"))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def wrap_backend(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """The backend as transformers uses it: end-of-text ends a text, padding has its own token, nothing is prepended."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _read_sample(texts: Iterable[str], sample: _Sample, sample_bytes: int, max_word_bytes: int) -> Iterator[str]:
    """Pass on `texts` until the cap, the last one cut to fit, counting into `sample`."""
    splitter = byte_level_backend().pre_tokenizer
    # A word of more than max_word_bytes has a run of at least this many characters (4 bytes at most, and one may be
    # the space before a word), so most texts need no second split only to be counted.
    run = max(max_word_bytes // 4 - 1, 1)
    long_run = re.compile(rf"\S{{{run}}}|\s{{{run}}}")
    long_ascii_run = re.compile(rf"\S{{{max_word_bytes}}}|\s{{{max_word_bytes}}}")
    for text in texts:
        room = sample_bytes - sample.bytes
        encoded = text.encode("utf-8")
        if len(encoded) > room:
            sample.capped = True
            encoded = encoded[:room]
            text = encoded.decode("utf-8", "ignore")  # drops at most the character that the cut runs through
        if not text and sample.capped:
            return
        if not text:  # an empty document is no end of the corpus
            continue
        sample.documents += 1
        sample.bytes += len(encoded)
        if (long_ascii_run if text.isascii() else long_run).search(text):
            sample.words_cut += sum(len(word) > max_word_bytes for word, _ in splitter.pre_tokenize_str(text))
        yield text
        if sample.capped:
            return
