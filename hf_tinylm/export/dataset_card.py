"""The card (README.md) of a packed dataset, written from its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..files import read_json
from .card import cell


def dataset_card(shards: Path, name: str) -> str:
    """The card of the pack in `shards`; `load_dataset` reads from it where each split is."""
    return f"---\n{_metadata(shards)}---\n\n{_text(name, read_json(shards / 'manifest.json'))}"


def _metadata(shards: Path) -> str:
    splits = [split for split in ("train", "validation") if list((shards / split).glob("*.arrow"))]
    files = [{"split": split, "path": f"{split}/*.arrow"} for split in splits]
    metadata = {
        "task_categories": ["text-generation"],
        "tags": ["hf_tinylm", "tokenized"],
        "configs": [{"config_name": "default", "data_files": files}],
    }
    return yaml.safe_dump(metadata, sort_keys=False)


def _text(name: str, manifest: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {cell(source)} | {facts['ids']:,} | {facts['documents']:,} | {cell(facts['licence'])} |"
        for source, facts in manifest["sources"].items()
    )
    dropped = ", ".join(f"{reason}: {count:,}" for reason, count in manifest.get("dropped", {}).items()) or "none"
    return f"""# {name}

Token ids of {manifest["documents"]:,} documents ({manifest["ids"]:,} ids), packed by hf_tinylm. Each row is one
document; its first id is the separator. The tokenizer has {manifest["vocab_size"]:,} tokens and the SHA-256
`{manifest["tokenizer_sha256"]}`. Documents that were left out, by reason: {dropped}.

| source | ids | documents | licence |
|---|---|---|---|
{rows}

Train on it: `hf download REPOSITORY --repo-type dataset --local-dir shards`, then give `--shards shards` and the
tokenizer. Read it: `load_dataset("REPOSITORY")`, or `load_from_disk("shards")`. `manifest.json` has the SHA-256 of each
file.
"""
