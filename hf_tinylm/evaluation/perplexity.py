"""Loss, perplexity and bits per byte on held-out shards or raw text, beside models that only count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.pack import Pack
from ..data.records import Document
from ..errors import ConfigError, TokenizerError
from ..files import sha256_of_json
from ..planning import uniform_loss
from .baselines import kneser_ney_bigram_loss, unigram_loss
from .likelihood import Engine, Span
from .metrics import compute, result

PACK_RULE = "mean over non-overlapping windows of {window} tokens, each window seen alone; every window once"
APART_RULE = "each document alone, after one start token, in non-overlapping windows of {window} tokens"
STRIDED_RULE = (
    "each document alone, after one start token, in windows of {window} tokens that move by {stride}; each token "
    "scored once, with at least {kept} tokens before it from the second window on"
)
_BYTES_RULE = "; nats / ln 2 / bytes of UTF-8 text"
_NO_BYTES = "; separators cost nats and have no bytes"
_RAW_WINDOW = 1024  # of a model that names no limit


def evaluate_pack(engine: Engine, pack: Pack, eval_tokens: int, progress: bool = False) -> dict[str, Any]:
    """Score the first `eval_tokens` validation targets (whole windows) of `pack`.

    Returns:
        `items` (windows), `tokens`, `records` (nats and tokens of each window, bytes where they are known), hashes,
        and `results` {metric: {value, stderr, interval, rule}}: `loss` (nats per token), `perplexity` and
        `bits_per_byte` of the model, `loss/NAME` and `bits_per_byte/NAME` of each source; `uniform`, `unigram` and
        `kneser_ney_bigram` counts of the training shards.

    Raises:
        TokenizerError: the model has another tokenizer than the pack.
    """
    _check_tokenizer(engine, pack)
    window = pack.validation.sequence_length
    windows = min(len(pack.validation), max(1, eval_tokens // window))
    ids = pack.validation.gather(np.arange(windows))
    separator = pack.validation.separator
    scores = engine.score([document_spans(row, separator) for row in ids.tolist()], progress)
    nats = -np.stack([np.concatenate([part.logprobs for part in found]) for found in scores]).astype(np.float64)
    sizes = None if pack.token_bytes is None else pack.token_bytes[ids[:, 1:]]
    rule = PACK_RULE.format(window=window)
    if separator is not None:
        rule += "; targets attend only inside their document"
    records = _window_records(nats, sizes, np.ones(nats.shape, dtype=bool))
    results = _model_results(records, records, rule + _NO_BYTES)
    sources = pack.validation.target_sources(np.arange(windows))
    for number, name in enumerate(pack.validation.source_names):
        results |= _of_source(name, own := _window_records(nats, sizes, sources == number), own, rule)
    results |= _count_results(pack, ids[:, :-1].ravel(), ids[:, 1:].ravel(), results)
    identity = {**pack.identity, "windows": windows, "window": window, "separator": separator}
    return {
        "items": windows,
        "tokens": windows * window,
        "results": results,
        "rule": {"window": window, "stride": window, "text": "validation shards"},
        "items_sha256": sha256_of_json(identity),
        "ids_sha256": sha256_of_json({**identity, "ids": True}),
        "records": records,
    }


def evaluate_text(
    engine: Engine,
    documents: Sequence[Document],
    window: int | None = None,
    stride: int | None = None,
    pack: Pack | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Score every token of raw text, per source and in total.

    Args:
        window: tokens that the model reads at once; None: as many as it can.
        stride: tokens from one window to the next; None: the window, so that windows do not overlap.
        pack: its training shards are counted for the unigram and bigram baselines.

    Returns:
        As `evaluate_pack`; a record is a document, with its source and bytes.

    Raises:
        ConfigError: a window or stride that the model does not allow.
        TokenizerError: `pack` was written with another tokenizer than the model has.
    """
    window, stride = _checked_window(engine, window, stride)
    encoded = engine.encode([document.text for document in documents])
    front = engine.prefix or (engine.start_id,)
    ids = [(*front, *found) for found in encoded]
    questions = [rolling_spans(row, len(front), window, stride) for row in ids]
    flat = engine.score([[span] for spans in questions for span in spans], progress)
    scores = iter([found[0] for found in flat])
    records, parts = [], []
    for number, (document, spans) in enumerate(zip(documents, questions, strict=True)):
        scored = [next(scores) for _ in spans]
        parts += [{"source": document.source, "nats": -score.total, "tokens": score.tokens} for score in scored]
        records.append(
            {
                "item": number,
                "source": document.source,
                "nats": -sum(score.total for score in scored),
                "tokens": sum(score.tokens for score in scored),
                "bytes": len(document.text.encode("utf-8")),
            }
        )
    rule = (APART_RULE if stride == window else STRIDED_RULE).format(window=window, stride=stride, kept=window - stride)
    results = _model_results(records, parts, rule)
    sources = list(dict.fromkeys(document.source for document in documents))
    for source in sources if len(sources) > 1 else ():
        own, own_parts = ([row for row in rows if row["source"] == source] for rows in (records, parts))
        results |= _of_source(source, own, own_parts, rule)
    results |= _text_baselines(engine, pack, ids, len(front), results)
    return {
        "items": len(records),
        "tokens": sum(record["tokens"] for record in records),
        "results": results,
        "rule": {"window": window, "stride": stride, "text": "raw"},
        "items_sha256": sha256_of_json([[document.source, document.text] for document in documents]),
        "ids_sha256": sha256_of_json([ids, window, stride]),
        "records": records,
    }


