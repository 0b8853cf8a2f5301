"""How long the documents of each source are: quantiles, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..files import atomic_file
from .shards import Shards

QUANTILES = (0, 5, 25, 50, 75, 95, 100)
PICTURES = ("png", "pdf", "svg")


def document_lengths(shards: Shards) -> dict[str, np.ndarray]:
    """Ids of each document of each source, its separator included: int64 (documents,), both splits.

    A row without a separator goes on with the document of the row before, in the file before.
    """
    separator = shards.manifest["separator"]["id"]
    found: dict[str, list[np.ndarray]] = {name: [] for name in shards.manifest["sources"]}
    for split in (shards.train, shards.validation):
        used = [shard for shard in split if shard.rows]
        if not used:
            continue
        rows = np.concatenate([np.diff(shard.offsets).astype(np.int64) for shard in used])
        begins = np.flatnonzero(np.concatenate([shard.ids[shard.offsets[:-1]] == separator for shard in used]))
        names = np.concatenate([np.asarray(shard.sources.to_pylist(), dtype=object) for shard in used])[begins]
        lengths = np.add.reduceat(rows, begins)
        for name in found:
            found[name].append(lengths[names == name])
    return {name: np.concatenate([np.empty(0, np.int64), *parts]) for name, parts in found.items()}


def length_statistics(lengths: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """{source: {documents, mean, quantiles {"50": ids}}}; of a source without documents only the count."""
    found: dict[str, dict[str, Any]] = {}
    for name, values in lengths.items():
        found[name] = {"documents": len(values)}
        if len(values):
            quantiles = np.percentile(values, QUANTILES, method="lower").tolist()
            found[name]["mean"] = round(float(values.mean()), 2)
            found[name]["quantiles"] = dict(zip(map(str, QUANTILES), quantiles, strict=True))
    return found


def plot_lengths(lengths: dict[str, np.ndarray], path: Path) -> None:
    """Draw a histogram for each source, on one scale of lengths.

    Raises:
        ConfigError: the file's ending names no format that is drawn here.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in PICTURES:
        raise ConfigError(
            f"--plot {path} has no ending that is drawn here; use {', '.join('.' + k for k in PICTURES)}."
        )
    from matplotlib.figure import Figure  # not pyplot: no window, no state

    drawn = {name: values for name, values in lengths.items() if len(values)}
    low, high = (pick([pick(values) for values in drawn.values()]) for pick in (min, max))
    bins = np.unique(np.geomspace(low, high + 1, 41).round())
    figure = Figure(figsize=(8, 1.2 + 1.6 * len(drawn)), layout="constrained")
    rows = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    for axes, (name, values) in zip(rows, drawn.items(), strict=True):
        axes.hist(values, bins=bins)
        axes.axvline(float(np.median(values)), color="black", linestyle="--", linewidth=1)
        axes.set_title(
            f"{name}: {len(values):,} documents, median {np.median(values):,.0f} ids", loc="left", fontsize=9
        )
        axes.set_xscale("log")
        axes.set_ylabel("documents", fontsize=8)
    rows[-1].set_xlabel("ids of a document, separator included")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=120)
