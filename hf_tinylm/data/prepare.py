"""Text sources to token shards: encode in parts, find copies, split, mix, write; bounded, restartable, order fixed.

Three stages, each of which keeps what it has finished in a hidden folder beside the pack:

1. every source is read in chunks, which workers encode; the documents lie in parts on disk (`staging`)
2. over all documents: copies, validation split, how much of each source, order (`ledger`, `mixture`)
3. the documents are copied in their order into shards (`shard_writer`), and the pack appears with one rename
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from .. import __version__
from ..errors import ConfigError, DataError
from ..files import fsync_tree, refuse_folder_in_use, sha256_of_json
from ..locks import FileLock
from ..sections import RunConfig, SourceSection
from ..tokenization.encoder import ids_of_pieces_are_exact, why_not_tiktoken
from ..tokenization.load import BackendTokenizer, load_backend, separator_id, tokenizer_sha256, vocabulary_size
from ..tokenization.special import END_OF_TEXT
from .chunks import Chunk, Skipped
from .encoding import Encoded, EngineMismatch
from .hub import pinned
from .ledger import VALIDATION, Ledger
from .mixture import Mixture, source_targets
from .readers import ReadBytes
from .shard_writer import ShardWriter
from .shards import SPLITS, id_dtype
from .sources import read_chunks, source_files
from .split import VALIDATION_RULE
from .staging import PipelineParts, Stage, stage_key
from .workers import Workers

if TYPE_CHECKING:
    from .mixture import Share

logger = logging.getLogger(__name__)

# Less text than this for each worker is encoded sooner than the worker has started.
BYTES_PER_WORKER = 4 * 2**20


def prepare(config: RunConfig, progress: bool = True) -> dict[str, Any]:
    """Write the pack that `config.data` describes to `data.shards`, encoded with `tokenizer.tokenizer_path`.

    The pack depends on the sources, the tokenizer, `validation_fraction`, `shard_ids` and, where documents are
    shuffled, `shuffle_seed`; the number of workers changes nothing. The folder appears whole or not at all; a run that
    was stopped is taken up by the next one with the same sources.

    Returns:
        The manifest.

    Raises:
        ConfigError: a path is not given, or the output folder is in use.
        ContractError: another process is writing this pack.
        DataError: a source cannot be read, holds no text or less than is asked, or one of the splits would be empty.
        PreparationError: a worker process died or hung.
        TokenizerError: the tokenizer cannot be loaded.
    """
    shards, tokenizer_path = config.data.shards, config.tokenizer.tokenizer_path
    if shards is None:
        raise ConfigError("data.shards is missing. Give the folder to write: --shards DIR.")
    if tokenizer_path is None:
        raise ConfigError("tokenizer_path is missing. Give the folder of the tokenizer: --tokenizer_path DIR.")
    if not config.data.sources:
        raise ConfigError("data.sources is empty. List at least one source, such as {name: books, path: books.txt}.")
    target = Path(os.path.realpath(shards))
    refuse_folder_in_use(target)
    tokenizer = load_backend(tokenizer_path)
    reason = why_not_tiktoken(tokenizer)
    if reason is not None:
        logger.warning("Encoding with tokenizers (slower than tiktoken): the tokenizer has %s.", reason)
    engine = "tokenizers" if reason else "tiktoken"
    with _work_folder(target) as work:
        try:
            return _Preparation(config, tokenizer, engine, work, progress).run(target)
        except EngineMismatch as mismatch:
            logger.warning("%s Starting again with tokenizers, which is slower.", mismatch)
        return _Preparation(config, tokenizer, "tokenizers", work, progress).run(target)


@contextmanager
def _work_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside the pack for what is finished, ours alone; it goes with the pack written, or when empty.

    Raises:
        ContractError: another process is writing this pack.
    """
    work = target.with_name(f".prepare-{target.name}")
    lock = FileLock(work.with_name(f"{work.name}.lock"), target, "another folder: --shards DIR")
    lock.acquire()
    try:
        refuse_folder_in_use(target)  # what had the lock before may have written it
        work.mkdir(exist_ok=True)
        yield work
        shutil.rmtree(work)
    finally:
        if work.exists() and not any(path.stat().st_size for path in work.rglob("*") if path.is_file()):
            shutil.rmtree(work)
        lock.release()


