"""Text sources to token shards: stream, drop copies, split, encode, write; memory bounded, order fixed."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from .. import __version__
from ..config import RunConfig
from ..errors import ConfigError, DataError, TokenizerError
from ..files import atomic_folder, refuse_folder_in_use
from ..tokenization.encoder import FastEncoder
from ..tokenization.load import load_tokenizer, tokenizer_sha256, vocabulary_size
from ..tokenization.special import END_OF_TEXT
from .chunks import Skipped
from .shard_writer import ShardWriter
from .shards import SPLITS
from .sources import read_documents
from .split import VALIDATION_RULE, content_digest, is_validation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

BATCH_BYTES = 2**20
BATCH_DOCUMENTS = 1024
# 128 bits of the digest: two different documents of a trillion share one with a probability of about 1e-15.
DIGEST_BYTES = 16
# Documents encoded a second time by `tokenizers` and compared: the first ones, and then one in so many.
SAMPLE_FIRST, SAMPLE_EVERY = 32, 128


class EngineMismatch(Exception):
    """The fast engine gave other ids than `tokenizers` on a document of the sample."""


@dataclass
class _Batch:
    """Consecutive documents on their way to the encoder; `bytes` of UTF-8."""

    texts: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    bytes: int = 0

    @property
    def full(self) -> bool:
        return len(self.texts) >= BATCH_DOCUMENTS or self.bytes >= BATCH_BYTES


@dataclass
class _Account:
    """What became of every record that was read."""

    skipped: Skipped = field(default_factory=Skipped)
    seen: set[bytes] = field(default_factory=set)
    duplicates: int = 0
    bytes_of: Counter[str] = field(default_factory=Counter)


def prepare(config: RunConfig, progress: bool = True) -> dict[str, Any]:
    """Write the pack that `config.data` describes to `data.shards`, encoded with `tokenizer.tokenizer_path`.

    The pack depends on the sources, in their order, the tokenizer, `validation_fraction` and `shard_ids`; the number
    of threads and the seed change nothing. The folder appears whole or not at all.

    Returns:
        The manifest.

    Raises:
        ConfigError: a path is not given, or the output folder is in use.
        DataError: a source cannot be read or holds no text, or one of the splits would be empty.
        TokenizerError: the tokenizer cannot be loaded.
    """
    shards, tokenizer_path = config.data.shards, config.tokenizer.tokenizer_path
    if shards is None:
        raise ConfigError("data.shards is missing. Give the folder to write: --shards DIR.")
    if tokenizer_path is None:
        raise ConfigError("tokenizer_path is missing. Give the folder of the tokenizer: --tokenizer_path DIR.")
    if not config.data.sources:
        raise ConfigError("data.sources is empty. List at least one source, such as {name: books, path: books.txt}.")
    refuse_folder_in_use(Path(shards))
    tokenizer = load_tokenizer(tokenizer_path)
    try:
        with atomic_folder(shards) as folder:
            return _write_pack(config, tokenizer, FastEncoder(tokenizer), folder, progress)
    except EngineMismatch as mismatch:
        logger.warning("%s Starting again with tokenizers, which is slower.", mismatch)
    with atomic_folder(shards) as folder:
        return _write_pack(config, tokenizer, FastEncoder(tokenizer, "tokenizers"), folder, progress)


def _write_pack(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, encoder: FastEncoder, folder: Path, progress: bool
) -> dict[str, Any]:
    separator_id = _separator_id(tokenizer)
    names = [source.name for source in config.data.sources]
    writer = ShardWriter(folder, vocabulary_size(tokenizer), separator_id, config.data.shard_ids, names)
    account = _Account()
    workers = config.data.num_workers or os.cpu_count() or 1
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(desc="prepare", unit=" tokens", unit_scale=True, disable=not progress) as bar,
    ):
        pending: deque[tuple[_Batch, Future[list[np.ndarray]]]] = deque()
        # Two batches per thread keep the threads busy; results are taken in the order of reading, so the number of
        # threads cannot change a shard.
        for batch in _batches(config, account):
            pending.append((batch, pool.submit(encoder.encode_batch, batch.texts)))
            if len(pending) > 2 * workers:
                _write_batch(writer, encoder, *pending.popleft(), bar)
        while pending:
            _write_batch(writer, encoder, *pending.popleft(), bar)
    _require_both_splits(writer, config.data.validation_fraction)
    return writer.finish(
        {
            "tokenizer_sha256": tokenizer_sha256(tokenizer),
            "separator": {"token": END_OF_TEXT, "id": separator_id, "policy": "first id of each document"},
            "duplicates": account.duplicates,
            "dropped": dict(sorted(account.skipped.counts.items())),
            "dropped_first": dict(sorted(account.skipped.first.items())),
            "not_utf8": account.skipped.not_utf8(),
            "validation": {"fraction": config.data.validation_fraction, "rule": VALIDATION_RULE},
            "encoder": encoder.engine,
            "seed": None,  # nothing in this pack is drawn at random
            "versions": _versions(),
            "sources": {
                source.name: {"licence": source.licence, "bytes": account.bytes_of[source.name]}
                for source in config.data.sources
            },
        }
    )


def _batches(config: RunConfig, account: _Account) -> Iterator[_Batch]:
    """All documents that are kept, in order, with the split of each; copies and records without text are counted."""
    batch = _Batch()
    for source in config.data.sources:
        read = 0
        for document in read_documents(source, account.skipped):
            read += 1
            digest = content_digest(document.text)
            key = digest[:DIGEST_BYTES]
            if key in account.seen:
                account.duplicates += 1
                continue
            account.seen.add(key)
            size = len(document.text.encode("utf-8"))
            account.bytes_of[source.name] += size
            batch.texts.append(document.text)
            batch.splits.append("validation" if is_validation(digest, config.data.validation_fraction) else "train")
            batch.sources.append(source.name)
            batch.places.append(document.place)
            batch.bytes += size
            if batch.full:
                yield batch
                batch = _Batch()
        if not read:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(account.skipped.counts.items()))
            raise DataError(
                f"source {source.name} ({source.path}) holds no text; skipped records so far: {reasons or 'none'}. "
                f"Correct its path or text_column ({source.text_column}), or remove it."
            )
    if batch.texts:
        yield batch


def _write_batch(
    writer: ShardWriter, encoder: FastEncoder, batch: _Batch, encoding: Future[list[np.ndarray]], bar: tqdm[Any]
) -> None:
    """Append a batch in order, encoding a sample of it a second time to check the fast engine."""
    encoded = encoding.result()
    for text, ids, split, source, place in zip(
        batch.texts, encoded, batch.splits, batch.sources, batch.places, strict=True
    ):
        number = sum(writer.documents(name) for name in SPLITS)
        sampled = number < SAMPLE_FIRST or number % SAMPLE_EVERY == 0
        if sampled and encoder.engine != "tokenizers" and encoder.differs(text, ids):
            raise EngineMismatch(f"{encoder.engine} gives other ids than tokenizers on {place}.")
        writer.add(split, source, ids)
    bar.update(sum(len(ids) + 1 for ids in encoded))


def _require_both_splits(writer: ShardWriter, fraction: float) -> None:
    train, validation = (writer.documents(split) for split in SPLITS)
    if train and validation:
        return
    empty = "validation" if train else "training"
    raise DataError(
        f"the {empty} split is empty: {train + validation:,} different documents with validation_fraction={fraction} "
        f"gave {train:,} for training and {validation:,} for validation. "
        + ("Raise" if train else "Lower")
        + " validation_fraction, cut long texts into documents (splitter: paragraphs_4096), or add text."
    )


def _separator_id(tokenizer: PreTrainedTokenizerFast) -> int:
    id_ = tokenizer.get_vocab().get(END_OF_TEXT)
    if id_ is None:
        raise TokenizerError(
            f"the tokenizer {tokenizer.name_or_path} has no {END_OF_TEXT} token to separate documents. "
            f"Train one that has: hf-tinylm tokenizer train."
        )
    return int(id_)


def _versions() -> dict[str, str]:
    """Versions of what decides the bytes of a pack."""
    packages = ("datasets", "numpy", "pyarrow", "tiktoken", "tokenizers", "transformers")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"hf_tinylm": __version__, "python": platform.python_version(), **found}
