"""How much text a run has, before or after its pack is written, from a manifest or the sources' own budgets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..files import read_json
from ..sections import DataSection
from .disk import targets_of


@dataclass(frozen=True)
class PackFacts:
    """What is known of a pack. `ids` are those of all splits; `targets` those of one training epoch.

    `origin` says how it is known: `manifest` of a written pack, `sources` that name their budgets, `conversations` that
    were rendered, or None: nothing is.
    """

    ids: int | None = None
    targets: int | None = None
    shards: int | None = None
    vocab_size: int | None = None
    origin: str | None = None


def pack_facts(data: DataSection) -> PackFacts:
    """From `data.shards` when it is written; else from the sources, if they say how many ids they give.

    Raises:
        ConfigError: there is a manifest, and it is damaged.
    """
    manifest = Path(data.shards) / "manifest.json" if data.shards else None
    if manifest is not None and manifest.is_file():
        return _from_manifest(manifest, data.sequence_length)
    budgets = [source.tokens for source in data.sources]
    ids = data.pack_tokens or (sum(b for b in budgets if b) if budgets and all(budgets) else None)
    if ids is None:
        return PackFacts()
    targets = targets_of([round(ids * (1 - data.validation_fraction))], data.sequence_length)
    return PackFacts(ids=ids, targets=targets, origin="sources")


def _from_manifest(path: Path, sequence_length: int) -> PackFacts:
    manifest = read_json(path)
    try:
        shards = [int(entry["ids"]) for entry in manifest["splits"]["train"]["shards"]]
        ids, vocab_size = int(manifest["ids"]), int(manifest["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r} is missing or no number). Run hf-tinylm prepare.") from error
    return PackFacts(ids, targets_of(shards, sequence_length), len(shards), vocab_size, "manifest")
