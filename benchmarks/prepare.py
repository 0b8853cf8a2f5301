"""Text to tokens on disk: `hf-tinylm prepare` beside what people use, at the same number of processes.

Every method is a fresh interpreter that reads the same JSON lines (documents of about 4 KB) and writes token ids:
start-up, reading, encoding and writing are in its time; hashing, duplicates and the split are in ours besides.
`PREPARE_TEXT=FILE` names the text (paragraphs between blank lines); without it, the bundled prose is used as it is.
`PREPARE_PROCESSES` (2) and `PREPARE_ROUNDS` (3) are environment variables too.
"""

from __future__ import annotations

import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.data.sources import read_documents
from hf_tinylm.data.tokenizer_corpus import train_from_config
from hf_tinylm.files import bundled
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.load import load_backend

METHODS = ("ours", "datasets_map", "nanogpt")
VOCAB_SIZE = 8192


def measure() -> dict[str, Any]:
    """Seconds and ids per second of each method (medians), and how many times faster ours is (median of pairs)."""
    processes, rounds = (int(os.environ.get(name, default)) for name, default in _SETTINGS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = _write_documents(folder)
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        ids: dict[str, int] = {}
        for number in range(rounds):
            for method in METHODS:
                out = folder / f"{method}-{number}"
                command = [sys.executable, "-m", "benchmarks.prepare", method, str(folder), str(out), str(processes)]
                environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / f"cache-{method}-{number}")}
                began = time.perf_counter()
                done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
                seconds[method].append(time.perf_counter() - began)
                ids[method] = int(done.stdout.split()[-1])
        equal = _ids_are_equal(folder, texts)
    return {
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "processes": processes,
        "ids_equal_to_tokenizers": equal,
        "methods": {
            method: {
                "seconds": statistics.median(seconds[method]),
                "ids": ids[method],
                "ids_per_second": ids[method] / statistics.median(seconds[method]),
            }
            for method in METHODS
        },
        "times_faster_than": {
            method: statistics.median(a / b for a, b in zip(seconds[method], seconds["ours"], strict=True))
            for method in METHODS[1:]
        },
    }


_SETTINGS = (("PREPARE_PROCESSES", "2"), ("PREPARE_ROUNDS", "3"))


def _write_documents(folder: Path) -> list[str]:
    """The documents as folder/text.jsonl, each once, and a tokenizer of them in folder/tokenizer."""
    text = folder / "text.txt"
    given = os.environ.get("PREPARE_TEXT")
    if given is None:
        names = ("austen.txt.xz", "kjv.txt.xz")
        text.write_bytes(b"\n\n".join(lzma.decompress(bundled("recipes", "corpora", n).read_bytes()) for n in names))
    else:
        text = Path(given)
    source = SourceSection("text", str(text), splitter="paragraphs_4096")
    texts = list(dict.fromkeys(document.text for document in read_documents(source, Skipped())))
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    config = RunConfig()
    config.tokenizer.tokenizer_path, config.tokenizer.vocab_size = str(folder / "tokenizer"), VOCAB_SIZE
    config.data.sources = [source]
    train_from_config(config, progress=False)
    return texts


def _ids_are_equal(folder: Path, texts: list[str]) -> bool:
    """Whether every document has the ids of the HF tokenizer in our shards, in the order of the text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    expected = sorted([0, *encoding.ids] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    shards = load_shards(folder / "ours-0")
    found = sorted(
        shard.ids[start:end].tolist()
        for shard in shards.train + shards.validation
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
    )
    return found == expected


def ours(folder: Path, out: Path, processes: int) -> int:
    """`hf-tinylm prepare`."""
    config = RunConfig()
    config.tokenizer.tokenizer_path, config.data.shards = str(folder / "tokenizer"), str(out)
    config.data.num_workers = processes
    config.data.sources = [SourceSection("text", str(folder / "text.jsonl"))]
    return int(prepare(config, progress=False)["ids"])


def datasets_map(folder: Path, out: Path, processes: int) -> int:
    """`datasets.map` with the tokenizer of transformers, then `save_to_disk`."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train")

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"input_ids": [[0, *ids] for ids in tokenizer(batch["text"], add_special_tokens=False)["input_ids"]]}

    encoded = rows.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
    encoded.save_to_disk(str(out))
    return int(pc.sum(pc.list_value_length(encoded.data.column("input_ids"))).as_py())


def nanogpt(folder: Path, out: Path, processes: int) -> int:
    """nanoGPT's way: tiktoken inside `datasets.map`, then one memory map filled batch by batch."""
    from datasets import load_dataset

    encoder = FastEncoder(load_backend(folder / "tokenizer"))._tiktoken
    assert encoder is not None
    rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train")

    def encode(row: dict[str, str]) -> dict[str, Any]:
        ids = [0, *encoder.encode_ordinary(row["text"])]
        return {"ids": ids, "len": len(ids)}

    encoded = rows.map(encode, num_proc=processes, remove_columns=["text"])
    total = int(np.sum(encoded["len"], dtype=np.uint64))
    stream = np.memmap(str(out), dtype=np.uint16, mode="w+", shape=(total,))
    position, batches = 0, min(64, len(encoded))
    for index in range(batches):
        part = encoded.shard(num_shards=batches, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(part["ids"])
        stream[position : position + len(ids)] = ids
        position += len(ids)
    stream.flush()
    return total


if __name__ == "__main__":
    method, folder, out, processes = sys.argv[1:]
    print(
        {"ours": ours, "datasets_map": datasets_map, "nanogpt": nanogpt}[method](
            Path(folder), Path(out), int(processes)
        )
    )
