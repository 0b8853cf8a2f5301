"""Text to tokens on disk: `hf-tinylm prepare` beside what people use, at the same number of processes.

Every method is a fresh interpreter that reads the same JSON lines (documents of about 4 KB) and writes token ids:
start-up, reading, encoding and writing are in its time; hashing, duplicates and the split are in ours besides.

    python -m benchmarks.prepare [--text FILE] [--processes 2] [--rounds 3]
    python -m benchmarks.prepare --memory 2_000_000_000 [--processes 4]

`--text` names the text (paragraphs between blank lines); without it, the bundled prose is used. `--memory` generates a
text of so many bytes and measures what all processes of one `prepare` hold together (proportional set sizes, summed).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
import psutil
import pyarrow.compute as pc

from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.shards import load_shards
from hf_tinylm.data.sources import read_documents
from hf_tinylm.data.tokenizer_corpus import train_from_config
from hf_tinylm.files import bundled
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.load import load_backend
from hf_tinylm.tokenization.special import END_OF_TEXT

METHODS = ("ours", "datasets_map", "datatrove", "nanogpt")
VOCAB_SIZE = 8192
FILES = 12


def measure(text: str | None = None, processes: int = 2, rounds: int = 3) -> dict[str, Any]:
    """Seconds and ids per second of each method (medians), and how many times faster ours is (median of pairs)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = _write_documents(folder, text)
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        ids: dict[str, int] = {}
        for number in range(rounds):
            for method in METHODS:
                out = folder / f"{method}-{number}"
                environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / f"cache-{method}-{number}")}
                began = time.perf_counter()
                done = subprocess.run(
                    _command(method, folder, out, processes),
                    check=True,
                    capture_output=True,
                    text=True,
                    env=environment,
                )
                seconds[method].append(time.perf_counter() - began)
                ids[method] = _ids_of(method, done.stdout)
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


def _command(method: str, folder: Path, out: Path, processes: int) -> list[str]:
    """How a method is started: ours as a user does."""
    if method != "ours":
        return [sys.executable, "-m", "benchmarks.prepare", "--method", method, str(folder), str(out), str(processes)]
    return _prepare_command(folder, folder / "text.jsonl", out, processes)


def _prepare_command(folder: Path, source: Path, out: Path, processes: int) -> list[str]:
    data = {"num_workers": processes, "sources": [{"name": "text", "path": str(source)}]}
    settings = {"tokenizer": {"tokenizer_path": str(folder / "tokenizer")}, "data": data}
    (folder / "prepare.yaml").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "hf_tinylm.cli", "prepare", "--config", str(folder / "prepare.yaml"), "--json"]
    return [*command, "--shards", str(out)]


def _ids_of(method: str, printed: str) -> int:
    return int(json.loads(printed)["ids"] if method == "ours" else printed.split()[-1])


def _write_documents(folder: Path, given: str | None) -> list[str]:
    """The documents as folder/text.jsonl, each once, and a tokenizer of them in folder/tokenizer.

    datatrove shares files among its processes: folder/files holds the same lines in as many as can be needed.
    """
    text = folder / "text.txt"
    if given is None:
        names = ("austen.txt.xz", "kjv.txt.xz")
        text.write_bytes(b"\n\n".join(lzma.decompress(bundled("recipes", "corpora", n).read_bytes()) for n in names))
    else:
        text = Path(given)
    source = SourceSection("text", str(text), splitter="paragraphs_4096")
    texts = list(dict.fromkeys(document.text for document in read_documents(source, Skipped())))
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "files").mkdir()
    for number in range(FILES):
        (folder / "files" / f"{number}.jsonl").write_text("".join(lines[number::FILES]), encoding="utf-8")
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


def datatrove(folder: Path, out: Path, processes: int) -> int:
    """datatrove's tokenizer, a task for each process."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    tokenizer = str(folder / "tokenizer" / "tokenizer.json")
    steps = [
        JsonlReader(str(folder / "files")),
        DocumentTokenizer(str(out), tokenizer_name_or_path=tokenizer, eos_token=END_OF_TEXT, shuffle_documents=False),
    ]
    LocalPipelineExecutor(steps, tasks=processes, workers=processes, logging_dir=f"{out}-logs").run()
    return sum(path.stat().st_size for path in out.rglob("*.ds")) // 2


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


def measure_memory(size: int, processes: int) -> dict[str, Any]:
    """The most that one `prepare` of a generated text of `size` bytes and its workers held together, in bytes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = _write_documents(folder, None)
        source = folder / "large.jsonl"
        written = 0
        with open(source, "w", encoding="utf-8") as file:
            for number in itertools.count():
                if written >= size:
                    break
                line = json.dumps({"text": f"{number} {texts[number % len(texts)]}"}) + "\n"
                written += file.write(line)
        began, peak = time.perf_counter(), 0
        command = _prepare_command(folder, source, folder / "out", processes)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
            process = psutil.Process(run.pid)
            while run.poll() is None:
                peak = max(peak, _summed_pss(process))
                time.sleep(0.2)
            assert run.stdout is not None
            found = json.loads(run.stdout.read())
    return {
        **{"bytes": written, "documents": found["documents"], "ids": found["ids"], "processes": processes},
        **{"seconds": time.perf_counter() - began, "peak_summed_pss_bytes": peak},
    }


def _summed_pss(process: psutil.Process) -> int:
    """Bytes that a process and its workers hold, pages that they share counted once; those that just ended count 0."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += one.memory_full_info().pss
    return total


def main() -> None:
    """Print one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, metavar="BYTES")
    parser.add_argument("--method", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.method:
        method, folder, out, processes = given.method
        methods = {"datasets_map": datasets_map, "datatrove": datatrove, "nanogpt": nanogpt}
        print(methods[method](Path(folder), Path(out), int(processes)))
        return
    from .machine import report  # imports torch, for which no method should wait

    if given.memory:
        report("prepare_memory", measure_memory(given.memory, given.processes or 4))
    else:
        report("prepare", measure(given.text, given.processes or 2, given.rounds))


if __name__ == "__main__":
    main()
