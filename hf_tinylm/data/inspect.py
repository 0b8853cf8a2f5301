"""What is in a folder of shards: its manifest in words, and windows as the model sees them."""

from __future__ import annotations

from typing import Any

from ..errors import TokenizerError
from ..tokenization.load import load_tokenizer, tokenizer_sha256
from .shards import load_shards


def inspection(
    path: str, tokenizer_path: str | None = None, sequence_length: int = 64, windows: int = 3
) -> dict[str, Any]:
    """The manifest of a pack, and `windows` decoded training windows when a tokenizer is given.

    Raises:
        DataError: the folder is no pack, or a file differs from its manifest.
        TokenizerError: the tokenizer is not the one that wrote the pack.
    """
    shards = load_shards(path)
    found = {"path": str(path), **shards.manifest, "windows": []}
    if tokenizer_path is None:
        return found
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer_sha256(tokenizer) != shards.tokenizer_sha256:
        raise TokenizerError(
            f"{path} was written with another tokenizer than {tokenizer_path}. Give the one it was written with."
        )
    from .windows import TokenWindows  # imports torch, which takes longer than `prepare` of a small text

    cut = TokenWindows(
        [shard.ids for shard in shards.train], sequence_length, "permutation", 0, [shard.name for shard in shards.train]
    )
    for k in range(min(windows, len(cut))):
        ids = cut.gather([k])[0]
        found["windows"].append(
            {**cut.describe(k), "input": tokenizer.decode(ids[:-1]), "target": tokenizer.decode(ids[1:])}
        )
    return found


def inspection_lines(found: dict[str, Any]) -> list[str]:
    """`inspection` for people."""
    lines = manifest_lines(found["path"], found)
    for window in found["windows"]:
        lines.append(f"\nwindow {window['window']} ({window['shard']}, ids {window['start']:,} to {window['end']:,})")
        lines.append(f"  input:  {window['input']!r}")
        lines.append(f"  target: {window['target']!r}")
    return lines


def manifest_lines(path: str, manifest: dict[str, Any]) -> list[str]:
    """A manifest for people."""
    lines = [
        f"{path}: {manifest['ids']:,} {manifest['dtype']} ids of {manifest['documents']:,} documents, "
        f"vocabulary {manifest['vocab_size']:,}, tokenizer {manifest['tokenizer_sha256'][:12]}...",
        f"  train {manifest['splits']['train']['ids']:,} ids, validation {manifest['splits']['validation']['ids']:,}; "
        f"duplicates dropped: {manifest['duplicates']:,}; dropped for other reasons: {manifest['dropped'] or 'none'}",
    ]
    for name, source in manifest["sources"].items():
        lines.append(f"  {name}: {source['ids']:,} ids, {source['documents']:,} documents, licence {source['licence']}")
    return lines