def document_spans(window: Sequence[int], separator: int | None) -> list[Span]:
    """A window of ids (T+1,) as one span, or as one for each document in it where a separator keeps them apart.

    A document begins at its separator, which its predecessor predicts.
    """
    begins = [0, *(place for place in range(1, len(window) - 1) if window[place] == separator)]
    ends = [*begins[1:], len(window) - 1]
    return [Span(tuple(window[begin : end + 1]), 1) for begin, end in zip(begins, ends, strict=True)]


def rolling_spans(ids: Sequence[int], start: int, window: int, stride: int) -> list[Span]:
    """Spans that together score each of `ids[start:]` once, `start` being at least 1.

    Each reads at most `window` ids. With `stride` below `window`, all but the first read as many as they may, of which
    the last `stride` predict what is scored; otherwise each begins where the one before it ended.
    """
    spans, done, last = [], start, len(ids) - 1
    end = min(start - 1 + window, last)
    while True:
        first = done - 1 if stride == window else max(0, end - window)
        spans.append(Span(tuple(ids[first : end + 1]), done - first))
        if end == last:
            return spans
        done, end = end + 1, min(end + stride, last)


def _checked_window(engine: Engine, window: int | None, stride: int | None) -> tuple[int, int]:
    most = engine.max_length
    window = window if window is not None else (most or _RAW_WINDOW)
    if window < 2 or (most is not None and window > most):
        raise ConfigError(f"window={window:,} must be 2 or more{'' if most is None else f' and at most {most:,}'}.")
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ConfigError(f"stride={stride:,} must be 1 or more and at most the window of {window:,}.")
    return window, stride


def _model_results(records: list[dict[str, Any]], parts: list[dict[str, Any]], rule: str) -> dict[str, Any]:
    """`loss` and `perplexity` with their error over `parts` (windows), `bits_per_byte` with its over `records`."""
    found = compute(
        "token_weighted_perplexity",
        predictions=[part["nats"] for part in parts],
        references=[part["tokens"] for part in parts],
    )
    results = {"loss": result(found, "loss", rule), "perplexity": result(found, "perplexity", f"exp of loss; {rule}")}
    if all("bytes" in record for record in records) and any(record["bytes"] for record in records):
        bits = compute(
            "bits_per_byte",
            predictions=[record["nats"] for record in records],
            references=[record["bytes"] for record in records],
        )
        results["bits_per_byte"] = result(bits, "bits_per_byte", rule + _BYTES_RULE)
        if len(records) == 1 and found["loss_stderr"] is not None:  # one document: its windows tell how sure it is
            scale = found["tokens"] / (math.log(2) * bits["bytes"])
            results["bits_per_byte"]["stderr"] = found["loss_stderr"] * scale
            results["bits_per_byte"]["interval"] = [bound * scale for bound in found["loss_interval"]]
    return results


