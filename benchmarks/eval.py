"""Items per second of HellaSwag-schema questions: our engine against lm-eval's HFLM, same model, items and batch."""

from __future__ import annotations

import lzma
import statistics
import time
from typing import Any

from hf_tinylm.evaluation.engines import special_beginning
from hf_tinylm.evaluation.likelihood import CausalLMEngine, encode_pairs
from hf_tinylm.evaluation.suites import load_suite
from hf_tinylm.files import bundled
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.sections import ModelSection
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.train import train_tokenizer

from .machine import median_ratio
from .questions import questions
from .runs import model_of

SECTION, VOCABULARY = ModelSection(320, 6, 5, 5, 864), 8_192  # 10 million parameters
ITEMS, BATCH, ROUNDS = 32, 16, 5


def measure() -> dict[str, Any]:
    """Items per second of both (median of alternating rounds, tokenization included), and how far their sums differ.

    Contexts of 70 to 90 tokens, four endings of 20 to 30; both have `BATCH` texts in a batch, float32.
    """
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    with lzma.open(bundled("recipes", "corpora", "austen.txt.xz"), "rt", encoding="utf-8") as file:
        tokenizer, _ = train_tokenizer(file.read(2_000_000).split("\n\n"), VOCABULARY)
    model = stock_model(model_of(SECTION, VOCABULARY, 512))
    suite = load_suite("hellaswag")
    rows = questions(ITEMS, lambda text: len(tokenizer(text)["input_ids"]))
    items = [suite.item(row, f"item {row['ind']}") for row in rows]
    pairs = [pair for item in items for pair in item.pairs]
    prefix, start = special_beginning(tokenizer)
    engine = CausalLMEngine(model, FastEncoder(tokenizer), prefix, start, BATCH)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH)

    def ours() -> list[float]:
        spans = iter(encode_pairs(engine, pairs))
        scores = engine.score([[next(spans) for _ in item.pairs] for item in items])
        return [score.total for question in scores for score in question]

    def theirs() -> list[float]:
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        return [float(total) for total, _ in harness.loglikelihood(requests, disable_tqdm=True)]

    seconds: dict[str, list[float]] = {"ours": [], "lm-eval": []}
    cpu: dict[str, list[float]] = {"ours": [], "lm-eval": []}  # what other work on the machine does not stretch
    largest = max(abs(a - b) for a, b in zip(ours(), theirs(), strict=True))  # and both are warm
    for _ in range(ROUNDS):
        for name, run in (("ours", ours), ("lm-eval", theirs)):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            run()
            seconds[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() - begin_cpu)
    return {
        "items": ITEMS,
        "batch": BATCH,
        "items_per_second": {name: round(ITEMS / statistics.median(found), 2) for name, found in seconds.items()},
        "ours_over_lm_eval": round(median_ratio(seconds["lm-eval"], seconds["ours"]), 3),
        "ours_over_lm_eval_by_processor_time": round(median_ratio(cpu["lm-eval"], cpu["ours"]), 3),
        "largest_difference_of_a_sum_in_nats": largest,
    }
