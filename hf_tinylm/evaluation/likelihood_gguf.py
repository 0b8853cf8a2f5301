"""Log-probabilities of spans under a GGUF file, from the logits of llama.cpp: a quantized export, scored alike."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..errors import ConfigError, DataError, MissingExtraError
from ..tokenization.special import END_OF_TEXT
from .likelihood import Question, Span, SpanScore, gathered, shared_length

_AT_ONCE = 128  # tokens of one call: llama.cpp keeps float32 logits of the scored ones
_SMALL_FILE_BYTES = 200_000_000  # threads wait for each other by spinning: on a small model one is fastest


class LlamaCppEngine:
    """A GGUF file on the CPU: float32 key/value cache, no flash attention, one sequence.

    Args:
        path: the file.
        process: (index, number): this process scores every number-th question; results are gathered on each.
        about: what `facts` reports besides.

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
        ConfigError: the file is missing, or llama.cpp does not load it.
    """

    def __init__(self, path: Path, process: tuple[int, int] = (0, 1), about: dict[str, Any] | None = None) -> None:
        if not path.is_file():
            raise ConfigError(f"{path} does not exist. Give a GGUF file.")
        if importlib.util.find_spec("llama_cpp") is None:
            raise MissingExtraError("llama-cpp-python", "quantize", "scoring a GGUF file")
        self._api = api = _quiet_api()
        self.path, self.process, self.about = path, process, about or {}
        settings = api.llama_model_default_params()
        settings.n_gpu_layers = 0
        settings.use_extra_bufts = False  # repacked weights run AMX tiles, which kill the process where they are masked
        self._model = api.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise ConfigError(f"{path} is no GGUF file that llama.cpp loads. Check it: hf-tinylm verify-gguf.")
        weakref.finalize(self, api.llama_model_free, self._model)
        self._vocab = api.llama_model_get_vocab(self._model)
        self.vocab_size = int(api.llama_vocab_n_tokens(self._vocab))
        self.max_length: int | None = int(api.llama_model_n_ctx_train(self._model))
        begin = int(api.llama_vocab_bos(self._vocab))
        self.prefix: tuple[int, ...] = (begin,) if api.llama_vocab_get_add_bos(self._vocab) else ()
        end_of_text = self._tokenize(END_OF_TEXT, special=True)
        self.start_id = end_of_text[0] if len(end_of_text) == 1 else begin

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of raw texts by llama.cpp's own tokenizer; text that spells a special token has ordinary ids."""
        return [self._tokenize(text, special=False) for text in texts]

    def facts(self) -> dict[str, Any]:
        """What was said at the start, and how the file runs."""
        return {**self.about, "device": "cpu", "precision": "as in the file, float32 cache", "batch_size": 1}

    def score(self, questions: Sequence[Question], progress: bool = False) -> list[list[SpanScore]]:
        """Log-probabilities of every span, in the order given; every process gets all of them.

        Raises:
            DataError: a span that is too long for the model.
        """
        fitted = [[span.fitted(self.max_length) for span in question] for question in questions]
        index, processes = self.process
        longest = max((len(span.ids) for question in fitted for span in question), default=1)
        found = {}
        with self._context(longest) as context:
            mine = range(index, len(fitted), processes)
            for number in tqdm(mine, desc="score", disable=not progress or index > 0):
                found[number] = self._score_question(context, fitted[number])
        return gathered(found, len(fitted), processes)

    def _score_question(self, context: Any, question: Question) -> list[SpanScore]:
        memory = self._api.llama_get_memory(context)
        self._api.llama_memory_clear(memory, True)
        unique = list(dict.fromkeys(question))
        shared = shared_length(unique)
        self._decode(context, unique[0].ids[:shared], 0, shared)
        found: dict[Span, SpanScore] = {}
        for span in unique:
            logprobs, greedy = self._decode(context, span.ids[shared:], shared, span.start)
            found[span] = SpanScore(np.array(logprobs, dtype=np.float32), all(greedy))
            if not self._api.llama_memory_seq_rm(memory, 0, shared, -1):  # a state that cannot be taken back
                self._api.llama_memory_clear(memory, True)
                self._decode(context, span.ids[:shared], 0, shared)
        return [found[span] for span in question]

    def _decode(self, context: Any, ids: Sequence[int], at: int, start: int) -> tuple[list[float], list[bool]]:
        """Read `ids`, which stand from position `at`; log-probability and first choice of those from `start` on.

        The last id is read only when it is not to be scored: nothing is asked after it.
        """
        logprobs: list[float] = []
        greedy: list[bool] = []
        end = at + len(ids)
        read = ids if end <= start else ids[:-1]
        for first in range(0, len(read), _AT_ONCE):
            part = read[first : first + _AT_ONCE]
            wanted = [position + 1 for position in range(at + first, at + first + len(part))]
            self._run(context, part, at + first, [start <= w < end for w in wanted])
            for place, position in enumerate(wanted):
                if start <= position < end:
                    pointer = self._api.llama_get_logits_ith(context, place)
                    logits = np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)).astype(np.float64)
                    target, highest = ids[position - at], logits.max()
                    logprobs.append(float(logits[target] - highest - np.log(np.exp(logits - highest).sum())))
                    greedy.append(int(logits.argmax()) == target)
        return logprobs, greedy

    def _run(self, context: Any, ids: Sequence[int], at: int, wanted: Sequence[bool]) -> None:
        batch = self._api.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for place, id_ in enumerate(ids):
                batch.token[place], batch.pos[place], batch.logits[place] = id_, at + place, wanted[place]
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            if self._api.llama_decode(context, batch):
                raise DataError(f"llama.cpp could not read {len(ids)} tokens of an item with {self.path}.")
        finally:
            self._api.llama_batch_free(batch)

    @contextlib.contextmanager
    def _context(self, length: int) -> Iterator[Any]:
        settings = self._api.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = length, _AT_ONCE, _AT_ONCE
        settings.type_k = settings.type_v = self._api.GGML_TYPE_F32
        settings.flash_attn_type = self._api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        small = self.path.stat().st_size < _SMALL_FILE_BYTES
        settings.n_threads = settings.n_threads_batch = 1 if small else min(4, os.cpu_count() or 1)
        context = self._api.llama_init_from_model(self._model, settings)
        if not context:
            raise DataError(f"llama.cpp has no memory for {length:,} tokens of {self.path}. Give shorter items.")
        try:
            yield context
        finally:
            self._api.llama_free(context)

    def _tokenize(self, text: str, special: bool) -> list[int]:
        content = text.encode("utf-8")
        room = len(content) + 2
        ids = (self._api.llama_token * room)()
        count = self._api.llama_tokenize(self._vocab, content, len(content), ids, room, False, special)
        return [int(id_) for id_ in ids[:count]]


@functools.cache
def _quiet_api() -> Any:
    """llama.cpp's C interface, told once and for all to log nothing; the callback must outlive every call."""
    import llama_cpp

    llama_cpp.llama_log_set(_say_nothing(llama_cpp), ctypes.c_void_p(0))
    return llama_cpp


@functools.cache
def _say_nothing(api: Any) -> Any:
    return api.llama_log_callback(lambda level, text, data: None)
