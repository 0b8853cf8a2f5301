"""GPT-2's tokenizer from the two files that OpenAI published: a vocabulary and its merges, without a tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import TokenizerError
from ..files import read_json
from .special import END_OF_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# As OpenAI names them, and as transformers does.
_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def find_gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    """Vocabulary and merges in a folder that has both."""
    pairs = [(folder / vocabulary, folder / merges) for vocabulary, merges in _FILES]
    return next((pair for pair in pairs if pair[0].is_file() and pair[1].is_file()), None)


def read_gpt2_files(vocabulary: Path, merges: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE of these files with GPT-2's split; `<|endoftext|>` is its only special token.

    Raises:
        TokenizerError: a merge is not of two tokens, makes none, or the vocabulary lacks `<|endoftext|>`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids: dict[str, int] = read_json(vocabulary)
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs: list[tuple[str, str]] = []
    for line in (line for line in lines if line and not line.startswith("#version")):
        first, _, second = line.partition(" ")
        if not {first, second, first + second} <= ids.keys():
            raise TokenizerError(f"{merges} has the merge {line!r}, which makes no token of {vocabulary}.")
        pairs.append((first, second))
    if END_OF_TEXT not in ids:
        raise TokenizerError(f"{vocabulary} has no {END_OF_TEXT}, so it is not the vocabulary of a GPT-2.")
    backend = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=str(vocabulary.parent), **names)
