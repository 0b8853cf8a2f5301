"""The model card (README.md) of a final folder, written from what the run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..files import write_text


_BASE = (
    "A base language model trained from scratch with hf_tinylm. It continues text; it was not tuned to chat, to follow\n"
    "instructions or to be safe, and it states falsehoods fluently."
)
_CHAT = (
    "A small language model tuned on conversations with hf_tinylm. It answers in the ChatML format; it was not made safe,\n"
    "and it states falsehoods fluently."
)
_CONTINUE = """ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))"""
_ANSWER = """messages = [{"role": "user", "content": "Who are you?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
reply = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(reply, skip_special_tokens=True))"""


def write_card(
    folder: Path, name: str, facts: dict[str, Any], sources: dict[str, dict[str, Any]], chat: bool = False
) -> None:
    """Write `folder/README.md` with valid Hub metadata.

    Args:
        facts: rows of the table, in order.
        sources: `{name: {ids, documents, licence}}` as in the shard manifest.
        chat: a model tuned on conversations.
    """
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_tinylm", "text-generation", *(["conversational"] if chat else [])],
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

{_CHAT if chat else _BASE}

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
{_ANSWER if chat else _CONTINUE}
```
""",
    )


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
