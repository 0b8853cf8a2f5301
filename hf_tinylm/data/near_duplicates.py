"""Near duplicates by datatrove's MinHash: of documents that share most of their five-word sequences, one is kept.

A document counts with the text that its ids spell. Words are runs of letters and digits, and single characters of
scripts without spaces. Documents that share 68% of the five-word sequences of both are found with a probability of
one half, with 80% of 0.92 (14 buckets of 8 hashes, datatrove's defaults); those under five words never.

`python -m hf_tinylm.data.near_duplicates FOLDER STAGE FIRST STEP` is a worker process: it does the tasks FIRST,
FIRST + STEP, ... of a stage on the files that `find_near_duplicates` wrote to FOLDER.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingExtraError, PreparationError
from ..files import read_json, write_json
from ..tokenization.encoder import reference_encoder
from ..tokenization.load import BackendTokenizer, parse_backend
from .ledger import Ledger
from .workers import worker_environment

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.dedup import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger as datatrove_logger
    from datatrove.utils.word_tokenizers import WordTokenizer
except ImportError as error:
    raise MissingExtraError("datatrove", "scale", "data.near_duplicates: minhash") from error

# Documents of one signature file. The number of files follows from the documents, so workers change nothing.
TASK_DOCUMENTS = 20_000
ENTRY = np.dtype([("number", "<u8"), ("part", "<u4"), ("start", "<u8"), ("ids", "<u8")])
MEMBER = np.dtype([("document", "<u4"), ("cluster", "<u4")])
CONFIG = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))  # its xxhash needs a release of xxhash before 4
# Kana, Han, Thai, Lao, Burmese and Khmer are written without spaces between words.
_SPACELESS = r"\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")


class Words(WordTokenizer):
    """Words of any language, without a model of it."""

    def word_tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """The text as one sentence: the base class asks for this, MinHash does not."""
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Where that sentence is."""
        return [(0, len(text))]


def find_near_duplicates(
    ledger: Ledger, tokenizer: BackendTokenizer, dtype: np.dtype[Any], folder: Path, processes: int, any_order: bool
) -> np.ndarray:
    """Numbers, int64 (n,), of the documents of a ledger that are near duplicates of an earlier one.

    Documents that the ledger has dropped are not looked at.

    Args:
        dtype: of the ids in the parts of the ledger.
        folder: a new folder for files of this call.
        processes: worker processes at most.
        any_order: "earlier" must not depend on the order of reading: then it is the order of sources and, within one,
            of content digests.

    Raises:
        PreparationError: a worker process died.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    files = [str(part.path.with_suffix(".ids")) for part in ledger.parts]
    write_json(folder / "facts.json", {"files": files, "dtype": dtype.str, "task_documents": TASK_DOCUMENTS})
    with open(folder / "documents", "wb") as file:
        for block in ledger.kept(any_order):
            entries = np.empty(len(block[0]), ENTRY)
            for name, values in zip(ENTRY.names or (), block, strict=True):
                entries[name] = values
            entries.tofile(file)
    _run_stage(folder, "sign", processes)
    _run_stage(folder, "match", processes)
    datatrove_logger.disable("datatrove")
    cluster = MinhashDedupCluster(str(folder / "matches"), str(folder / "clusters"), CONFIG, save_cluster_id=True)
    cluster.run(None, 0, 1)
    later = _all_but_the_first(folder / "clusters")
    found: np.ndarray = _documents(folder)["number"][later].astype(np.int64)
    shutil.rmtree(folder)
    return found


def _all_but_the_first(folder: Path) -> np.ndarray:
    """Places (n,) among the documents looked at, of those that are not the first of their cluster."""
    places, clusters = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for path in sorted(folder.glob("*.clusters")):
        members = np.fromfile(path, MEMBER)
        places.append(int(path.stem) * TASK_DOCUMENTS + members["document"].astype(np.int64))
        clusters.append(members["cluster"].astype(np.int64))
    place, cluster = np.concatenate(places), np.concatenate(clusters)
    order = np.lexsort((place, cluster))
    place, cluster = place[order], cluster[order]
    later: np.ndarray = place[1:][cluster[1:] == cluster[:-1]]
    return later


def _documents(folder: Path) -> np.ndarray:
    """The documents to look at (n,), of type `ENTRY`."""
    return np.memmap(folder / "documents", ENTRY, "r") if (folder / "documents").stat().st_size else np.empty(0, ENTRY)


def _run_stage(folder: Path, stage: str, processes: int) -> None:
    """Do all tasks of a stage, in worker processes unless the documents are few."""
    processes = min(processes, _tasks(folder, stage))
    if processes < 2 or _tasks(folder, "sign") < 2:
        run_tasks(folder, stage, 0, 1)
        return
    command = [sys.executable, "-m", "hf_tinylm.data.near_duplicates", str(folder), stage]
    workers = [
        subprocess.Popen([*command, str(first), str(processes)], env=worker_environment()) for first in range(processes)
    ]
    try:
        for worker in workers:
            if worker.wait() != 0:
                raise PreparationError(
                    f"a worker process (pid {worker.pid}) that looked for near duplicates ended with exit code "
                    f"{worker.returncode}. Run the same command again, with fewer --num_workers if memory ran out."
                )
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _tasks(folder: Path, stage: str) -> int:
    documents = len(_documents(folder))
    size = read_json(folder / "facts.json")["task_documents"]
    return -(-documents // size) if stage == "sign" else CONFIG.num_buckets


def run_tasks(folder: Path, stage: str, first: int, step: int) -> None:
    """Do every `step`-th task of a stage: "sign" signatures of documents, "match" equal ones of a bucket."""
    datatrove_logger.disable("datatrove")
    tasks = _tasks(folder, stage)
    for task in range(first, tasks, step):
        run: PipelineStep
        if stage == "sign":
            run = MinhashDedupSignature(str(folder / "signatures"), CONFIG, language=Words())
            run.run(_texts(folder, task), task, tasks)
        else:
            run = MinhashDedupBuckets(str(folder / "signatures"), str(folder / "matches"), config=CONFIG)
            run.run(None, task, tasks)


def _texts(folder: Path, task: int) -> Iterator[Document]:
    """The documents of a signature task."""
    facts = read_json(folder / "facts.json")
    dtype = np.dtype(facts["dtype"])
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    decoder = reference_encoder(parse_backend(text, "the worker's tokenizer"))
    part, file = -1, -1
    try:
        for entry in _documents(folder)[task * facts["task_documents"] :][: facts["task_documents"]]:
            if entry["part"] != part:
                if file >= 0:
                    os.close(file)
                part = int(entry["part"])
                file = os.open(facts["files"][part], os.O_RDONLY)
            content = os.pread(file, int(entry["ids"]) * dtype.itemsize, int(entry["start"]) * dtype.itemsize)
            ids = np.frombuffer(content, dtype).tolist()
            yield Document(decoder.decode(ids, skip_special_tokens=False), str(entry["number"]))
    finally:
        if file >= 0:
            os.close(file)


if __name__ == "__main__":
    run_tasks(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
