"""Train a tokenizer on the training documents of a configuration, never on its validation text; and audit one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..files import refuse_folder_in_use
from ..sections import RunConfig, SourceSection
from ..tokenization.audit import audit_tokenizer
from ..tokenization.load import load_tokenizer, save_tokenizer, tokenizer_sha256
from ..tokenization.train import train_tokenizer
from .chunks import Skipped
from .records import Document
from .sources import read_documents
from .split import content_digest, is_validation


def train_from_config(config: RunConfig, progress: bool = True) -> dict[str, Any]:
    """Train the tokenizer that `config` describes and write it to `tokenizer.tokenizer_path`.

    Returns:
        The report of `train_tokenizer` with `tokenizer_path`, `tokenizer_sha256`, `sources` {name: bytes read} and
        `dropped` {reason: count}.

    Raises:
        ConfigError: a path is not given, or the output folder is in use.
        DataError: a source cannot be read, or there is no text.
        TokenizerError: the text does not hold `vocab_size` tokens.
    """
    section = config.tokenizer
    if section.tokenizer_path is None:
        raise ConfigError("tokenizer_path is missing. Give the folder to write: --tokenizer_path DIR.")
    if not config.data.sources:
        raise ConfigError("data.sources is empty. List at least one source, such as {name: books, path: books.txt}.")
    refuse_folder_in_use(Path(section.tokenizer_path))
    skipped, read = Skipped(), Counter[str]()
    tokenizer, report = train_tokenizer(
        training_texts(config, skipped, read),
        section.vocab_size,
        sample_bytes=section.sample_bytes,
        max_word_bytes=section.max_word_bytes,
        min_frequency=section.min_frequency,
        progress=progress,
    )
    save_tokenizer(tokenizer, section.tokenizer_path)
    return {
        **report,
        "tokenizer_path": section.tokenizer_path,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "sources": dict(read),
        "dropped": dict(sorted(skipped.counts.items())),
    }


def audit_from_config(
    config: RunConfig, compare: Sequence[str] = (), bytes_per_source: int = 10_000_000
) -> dict[str, Any]:
    """Audit `tokenizer.tokenizer_path` on the first `bytes_per_source` bytes of each source, training and validation.

    Returns:
        What `tokenization.audit.audit_tokenizer` returns.

    Raises:
        ConfigError: the path is not given.
        DataError: a source cannot be read.
        TokenizerError: a tokenizer cannot be loaded, or there is no text.
    """
    if config.tokenizer.tokenizer_path is None:
        raise ConfigError("tokenizer_path is missing. Give the folder of the tokenizer: --tokenizer_path DIR.")
    texts = {source.name: _first_texts(source, bytes_per_source) for source in config.data.sources}
    return audit_tokenizer(load_tokenizer(config.tokenizer.tokenizer_path), texts, compare)


def training_texts(config: RunConfig, skipped: Skipped, read: Counter[str]) -> Iterator[str]:
    """Training documents of all sources, counting into `read` the bytes of UTF-8 taken from each.

    The next text comes from the source that has given the fewest bytes so far, so a cap on the sample leaves no
    source out.

    Raises:
        DataError: there is no training text at all.
    """
    open_sources = {source.name: _training_documents(source, config, skipped) for source in config.data.sources}
    read.update(dict.fromkeys(open_sources, 0))
    while open_sources:
        name = min(open_sources, key=lambda candidate: read[candidate])
        document = next(open_sources[name], None)
        if document is None:
            del open_sources[name]
            continue
        read[name] += len(document.text.encode("utf-8"))
        yield document.text
    if not read.total():
        raise DataError(
            f"the sources {', '.join(read)} hold no training text. Correct their paths, or lower validation_fraction="
            f"{config.data.validation_fraction}."
        )


def _first_texts(source: SourceSection, max_bytes: int) -> Iterator[str]:
    read = 0
    for document in read_documents(source, Skipped()):
        if read >= max_bytes:
            return
        read += len(document.text.encode("utf-8"))
        yield document.text


def _training_documents(source: SourceSection, config: RunConfig, skipped: Skipped) -> Iterator[Document]:
    for document in read_documents(source, skipped):
        if not is_validation(content_digest(document.text), config.data.validation_fraction):
            yield document
