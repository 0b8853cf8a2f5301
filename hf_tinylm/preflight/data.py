"""Checks of the data: what the model will read is the text, one token ahead, and no validation is in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..data.permutation import hash_counters, key_of
from ..data.shards import Shard
from ..modeling.loss import IGNORE_INDEX
from ..tokenization.audit import round_trip_failures
from ..tokenization.load import backend_json, is_byte_level, special_ids
from .checks import Finding, rule
from .subject import Subject

BATCHES = 8  # micro-batches that are looked at
DOCUMENTS = 16  # documents that are encoded again
PAIRS = 8  # shown for people
FINGERPRINT_IDS = 16


@rule(
    "ids",
    "the data was written with a larger vocabulary than the model has, or read with the wrong width",
    on_resume=True,
)
def ids(subject: Subject) -> Finding:
    """Every id that the first batches and the first validation windows hold is a token of the model."""
    tokens = subject.model_config.num_tokens
    validation = subject.trainer.eval_dataset
    scored = [] if validation is None else [validation.batch(range(min(BATCHES, len(validation))))]
    batches = [*subject.batches(BATCHES), *scored]
    held = torch.cat([batch[name].flatten() for batch in batches for name in ("input_ids", "shift_labels")])
    held = held[held != IGNORE_INDEX]
    low, high = int(held.min()), int(held.max())
    return Finding(low >= 0 and high < tokens, f"{low:,} to {high:,}", f"0 to {tokens - 1:,}")


@rule(
    "targets",
    "targets are not the next tokens of the shards (shifted not at all, or twice): the model would learn to copy",
    needs=("ids",),
    on_resume=True,
)
def targets(subject: Subject) -> Finding:
    """Inputs and targets of the first micro-batches are the ids of the shards, targets one further on."""
    shards = {shard.name: shard for shard in subject.pack.shards.train}
    ks, updates = subject.noted(1)
    batches = [batch for update in updates for batch in update][:BATCHES]
    inputs = np.concatenate([batch["input_ids"].numpy() for batch in batches])
    labels = np.concatenate([batch["shift_labels"].numpy() for batch in batches])
    places = [subject.pack.train.describe(int(k)) for k in ks[: len(inputs)]]
    raw = np.stack([shards[place["shard"]].ids[place["start"] : place["end"]] for place in places]).astype(np.int64)
    supervised = labels != IGNORE_INDEX
    wrong = int((inputs != raw[:, :-1]).sum()) + int(((labels != raw[:, 1:]) & supervised).sum())
    tokens = subject.pack.tokenizer
    pairs = zip(inputs[0, :PAIRS].tolist(), labels[0, :PAIRS].tolist(), strict=True)
    shown = tuple(f"{tokens.decode([a])!r} -> {tokens.decode([b]) if b >= 0 else None!r}" for a, b in pairs)
    value = f"{wrong:,} of {int(supervised.sum()):,} targets are not the next token"
    return Finding(wrong == 0 and bool(supervised.any()), value, "0", shown)


@rule(
    "separators",
    "documents run into each other: the model never learns where a text ends, and generation never stops",
    on_resume=True,
)
def separators(subject: Subject) -> Finding:
    """Every document begins with the separator."""
    separator = subject.pack.shards.manifest["separator"]["id"]
    shards = [*subject.pack.shards.train, *subject.pack.shards.validation]
    begins = sum(int((shard.ids[shard.offsets[:-1]] == separator).sum()) for shard in shards)
    documents = sum(shard.documents for shard in shards)
    return Finding(0 < documents == begins, f"{begins:,} documents begin with id {separator}", f"{documents:,}")


@rule("split", "validation text is in training (copies, or one file in both): the validation loss would be too good")
def split(subject: Subject) -> Finding:
    """No validation document is among those for training, and no window of one split is cut from a file of the other.

    Documents are compared by length and evenly spaced ids first, then in full.
    """
    shards = subject.pack.shards
    files = set(subject.pack.train.names) & set(subject.pack.validation.names)
    held: dict[int, list[bytes]] = {}
    for shard in shards.validation:
        for row, key in enumerate(_fingerprints(shard).tolist()):
            held.setdefault(key, []).append(_row(shard, row).tobytes())
    keys = np.fromiter(held, dtype=np.uint64, count=len(held))
    shared: set[bytes] = set()
    for shard in shards.train:
        found = _fingerprints(shard)
        for row in np.flatnonzero(np.isin(found, keys)).tolist():
            text = _row(shard, row).tobytes()
            shared |= {text} & set(held[int(found[row])])
    documents = sum(len(rows) for rows in held.values())
    value = f"{len(shared):,} of {documents:,} validation documents are in training"
    if files:
        value = f"{value}, and windows of both are cut from {', '.join(sorted(files)[:3])}"
    return Finding(not shared and not files, value, "0")


@rule(
    "round trip",
    "this is not the tokenizer that wrote the shards, or it does not give text back unchanged",
)
def round_trip(subject: Subject) -> Finding:
    """Documents of the shards, decoded and encoded again, have the same ids; hostile strings come back unchanged.

    A document that a budget cut in the middle of a word may differ, so one in each source may.
    """
    tokenizer = subject.pack.tokenizer
    backend = backend_json(tokenizer)
    broken = round_trip_failures(tokenizer) if is_byte_level(backend) else []
    differing, documents = 0, 0
    for written in _documents(subject, special_ids(backend)):
        text = tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        documents, differing = documents + 1, differing + (list(again) != written)
    value = f"{differing} of {documents} documents and {len(broken)} hostile strings differ"
    return Finding(differing <= len(subject.pack.shards.manifest["sources"]) and not broken, value, "0")


def _documents(subject: Subject, special: set[int]) -> Iterator[list[int]]:
    """Ids of documents, evenly spaced over the training shards, without separators; whole rows of ordinary tokens."""
    shards = subject.pack.shards.train
    for shard in shards:
        number = max(1, DOCUMENTS // len(shards))
        for row in np.unique(np.linspace(0, shard.rows - 1, number, dtype=np.int64)).tolist()[:DOCUMENTS]:
            written = _row(shard, row).tolist()
            if len(written) < 2**16 and written[0] in special and not special & set(written[1:]):
                yield written[1:]


def _row(shard: Shard, row: int) -> np.ndarray:
    ids: np.ndarray = shard.ids[shard.offsets[row] : shard.offsets[row + 1]]
    return ids


def _fingerprints(shard: Shard) -> np.ndarray:
    """A hash of each row's length and of evenly spaced ids of it, uint64 (rows,)."""
    starts, lengths = shard.offsets[:-1].astype(np.int64), np.diff(shard.offsets).astype(np.int64)
    key, found = key_of("preflight"), lengths.astype(np.uint64)
    for place in range(FINGERPRINT_IDS):
        at = starts + (lengths - 1) * place // (FINGERPRINT_IDS - 1)
        found = hash_counters(found + shard.ids[at].astype(np.uint64), key)
    return found


RULES = (ids, targets, separators, split, round_trip)
