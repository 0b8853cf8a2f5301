"""The model card (README.md) of a final folder, written from what the run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_text
from .curves import draw_curves

_BASE = (
    "A base language model trained from scratch with hf_tinylm. It continues text; it was not tuned to chat, to\n"
    "follow instructions or to be safe, and it states falsehoods fluently."
)
_CHAT = (
    "A small language model tuned on conversations with hf_tinylm. It answers in the ChatML format; it was not made\n"
    "safe, and it states falsehoods fluently."
)
_USES = (
    "Meant for experiments, teaching and as a start for fine-tuning, on one's own machine. Not meant for advice,\n"
    "facts, decisions about people, or unsupervised contact with the public. It knows what its training data holds,\n"
    "and repeats its biases. It was not tested for safety, nor for private data in its training text."
)
_CONTINUE = """ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))"""
_ANSWER = """messages = [{"role": "user", "content": "Who are you?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
reply = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(reply, skip_special_tokens=True))"""
_LLAMA_CHAT = "llama-cli -m FILE.gguf"
_LLAMA_TEXT = "llama-cli -m FILE.gguf -no-cnv -p 'Once upon a time'"


@dataclass
class CardFacts:
    """What a card says.

    Attributes:
        facts: rows of the first table, in order.
        sources: `{name: {ids, documents, licence}}` as in the shard manifest.
        rows: of metrics.jsonl, for the curves and the validation in the metadata.
        chat: a model tuned on conversations.
        licence: of the weights, as the Hub spells it (`apache-2.0`); None: not chosen.
        base_model: what a chat model was tuned from.
    """

    facts: dict[str, Any]
    sources: dict[str, dict[str, Any]]
    rows: Sequence[dict[str, Any]] = ()
    chat: bool = False
    licence: str | None = None
    base_model: str | None = None
    tags: list[str] = field(default_factory=lambda: ["hf_tinylm"])


def write_card(folder: Path, name: str, card: CardFacts) -> None:
    """Write `folder/README.md` with valid Hub metadata, and its picture `curves.png` when there are rows to draw."""
    table = "\n".join(f"| {key} | {cell(value)} |" for key, value in card.facts.items())
    data = "\n".join(
        f"| {cell(source)} | {facts['ids']:,} | {facts['documents']:,} | {cell(facts['licence'])} |"
        for source, facts in card.sources.items()
    )
    curves = ""
    if draw_curves(card.rows, folder / "curves.png"):
        curves = "## Training\n\n![loss, learning rate and gradient norm over tokens](curves.png)\n\n"
    licence = card.licence or "none was chosen; all rights are reserved"
    write_text(
        folder / "README.md",
        f"""---
{_metadata(name, card).strip()}
---

# {name}

{_CHAT if card.chat else _BASE}

| | |
|---|---|
{table}
| licence of the weights | {cell(licence)} |

{_USES}

{curves}## Training data

| source | ids | documents | licence |
|---|---|---|---|
{data}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
{_ANSWER if card.chat else _CONTINUE}
```

A GGUF file of this model runs in llama.cpp: `{_LLAMA_CHAT if card.chat else _LLAMA_TEXT}`
""",
    )


def _metadata(name: str, card: CardFacts) -> str:
    """Metadata that the Hub accepts, the last validation as a `model-index` entry."""
    from huggingface_hub import EvalResult, ModelCardData

    measured = next((row for row in reversed(card.rows) if "eval_loss" in row), None)
    results = []
    for key, told in (("eval_loss", "nats per token"), ("bits_per_byte", "bits per byte")):
        if measured is not None and key in measured:
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type="validation",
                    dataset_name="validation split of the training data",
                    metric_type="loss" if key == "eval_loss" else key,
                    metric_name=told,
                    metric_value=round(float(measured[key]), 4),
                )
            )
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=card.licence,
        base_model=card.base_model,
        tags=[*card.tags, *(["conversational"] if card.chat else [])],
        model_name=name if results else None,
        eval_results=results or None,
    ).to_yaml()


def cell(text: Any) -> str:
    """Text in a cell of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ")
