"""What a run reads, by content: hashes of some of its windows, taken at its start and compared wherever it moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..planning import UpdatePlan
from ..tokenization.load import backend_json, is_byte_level, token_bytes
from .validation import validation_windows

WINDOWS_AT_ONCE = 64
WINDOWS_OF_AN_UPDATE = 8


def input_facts(train: Any, evaluation: Any, plan: UpdatePlan, eval_tokens: int, tokenizer: Any) -> dict[str, Any]:
    """Windows of chosen updates (first of each size, middle, last) and all that are evaluated, as run.json keeps them.

    Args:
        train: windows with `batch(ks)`; so is `evaluation`, which may be None.
        tokenizer: decodes the windows; without it `text_sha256` is None.

    Returns:
        `updates` (each with `update`, zero-based, its first `windows`, `ids_sha256` and `text_sha256`), and
        `evaluation` with `windows` and `ids_sha256`. An update that `nonfinite: skip` passed over moves later ones on.
    """
    chosen = sorted({stage.first_update for stage in plan.stages} | {plan.updates // 2, plan.updates - 1})
    updates = [windows_of_update(train, plan, update, tokenizer) for update in chosen]
    return {"updates": updates, "evaluation": None if evaluation is None else evaluated(evaluation, eval_tokens)}


def windows_of_update(train: Any, plan: UpdatePlan, update: int, tokenizer: Any) -> dict[str, Any]:
    """The first windows of an update: their numbers, and hashes of their ids and of the text that they decode to."""
    first = plan.windows_before(update)
    windows = list(range(first, first + min(WINDOWS_OF_AN_UPDATE, plan.windows_of(update))))
    return {"update": update, **hashed_windows(train, windows, tokenizer)}


def hashed_windows(train: Any, windows: list[int], tokenizer: Any) -> dict[str, Any]:
    """The numbers of `windows`, and hashes of their ids and of the text that they decode to."""
    batch = train.batch(windows)
    inputs, targets = batch["input_ids"].numpy(), batch["shift_labels"].numpy()
    text = None
    if tokenizer is not None:
        decode = decoder(tokenizer)
        ids = (row for row in np.concatenate((inputs, np.maximum(targets[:, -1:], 0)), axis=1).tolist())
        text = hashlib.sha256(b"\0".join(decode(row) for row in ids)).hexdigest()
    return {"windows": windows, "ids_sha256": _sha256_of_ids((inputs, targets)), "text_sha256": text}


def evaluated(dataset: Any, eval_tokens: int) -> dict[str, Any]:
    """How many windows an evaluation reads, and the hash of their inputs and targets."""
    count = validation_windows(dataset, eval_tokens)
    batches = (dataset.batch(range(k, min(k + WINDOWS_AT_ONCE, count))) for k in range(0, count, WINDOWS_AT_ONCE))
    arrays = (batch[name].numpy() for batch in batches for name in ("input_ids", "shift_labels"))
    return {"windows": count, "ids_sha256": _sha256_of_ids(arrays)}


def decoder(tokenizer: Any) -> Callable[[list[int]], bytes]:
    """A function from ids to the bytes of their text; of a byte-level tokenizer exactly, also of half a character."""
    if not is_byte_level(backend_json(tokenizer)):
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)).encode()
    spelled = token_bytes(tokenizer)
    special = {id_: token.encode() for token, id_ in tokenizer.get_vocab().items() if id_ not in spelled}
    return lambda ids: b"".join(spelled[id_] if id_ in spelled else special[id_] for id_ in ids)


def _sha256_of_ids(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()
