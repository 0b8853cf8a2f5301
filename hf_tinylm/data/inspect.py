"""What is in a folder of shards: its manifest as a table, lengths, and windows as the model sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError, TokenizerError
from ..tokenization.load import load_tokenizer, tokenizer_sha256
from .lengths import QUANTILES, document_lengths, length_statistics, plot_lengths
from .shards import Shards, load_shards

if TYPE_CHECKING:
    from .windows import TokenWindows, WindowOrder

_SHARDS_SHOWN = 12
_PAIRS_SHOWN = 8
_BLOCK = 2**22  # ids searched at once


def inspection(
    path: str,
    tokenizer_path: str | None = None,
    sequence_length: int = 64,
    count: int = 3,
    windows: Sequence[int] | None = None,
    find: Sequence[int] | None = None,
    order: WindowOrder = "permutation",
    seed: int = 42,
    plot: str | None = None,
) -> dict[str, Any]:
    """The manifest of a pack, the lengths of its documents, and windows of its training split.

    Args:
        tokenizer_path: to show text; ids without it.
        count: windows shown, the first of the training order (which are random ones) unless others are asked for.
        windows: numbers of windows in the training order of `order`, `seed` and `sequence_length`.
        find: ids that follow each other; the first `count` windows that hold them are shown.
        plot: file for a picture of the lengths.

    Raises:
        DataError: the folder is no pack, a file differs from its manifest, or an id or window does not exist.
        TokenizerError: the tokenizer is not the one that wrote the pack.
    """
    shards = load_shards(path)
    _check_ids(find or (), shards)
    decode = _decoder(path, tokenizer_path, shards)
    lengths = document_lengths(shards)
    found = {"path": str(path), **shards.manifest, "lengths": length_statistics(lengths), "windows": []}
    if plot is not None:
        plot_lengths(lengths, Path(plot))
        found["plot"] = plot
    if find is not None:
        found["find"] = occurrences(shards, find, count)
        cut = _windows(shards, sequence_length, "sequential", seed)
        held = (_window_at(cut, shards, place) for place in found["find"]["places"])
        found["windows"] = [_shown(cut, k, decode) for k in dict.fromkeys(k for k in held if k is not None)]
    elif windows is not None or tokenizer_path is not None:
        cut = _windows(shards, sequence_length, order, seed)
        ks = range(min(count, len(cut))) if windows is None else windows
        if min(ks, default=0) < 0:
            raise DataError(f"window {min(ks)} does not exist; windows count from 0.")
        found["windows"] = [_shown(cut, k, decode) for k in ks]
    return found


def occurrences(shards: Shards, ids: Sequence[int], count: int) -> dict[str, Any]:
    """Where `ids` follow each other in the training shards: how often, and the first `count` places."""
    wanted, total = np.asarray(ids), 0
    places: list[dict[str, Any]] = []
    for shard in shards.train:
        for first in range(0, len(shard.ids) - len(wanted) + 1, _BLOCK):
            last = min(first + _BLOCK, len(shard.ids) - len(wanted) + 1)
            hits = np.ones(last - first, dtype=bool)
            for offset, token in enumerate(wanted):
                hits &= shard.ids[first + offset : last + offset] == token
            starts = np.flatnonzero(hits) + first
            total += len(starts)
            for start in starts[: count - len(places)].tolist():
                row = int(shard.row_at(np.array(start)))
                places.append({"shard": shard.name, "position": start, "row": row, "source": str(shard.sources[row])})
    return {"ids": [int(token) for token in ids], "occurrences": total, "places": places}


def inspection_lines(found: dict[str, Any]) -> list[str]:
    """`inspection` for people."""
    lines = [*manifest_lines(found["path"], found), "", *_length_lines(found["lengths"])]
    if "find" in found:
        looked = found["find"]
        lines += ["", f"ids {' '.join(map(str, looked['ids']))}: {looked['occurrences']:,} times in training"]
        lines += [f"  {p['shard']} at {p['position']:,}, row {p['row']:,} of {p['source']}" for p in looked["places"]]
    for window in found["windows"]:
        where = f"{window['shard']}, ids {window['start']:,} to {window['end']:,}; {', '.join(window['sources'])}"
        order = "the shards" if window["order"] == "sequential" else "training"
        lines += ["", f"window {window['window']:,} in the order of {order} ({where})"]
        lines += [f"  input:  {window['input']!r}", f"  target: {window['target']!r}"]
        shown = "   ".join(f"{given!r} -> {expected!r}" for given, expected in window["pairs"][:_PAIRS_SHOWN])
        lines.append(f"  pairs:  {shown}{'   ...' if len(window['pairs']) > _PAIRS_SHOWN else ''}")
    if "plot" in found:
        lines += ["", f"histogram of lengths: {found['plot']}"]
    return lines


def manifest_lines(path: str, manifest: dict[str, Any]) -> list[str]:
    """A manifest as tables."""
    separator, splits = manifest["separator"], manifest["splits"]
    facts = {
        "ids": f"{manifest['ids']:,} of {manifest['documents']:,} documents ({manifest['dtype']}, vocabulary "
        f"{manifest['vocab_size']:,})",
        "tokenizer": manifest["tokenizer_sha256"],
        "separator": f"{separator['token']} ({separator['id']}): {separator['policy']}",
        **{name: f"{split['ids']:,} ids, {split['documents']:,} documents" for name, split in splits.items()},
        "split": (rule := manifest.get("validation")) and f"validation_fraction {rule['fraction']}: {rule['rule']}",
        "order": manifest.get("order"),
        "duplicates": f"{manifest.get('duplicates', 0):,} dropped",
        "dropped": _counts(manifest.get("dropped", {})),
        "written by": " ".join(manifest["command"]) if "command" in manifest else None,
    }
    lines = [path, *(f"  {name:<11} {value}" for name, value in facts.items() if value)]
    sources = [
        [
            name,
            f"{source['ids']:,}",
            f"{source['ids'] / max(1, manifest['ids']):.1%}",
            f"{source['documents']:,}",
            f"{source.get('duplicates', 0):,}",
            _counts(source.get("dropped", {})),
            f"{source.get('repeated', 1.0):g}x",
            source.get("licence", "unknown"),
        ]
        for name, source in manifest["sources"].items()
    ]
    heads = ["source", "ids", "share", "documents", "duplicates", "dropped", "taken", "licence"]
    shards = [[s["name"], f"{s['ids']:,}", f"{s['documents']:,}", s["sha256"][:12]] for s in _entries(splits)]
    more = len(shards) - _SHARDS_SHOWN
    return [
        *(
            *lines,
            "",
            *_table(heads, sources),
            "",
            *_table(["shard", "ids", "documents", "sha256"], shards[:_SHARDS_SHOWN]),
        ),
        *([f"  ... and {more:,} more shards"] if more > 0 else []),
    ]


def _entries(splits: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for split in splits.values() for entry in split["shards"]]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "none"


def _length_lines(lengths: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        [
            name,
            f"{facts['documents']:,}",
            f"{facts['mean']:,.1f}",
            *(f"{q:,}" for q in facts["quantiles"].values()),
        ]
        for name, facts in lengths.items()
        if facts["documents"]
    ]
    return _table(["ids of a document", "documents", "mean", *(f"{q}%" for q in QUANTILES)], rows)


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Columns that line up; those of numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    right = [all(row[column][:1].isdigit() for row in rows) for column in range(len(heads))]

    def line(cells: list[str]) -> str:
        placed = (f"{c:>{w}}" if r else f"{c:<{w}}" for c, w, r in zip(cells, widths, right, strict=True))
        return f"  {'  '.join(placed)}".rstrip()

    return [line(heads), *(line(row) for row in rows)]


def _check_ids(ids: Sequence[int], shards: Shards) -> None:
    for token in ids:
        if not 0 <= token < shards.vocab_size:
            raise DataError(
                f"--find {token}: {shards.path} has a vocabulary of {shards.vocab_size:,} tokens; give ids from 0 to "
                f"{shards.vocab_size - 1:,}."
            )


def _decoder(path: str, tokenizer_path: str | None, shards: Shards) -> Callable[[Sequence[int]], str]:
    """Text of ids; the ids themselves without a tokenizer."""
    if tokenizer_path is None:
        return lambda ids: " ".join(str(int(token)) for token in ids)
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer_sha256(tokenizer) != shards.tokenizer_sha256:
        raise TokenizerError(
            f"{path} was written with another tokenizer than {tokenizer_path}. Give the one it was written with."
        )
    return lambda ids: str(tokenizer.decode(list(ids)))


def _windows(shards: Shards, sequence_length: int, order: WindowOrder, seed: int) -> TokenWindows:
    from .target_sources import TargetSources
    from .windows import TokenWindows  # torch, which takes longer to import than a manifest to read

    streams, names = [shard.ids for shard in shards.train], [shard.name for shard in shards.train]
    sources = TargetSources(shards.train, list(shards.manifest["sources"]))
    return TokenWindows(streams, sequence_length, order, seed, names, sources=sources)


def _window_at(cut: TokenWindows, shards: Shards, place: dict[str, Any]) -> int | None:
    """Number of the sequential window whose input holds a place; None in the tail that no window holds."""
    before = 0
    for shard in shards.train:
        count = max(0, len(shard.ids) - 1) // cut.sequence_length
        if shard.name == place["shard"]:
            within = int(place["position"]) // cut.sequence_length
            return before + within if within < count else None
        before += count
    raise AssertionError(f"{place['shard']} is none of the shards")


def _shown(cut: TokenWindows, k: int, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    ids = cut.gather([k])[0].tolist()
    numbers = dict.fromkeys(cut.target_sources([k])[0].tolist())
    texts = [decode([token]) for token in ids]
    return {
        **cut.describe(k),
        "order": cut.order,
        "sources": [cut.source_names[number] for number in numbers],
        "ids": ids,
        "input": decode(ids[:-1]),
        "target": decode(ids[1:]),
        "pairs": list(itertools.pairwise(texts)),
    }
