"""Load, save and identify tokenizers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract import RUN_FILE
from ..errors import ConfigError, TokenizerError
from ..files import atomic_folder, read_json, read_record, sha256_of_json, write_json
from .gpt2_files import find_gpt2_files, read_gpt2_files
from .special import END_OF_TEXT, byte_of_character

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class BackendTokenizer:
    """A tokenizer of the `tokenizers` library with the few names of transformers' class that encoding needs.

    It spares a process that only encodes the seconds and the memory of importing transformers.
    """

    backend_tokenizer: Tokenizer
    name_or_path: str

    def get_vocab(self) -> dict[str, int]:
        """Every token, special ones included, with its id."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))


def load_backend(path: str | Path) -> BackendTokenizer:
    """The tokenizer in a local folder, or of a model on the Hub, without transformers where that is not needed.

    Raises:
        TokenizerError: there is none, or it is not one of the `tokenizers` library.
    """
    file, config = Path(path) / "tokenizer.json", Path(path) / "tokenizer_config.json"
    # Other classes may add tokens or steps that only transformers knows of.
    facts = read_json(config) if file.is_file() and config.is_file() else None
    if isinstance(facts, dict) and facts.get("tokenizer_class") == "PreTrainedTokenizerFast":
        return parse_backend(file.read_text(encoding="utf-8"), str(path))
    return BackendTokenizer(load_tokenizer(path).backend_tokenizer, str(path))


def parse_backend(text: str, name: str) -> BackendTokenizer:
    """A tokenizer from the text of its tokenizer.json.

    Raises:
        TokenizerError: it is damaged.
    """
    from tokenizers import Tokenizer

    try:
        return BackendTokenizer(Tokenizer.from_str(text), name)
    except Exception as error:  # the library raises no narrower class
        raise TokenizerError(f"the tokenizer in {name} could not be loaded: {error}") from error


def find_tokenizer(source: Path) -> str:
    """The tokenizer of a model folder: its own, or the one that the run of a checkpoint names.

    Raises:
        ConfigError: neither exists.
    """
    if (source / "tokenizer.json").is_file():
        return str(source)
    run = source.parent / RUN_FILE
    if run.is_file():
        config = read_record(run).get("config") or {}
        path = (config.get("tokenizer") or {}).get("tokenizer_path")
        if path:
            return str(path)
    raise ConfigError(
        f"{source} has no tokenizer.json and no run.json beside it names one. Give it: --tokenizer DIR (in a recipe: "
        "--tokenizer_path DIR)."
    )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a local folder, which may hold GPT-2's two files alone, or of a model on the Hub.

    Raises:
        TokenizerError: there is none, or it is not one of the `tokenizers` library.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        files = find_gpt2_files(folder)
        if files is not None:
            return read_gpt2_files(*files)
        raise TokenizerError(f"{folder} holds no tokenizer.json. Train a tokenizer: hf-tinylm tokenizer train.")
    if not folder.is_dir() and (folder.is_absolute() or len(folder.parts) > 2 or str(path).startswith(".")):
        raise TokenizerError(f"the tokenizer folder {folder} does not exist. Train one: hf-tinylm tokenizer train.")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # a damaged file ends in whatever reads it first: TypeError, AttributeError, Exception
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(
            f"no tokenizer could be loaded from {path}: it is not a local folder, and the Hub gave: {reason} "
            f"Give a folder with tokenizer.json, or train one: hf-tinylm tokenizer train."
            if not folder.is_dir()
            else f"the tokenizer in {path} could not be loaded: {reason}"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TokenizerError(
            f"the tokenizer {path} ({type(tokenizer).__name__}) has no tokenizer.json; one of the tokenizers library "
            f"is needed."
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path, replace: bool = False) -> None:
    """Write a tokenizer to a new folder, which appears whole or not at all.

    Raises:
        ConfigError: the folder is in use and `replace` is false.
    """
    with atomic_folder(folder, replace=replace) as temporary:
        write_tokenizer_files(tokenizer, temporary)


def write_tokenizer_files(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write a tokenizer's files into an existing folder, such as that of a model being exported.

    The class is written as `PreTrainedTokenizerFast`: transformers 5 itself writes "TokenizersBackend", which
    transformers 4, MLX and older converters cannot open.
    """
    tokenizer.save_pretrained(str(folder))
    config_path = Path(folder) / "tokenizer_config.json"
    config = read_json(config_path)
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(config_path, config)


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> str:
    """Hexadecimal SHA-256 of all that decides ids: vocabulary, merges, split and special tokens.

    Files that spell the same tokenizer differently (older merge format, other defaults written out) hash the same.
    """
    backend = backend_json(tokenizer)
    model = backend["model"]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model.get("merges", [])]
    options = {key: value for key, value in model.items() if key not in ("vocab", "merges") and value}
    specials = [[token["id"], token["content"], token["special"]] for token in backend["added_tokens"]]
    return sha256_of_json(
        {
            "vocabulary": model["vocab"],
            "merges": merges,
            "model": options,
            "split": {"normalizer": backend.get("normalizer"), "steps": split_steps(backend)},
            "specials": sorted(specials),
        }
    )


def backend_json(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> dict[str, Any]:
    """The content of the tokenizer's tokenizer.json."""
    return dict(json.loads(tokenizer.backend_tokenizer.to_str()))


def split_steps(backend: dict[str, Any]) -> list[dict[str, Any]]:
    """Pre-tokenizer steps of a tokenizer.json, without keys that do not change ids (offsets)."""
    step = backend.get("pre_tokenizer")
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step] if step else []
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]


