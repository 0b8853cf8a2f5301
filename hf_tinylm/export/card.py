"""The model card (README.md) of a final folder, written from what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..files import write_text


def write_card(folder: Path, name: str, facts: dict[str, Any], sources: dict[str, dict[str, Any]]) -> None:
    """Write `folder/README.md` with valid Hub metadata.

    Args:
        facts: rows of the table, in order.
        sources: `{name: {ids, documents, licence}}` as in the shard manifest.
    """
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_tinylm", "text-generation"],
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    data = "\n".join(
        f"| {_cell(source)} | {facts_of['ids']:,} | {facts_of['documents']:,} | {_cell(facts_of['licence'])} |"
        for source, facts_of in sources.items()
    )
    write_text(
        folder / "README.md",
        f"""---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {name}

A base language model trained from scratch with hf_tinylm. It continues text; it was not tuned to chat, to follow
instructions or to be safe, and it states falsehoods fluently.

| | |
|---|---|
{table}

## Training data

| source | ids | documents | licence |
|---|---|---|---|
{data}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```
""",
    )


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