def _of_source(
    source: str, records: list[dict[str, Any]], parts: list[dict[str, Any]], rule: str
) -> dict[str, dict[str, Any]]:
    """`loss/SOURCE` and `bits_per_byte/SOURCE` of the targets of one source; nothing when it has none."""
    if not parts:
        return {}
    tokens = sum(part["tokens"] for part in parts)
    found = _model_results(records, parts, f"{rule}; the {tokens:,} tokens of {source}")
    return {f"{name}/{source}": found[name] for name in ("loss", "bits_per_byte") if name in found}


def _window_records(nats: np.ndarray, sizes: np.ndarray | None, own: np.ndarray) -> list[dict[str, Any]]:
    """The record of each window that has targets among `own` (n, T), from losses and bytes of each target (n, T)."""
    columns = {"nats": np.where(own, nats, 0.0).sum(axis=1), "tokens": own.sum(axis=1)}
    if sizes is not None:
        columns["bytes"] = np.where(own, sizes, 0).sum(axis=1)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]
    return [{"item": number, **row} for number, row in enumerate(rows) if row["tokens"]]


def _text_baselines(
    engine: Engine, pack: Pack | None, ids: Sequence[Sequence[int]], start: int, results: dict[str, Any]
) -> dict[str, Any]:
    if pack is None:
        vocab_size = engine.vocab_size
        return _beside({"uniform_loss": (uniform_loss(vocab_size), "every token equally likely")}, results)
    _check_tokenizer(engine, pack)
    contexts = np.concatenate([np.asarray(row[start - 1 : -1], dtype=np.int64) for row in ids])
    targets = np.concatenate([np.asarray(row[start:], dtype=np.int64) for row in ids])
    return _count_results(pack, contexts, targets, results)


def _check_tokenizer(engine: Engine, pack: Pack) -> None:
    """Raises TokenizerError when the pack's ids are known to mean other text than the model's."""
    known = engine.facts().get("tokenizer_sha256", pack.shards.tokenizer_sha256)
    if known != pack.shards.tokenizer_sha256 or engine.vocab_size < pack.shards.vocab_size:
        raise TokenizerError(
            f"{pack.shards.path} was written with another tokenizer ({pack.shards.vocab_size:,} tokens) than the model "
            f"has ({engine.vocab_size:,} tokens). Give the config that the model was trained with, or score raw text: "
            "--text FILE."
        )


def _count_results(pack: Pack, contexts: np.ndarray, targets: np.ndarray, results: dict[str, Any]) -> dict[str, Any]:
    """The losses of models that count the training shards, on the same targets."""
    streams, vocabulary = [shard.ids for shard in pack.shards.train], pack.shards.vocab_size
    losses = {
        "uniform_loss": (uniform_loss(vocabulary), "every token equally likely"),
        "unigram_loss": (unigram_loss(streams, targets, vocabulary), "add-one counts of the training shards"),
        "kneser_ney_bigram_loss": (
            kneser_ney_bigram_loss(streams, contexts, targets, vocabulary),
            "interpolated Kneser-Ney counts of the training shards",
        ),
    }
    return _beside(losses, results)


def _beside(losses: dict[str, tuple[float, str]], results: dict[str, Any]) -> dict[str, Any]:
    """Baseline losses, and the same in bits per byte where the model has them."""
    unsure = {"stderr": None, "interval": None}
    found = {name: {"value": value, **unsure, "rule": rule} for name, (value, rule) in losses.items()}
    if "bits_per_byte" in results:
        scale = results["bits_per_byte"]["value"] / results["loss"]["value"]
        for name, (value, rule) in losses.items():
            in_bits = name.replace("loss", "bits_per_byte")
            found[in_bits] = {"value": value * scale, **unsure, "rule": rule + _BYTES_RULE}
    return found