class _Preparation:
    """One attempt to write a pack with one engine."""

    def __init__(self, config: RunConfig, tokenizer: BackendTokenizer, engine: str, work: Path, progress: bool) -> None:
        self.config, self.data = config, config.data
        self.sources = [source if source_files(source) else pinned(source) for source in config.data.sources]
        self.tokenizer, self.engine, self.work = tokenizer, engine, work
        self.separator_id = separator_id(tokenizer)
        self.tokenizer_sha256 = tokenizer_sha256(tokenizer)
        self.vocab_size = vocabulary_size(tokenizer)
        self.dtype = id_dtype(self.vocab_size)
        self.cut_large = ids_of_pieces_are_exact(tokenizer)
        self.shuffle = _shuffles(config)
        self._check_declared()
        if self.data.near_duplicates is not None:
            from . import near_duplicates  # noqa: F401  a missing extra is told before anything is encoded
        self.keys = [stage_key(source, self.tokenizer_sha256, engine) for source in self.sources]
        self.sizes = [_bytes_to_read(source) for source in self.sources]
        self.bar = tqdm(desc="prepare", unit=" tokens", unit_scale=True, disable=not progress)

    def run(self, target: Path) -> dict[str, Any]:
        """Encode, decide, write; the manifest."""
        with self.bar:
            stages = self._encode()
        ledger = Ledger([stage.parts for stage in stages], self.data.validation_fraction, any_order=self.shuffle)
        self._drop_near_duplicates(ledger, stages)
        folder = self.work / f"pack-{self._pack_key()}"
        targets = source_targets(self.data, ledger)
        _require_room(target, folder, sum(targets), self.dtype.itemsize)  # before passes over the sources are counted
        mixture = Mixture(ledger, self.data, targets, self.shuffle)
        folder.mkdir(exist_ok=True)
        names = [source.name for source in self.sources]
        writer = ShardWriter(folder, self.vocab_size, self.separator_id, self.data.shard_ids, names)
        self._write(writer, ledger, mixture)
        _require_both_splits(writer, self.data.validation_fraction, int(ledger.duplicates.sum()))
        manifest = writer.finish(self._facts(stages, ledger, mixture))
        fsync_tree(folder)
        refuse_folder_in_use(target)
        os.rename(folder, target)
        return manifest

    def _check_declared(self) -> None:
        """Token files must come from the tokenizer of this pack: ids of another one are other texts."""
        for source in self.sources:
            if source.encoded_with is None:
                continue
            found = tokenizer_sha256(load_backend(source.encoded_with))
            if found != self.tokenizer_sha256:
                raise DataError(
                    f"source {source.name} was encoded with {source.encoded_with} ({found[:12]}...), the pack is "
                    f"encoded with {self.tokenizer.name_or_path} ({self.tokenizer_sha256[:12]}...). Use that tokenizer "
                    f"for the pack, or give the text of the source."
                )

    # ---- first stage

    def _encode(self) -> list[Stage | PipelineParts]:
        stages = [
            PipelineParts(source, self.tokenizer_sha256, self.dtype)
            if source.format == "parts"
            else Stage(self.work / f"source-{number}-{key}", self.dtype, source)
            for number, (source, key) in enumerate(zip(self.sources, self.keys, strict=True))
        ]
        kept = sum(stage.ids for stage in stages if isinstance(stage, Stage))
        if kept:
            logger.info("Going on after %s ids of an earlier run.", f"{kept:,}")
        self.bar.update(kept)
        processes = 0 if all(stage.done for stage in stages) else self._processes()
        with ExitStack() as stack:
            for stage in stages:
                stack.callback(stage.abandon)
            workers = stack.enter_context(
                Workers(self.sources, self.tokenizer, self.engine, self.separator_id, processes)
            )
            for number, stage in enumerate(stages):
                if isinstance(stage, Stage) and not stage.done:
                    self._encode_source(workers, number, stage)
        return stages

    def _encode_source(self, workers: Workers, number: int, stage: Stage) -> None:
        """Encode what of a source is not yet in parts; results are taken in the order of reading."""
        pending: deque[tuple[Chunk, Future[Encoded]]] = deque()
        limit = self.sources[number].max_documents
        read, earlier = ReadBytes(), stage.chunks
        for index, chunk in enumerate(read_chunks(self.sources[number], read, self.cut_large)):
            if index < earlier:
                continue
            if limit is not None and stage.documents >= limit:
                break
            pending.append((chunk, workers.submit(chunk, number, first=index == 0)))
            if len(pending) > 2 * max(workers.processes, 1):
                self._take(workers, number, stage, *pending.popleft())
        while pending and not (limit is not None and stage.documents >= limit):
            self._take(workers, number, stage, *pending.popleft())
        if not stage.documents:
            raise DataError(_no_text(self.sources[number], stage.skipped))
        stage.close_part(done=True)

    def _take(self, workers: Workers, number: int, stage: Stage, chunk: Chunk, future: Future[Encoded]) -> None:
        encoded, limit = future.result(), self.sources[number].max_documents
        if limit is not None and stage.documents + len(encoded.rows) > limit:
            encoded = workers.encode_here(chunk, number, stage.chunks == 0, limit - stage.documents)
        stage.add(chunk, encoded)
        self._show(number, chunk, len(encoded.ids) + len(encoded.rows))

    def _show(self, number: int, chunk: Chunk, ids: int) -> None:
        """Tokens so far; the total, from which the time left follows, as the part of the bytes read suggests."""
        sizes = [size for size in self.sizes if size is not None]
        done, total = sum(sizes[:number]) + chunk.read, sum(sizes)
        if done and len(sizes) == len(self.sizes):
            self.bar.total = int((self.bar.n + ids) * total / min(done, total))
        self.bar.update(ids)

    def _processes(self) -> int:
        """Worker processes: none when one is asked for or the text is small, then this process encodes."""
        wanted = self._cores()
        sizes = [size for size in self.sizes if size is not None]
        if len(sizes) == len(self.sizes):
            wanted = min(wanted, -(-sum(sizes) // BYTES_PER_WORKER))
        return wanted if wanted > 1 else 0

    def _cores(self) -> int:
        """Processes that may work at once."""
        return self.data.num_workers or len(os.sched_getaffinity(0) if sys.platform == "linux" else [0] * 2)

    # ---- second stage

    def _drop_near_duplicates(self, ledger: Ledger, stages: list[Stage | PipelineParts]) -> None:
        if self.data.near_duplicates is None:
            return
        from .near_duplicates import find_near_duplicates

        logger.info("Looking for near duplicates among %s documents.", f"{ledger.documents:,}")
        numbers = find_near_duplicates(
            ledger, self.tokenizer, self.dtype, self.work / "near-duplicates", self._cores(), self.shuffle
        )
        for stage, count in zip(stages, ledger.drop(numbers).tolist(), strict=True):
            if count:
                stage.skipped.counts["near_duplicate"] += count

    # ---- third stage

    def _write(self, writer: ShardWriter, ledger: Ledger, mixture: Mixture) -> None:
        with ExitStack() as stack:
            files = [
                stack.enter_context(open(part.path.with_suffix(".ids"), "rb", buffering=0)) for part in ledger.parts
            ]
            names = [self.sources[source].name for source in ledger.source_of_part]
            for entries in mixture.entries():
                arrays = (entries.parts, entries.starts, entries.lengths, entries.splits)
                for part, start, length, split in zip(*(array.tolist() for array in arrays), strict=True):
                    file = files[part]

                    def read(file: Any = file, start: int = start, count: int = length - 1) -> np.ndarray:
                        width = self.dtype.itemsize
                        return np.frombuffer(os.pread(file.fileno(), count * width, start * width), self.dtype)

                    writer.add_read(SPLITS[split == VALIDATION], names[part], length - 1, read)

    def _pack_key(self) -> str:
        """A name for all that decides the bytes of the shards, given what the sources hold."""
        facts = {"sources": self.keys, "data": self.config.to_dict()["data"], "version": __version__}
        facts["data"] = {**facts["data"], "num_workers": None, "shards": None}
        return sha256_of_json(facts)[:16]

    def _facts(self, stages: list[Stage | PipelineParts], ledger: Ledger, mixture: Mixture) -> dict[str, Any]:
        """What the manifest says besides counts of the shards."""
        skipped = Skipped()
        for stage in stages:
            skipped.merge(stage.skipped)
        return {
            "tokenizer_sha256": self.tokenizer_sha256,
            "separator": {"token": END_OF_TEXT, "id": self.separator_id, "policy": "first id of each document"},
            "duplicates": int(ledger.duplicates.sum()),
            "near_duplicates": self.data.near_duplicates,
            "dropped": dict(sorted(skipped.counts.items())),
            "dropped_first": dict(sorted(skipped.first.items())),
            "not_utf8": skipped.not_utf8(),
            "validation": {"fraction": self.data.validation_fraction, "rule": VALIDATION_RULE},
            "encoder": self.engine,
            "order": "shuffled by document" if self.shuffle else "as read",
            "seed": self.data.shuffle_seed if self.shuffle else None,
            "versions": _versions(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "sources": {
                source.name: _source_facts(source, stage, int(ledger.bytes[number]), mixture.shares[number])
                | {"duplicates": int(ledger.duplicates[number])}
                for number, (source, stage) in enumerate(zip(self.sources, stages, strict=True))
            },
        }


def _bytes_to_read(source: SourceSection) -> int | None:
    """Bytes of the files of a source, none when it is encoded already; None: a dataset by name does not say."""
    if source.format == "parts":
        return 0
    files = source_files(source)
    return sum(path.stat().st_size for path, _ in files) if files else None


def _source_facts(
    source: SourceSection, stage: Stage | PipelineParts, different_bytes: int, share: Share
) -> dict[str, Any]:
    """A source in the manifest: `bytes` and `available_ids` are those of its different documents, each once."""
    return {
        "licence": source.licence,
        **({"revision": source.revision} if source.revision else {}),
        "bytes": different_bytes,
        "available_ids": share.available,
        "repeated": round(share.target / share.available, 4) if share.available else 0.0,
        "utf8": source.utf8,
        "dropped": dict(sorted(stage.skipped.counts.items())),
        "not_utf8": stage.skipped.not_utf8(),
    }


def _shuffles(config: RunConfig) -> bool:
    if config.data.shuffle is not None:
        return config.data.shuffle
    budgets = any(source.tokens or source.epochs or source.weight for source in config.data.sources)
    return budgets or len(config.data.sources) > 1


def _no_text(source: SourceSection, skipped: Skipped) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.counts.items()))
    return (
        f"source {source.name} ({source.path}) holds no text; skipped records: {reasons or 'none'}. Correct its path, "
        f"text_column ({source.text_column}) or filters, or remove it."
    )


def _require_room(target: Path, folder: Path, ids: int, id_bytes: int) -> None:
    """Refuse a pack that its disk cannot hold, such as one with a zero too many in `tokens`.

    Args:
        folder: where it is written; what a run that was stopped left there need not be written again.

    Raises:
        DataError: with both numbers.
    """
    written = sum(path.stat().st_size for path in folder.rglob("*.arrow")) if folder.is_dir() else 0
    needed, free = ids * id_bytes - written, shutil.disk_usage(target.parent).free
    if needed > free:
        raise DataError(
            f"the pack of {ids:,} ids needs {needed:,} bytes more and the volume of {target} has "
            f"{free:,} free. Lower tokens, epochs or pack_tokens, make room, or give another disk: "
            "--shards DIR."
        )


def _require_both_splits(writer: ShardWriter, fraction: float, copies: int) -> None:
    train, validation = (writer.documents(split) for split in SPLITS)
    if train and validation:
        return
    empty = "validation" if train else "training"
    raise DataError(
        f"the {empty} split is empty: {train + validation:,} different documents with validation_fraction={fraction} "
        f"gave {train:,} for training and {validation:,} for validation; {copies:,} copies were dropped. "
        + ("Raise" if train else "Lower")
        + " validation_fraction, cut long texts into documents (splitter: paragraphs_4096), or add text."
    )


def _versions() -> dict[str, str]:
    """Versions of what decides the bytes of a pack."""
    packages = ("datasets", "numpy", "pyarrow", "tiktoken", "tokenizers", "transformers")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"hf_tinylm": __version__, "python": platform.python_version(), **found}