def is_byte_level(backend: dict[str, Any]) -> bool:
    """Whether the tokens of a tokenizer.json are spelled in the 256 characters that stand for bytes."""
    byte_level = any(step["type"] == "ByteLevel" for step in split_steps(backend))
    return backend["model"]["type"] == "BPE" and byte_level and not backend["model"].get("byte_fallback")


def special_ids(backend: dict[str, Any]) -> set[int]:
    """Ids of the tokens marked special in a tokenizer.json."""
    return {token["id"] for token in backend["added_tokens"] if token["special"]}


def vocabulary_size(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> int:
    """Rows that an embedding needs: the highest id and one. `len(tokenizer)` is less when ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def separator_id(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> int:
    """Id of the token that separates documents.

    Raises:
        TokenizerError: the tokenizer has none.
    """
    id_ = tokenizer.get_vocab().get(END_OF_TEXT)
    if id_ is None:
        raise TokenizerError(
            f"the tokenizer {tokenizer.name_or_path} has no {END_OF_TEXT} token to separate documents. "
            f"Train one that has: hf-tinylm tokenizer train."
        )
    return int(id_)


def token_bytes(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> dict[int, bytes]:
    """Bytes that each ordinary token stands for, by id; special tokens are not in it.

    Raises:
        TokenizerError: the tokenizer is not byte-level, so its tokens are not byte strings.
    """
    backend = backend_json(tokenizer)
    if not is_byte_level(backend):
        raise TokenizerError(
            f"the tokenizer {tokenizer.name_or_path or ''} is not a byte-level BPE, so the bytes of its tokens are "
            f"unknown. Use a byte-level tokenizer, such as one from hf-tinylm tokenizer train."
        )
    byte_of, special = byte_of_character(), special_ids(backend)
    added = {token["id"]: token["content"] for token in backend["added_tokens"]}
    spelled: dict[int, bytes] = {}
    for token, id_ in tokenizer.get_vocab().items():
        if id_ in special:
            continue
        spelled[id_] = token.encode() if id_ in added else bytes(byte_of[character] for character in token)
    return spelled


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> np.ndarray:
    """Bytes of UTF-8 text that each token stands for, int64 (vocab,); special tokens have none.

    Raises:
        TokenizerError: the tokenizer is not byte-level.
    """
    lengths = np.zeros(vocabulary_size(tokenizer), dtype=np.int64)
    for id_, spelled in token_bytes(tokenizer).items():
        lengths[id_] = len(spelled)
    return lengths
