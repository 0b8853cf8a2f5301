"""Encode chunks in worker processes, or in a thread of this one; results are the same wherever they come from.

A worker is a fresh interpreter that imports only what encoding needs (about 60 MB), talks over pipes and serves one
chunk at a time; a thread of this process waits for it. Death of a worker is the end of its pipe: known at once. One
that has a chunk and uses no processor time hangs: it is killed. Death of this process is the end of the workers' input:
they leave by themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np
import psutil

import hf_tinylm

from ..errors import DataError, PreparationError, TokenizerError
from ..sections import SourceSection
from ..tokenization.encoder import FastEncoder
from ..tokenization.load import BackendTokenizer, vocabulary_size
from .chunks import Chunk, Skipped
from .encoding import ROW, ChunkEncoder, Encoded, EngineMismatch, chunk_to_json, opening_frame
from .frames import read_frame, write_frame
from .shards import id_dtype

# A worker with a chunk in hand that uses no processor time for this long hangs. A slow one uses it all the time.
HANG_SECONDS = 40.0
LOOK_SECONDS = 1.0


class Workers:
    """A pool that encodes chunks: `processes` worker processes, or with 0 a thread of this process.

    Args:
        sources: the sections that chunks belong to, by number.
        tokenizer: what to encode with.
        engine: "tiktoken" or "tokenizers".
        separator_id: an id that no text may give.
        processes: worker processes.
    """

    def __init__(
        self,
        sources: Sequence[SourceSection],
        tokenizer: BackendTokenizer,
        engine: str,
        separator_id: int,
        processes: int,
    ) -> None:
        self._sources, self._tokenizer, self._engine, self._separator_id = sources, tokenizer, engine, separator_id
        self._dtype = id_dtype(vocabulary_size(tokenizer))
        self._here: ChunkEncoder | None = None
        self._greeted: set[int] = set()
        self._started = [self._start() for _ in range(processes)]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for worker in self._started:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(processes, 1))
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._hung: set[int] = set()
        self._ended = threading.Event()
        if processes:
            threading.Thread(target=self._watch, daemon=True, name="watch workers").start()

    @property
    def processes(self) -> int:
        """Worker processes of this pool."""
        return len(self._started)

    def submit(self, chunk: Chunk, source: int, first: bool) -> Future[Encoded]:
        """Begin to encode a chunk; the future raises what encoding raised, or that its worker died."""
        if not self._started:
            return self._threads.submit(self.encode_here, chunk, source, first)
        return self._threads.submit(self._encode_there, chunk, source, first)

    def encode_here(self, chunk: Chunk, source: int, first: bool, limit: int | None = None) -> Encoded:
        """Encode a chunk in this process, `limit` documents at most."""
        if self._here is None:
            encoder = FastEncoder(self._tokenizer, self._engine)
            size = vocabulary_size(self._tokenizer)
            self._here = ChunkEncoder(self._sources, encoder, size, self._separator_id)
        return self._here.encode(chunk, source, first, limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers at once: what they have in hand, nobody waits for."""
        self._ended.set()
        self._threads.shutdown(wait=error is None, cancel_futures=True)
        for worker in self._started:
            worker.kill()
        for worker in self._started:
            worker.wait()
            if error is None and worker.stdin is not None and worker.stdout is not None:
                worker.stdin.close()
                worker.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "hf_tinylm.data.encoding"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
        )

    def _greet(self, worker: subprocess.Popen[bytes]) -> None:
        """Hand over sources and tokenizer, when there is a chunk to encode: all workers start up side by side."""
        if worker.pid not in self._greeted:
            assert worker.stdin is not None
            opening = opening_frame(self._sources, self._engine, self._separator_id)
            write_frame(worker.stdin, opening, self._tokenizer.backend_tokenizer.to_str().encode("utf-8"))
            self._greeted.add(worker.pid)

    def _encode_there(self, chunk: Chunk, source: int, first: bool) -> Encoded:
        worker = self._idle.get()
        self._busy.add(worker)
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            self._greet(worker)
            header = {"chunk": chunk_to_json(chunk), "source": source, "first": first}
            write_frame(worker.stdin, header, chunk.payload)
            answer = read_frame(worker.stdout)
        except BrokenPipeError:
            answer = None
        finally:
            self._busy.discard(worker)
            self._idle.put(worker)  # a dead one too: who takes it next must not wait for ever
        if answer is None:
            raise PreparationError(self._death(worker, chunk, source))
        facts, blocks = answer
        if "mismatch" in facts:
            raise EngineMismatch(facts["mismatch"])
        if "error" in facts:
            raise (DataError if facts["data"] else TokenizerError)(facts["error"])
        rows, ids = np.frombuffer(blocks[0], ROW), np.frombuffer(blocks[1], self._dtype)
        return Encoded(rows, ids, Skipped.from_json(facts["skipped"]))

    def _watch(self) -> None:
        """Kill a worker that hangs, so that the thread that waits for it goes on.

        Its silence is counted in looks, not by the clock: when this process was stopped as well, it says nothing.
        """
        seen: dict[int, tuple[float, int]] = {}
        while not self._ended.wait(LOOK_SECONDS):
            busy = self._busy.copy()
            seen = {worker.pid: self._look(worker, *seen.get(worker.pid, (-1.0, 0))) for worker in busy}
            for worker in busy:
                if seen[worker.pid][1] * LOOK_SECONDS >= HANG_SECONDS:
                    self._hung.add(worker.pid)
                    worker.kill()

    @staticmethod
    def _look(worker: subprocess.Popen[bytes], before: float, looks: int) -> tuple[float, int]:
        """Processor seconds of a worker, and how many looks in a row found no more of them."""
        try:
            times = psutil.Process(worker.pid).cpu_times()
        except psutil.Error:  # it is dead, which its pipe tells
            return before, 0
        used = times.user + times.system
        return used, looks + 1 if used == before else 0

    def _death(self, worker: subprocess.Popen[bytes], chunk: Chunk, source: int) -> str:
        try:
            code = worker.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if worker.pid in self._hung:
            how = f"did nothing for {HANG_SECONDS:g} s, and was ended,"
        place = f"byte {chunk.pieces[0][0]:,}" if chunk.pieces else f"{chunk.unit} {chunk.first:,}"
        return (
            f"a worker process (pid {worker.pid}) {how} while it encoded {chunk.path} from {place} on (source "
            f"{self._sources[source].name}). Finished parts are kept: run the same command again to go on, with fewer "
            f"--num_workers if memory ran out."
        )


def worker_environment() -> dict[str, str]:
    """The environment of a worker process: one thread, and this very package, installed or not."""
    package = str(Path(hf_tinylm.__file__).resolve().parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    return {**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths)}
