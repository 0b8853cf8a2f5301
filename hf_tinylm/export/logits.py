"""Raw logits of a GGUF file at every position, by llama-cpp-python in a process of its own.

The child (`python -m hf_tinylm.export.logits`) reads one JSON request from stdin and writes float32 rows to stdout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import VerificationError
from .llamacpp import how_it_ended

# Source: ggml, include/ggml.h, enum ggml_type; llama.cpp, include/llama.h, enum llama_flash_attn_type.
_GGML_TYPE_F32, _FLASH_ATTENTION_DISABLED = 0, 0


def every_logit_is_available() -> bool:
    """Whether llama-cpp-python is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def raw_logits(gguf: Path, rows: list[list[int]], vocab_size: int, threads: int) -> Iterator[np.ndarray]:
    """Logits (positions, V) in float32 of each row of ids, each row from an empty cache.

    Pinned for comparisons: CPU, F32 key/value cache, no flash attention.

    Raises:
        VerificationError: llama.cpp does not load the file, dies, or has another vocabulary.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            request = {"path": str(gguf.resolve()), "rows": rows, "vocab_size": vocab_size, "threads": threads}
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
            for row in rows:
                data = child.stdout.read(4 * len(row) * vocab_size)
                if len(data) != 4 * len(row) * vocab_size:
                    raise VerificationError(f"llama.cpp gave no logits for {gguf}: {_last_words(child, log)}")
                yield np.frombuffer(data, dtype="<f4").reshape(len(row), vocab_size)
        except BrokenPipeError as error:
            raise VerificationError(f"llama.cpp gave no logits for {gguf}: {_last_words(child, log)}") from error
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _last_words(child: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    code = child.wait()
    log.seek(0)
    return how_it_ended(code, log.read().decode("utf-8", "replace"))


def _answer() -> int:
    """The child."""
    import llama_cpp

    request: dict[str, Any] = json.load(sys.stdin)
    rows, vocab_size = request["rows"], request["vocab_size"]
    longest = max(map(len, rows))
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.check_tensors = True
    model_params.use_extra_bufts = False  # repacked kernels (AMX) die where a sandbox hides what the processor has
    model = llama_cpp.llama_model_load_from_file(os.fsencode(request["path"]), model_params)
    if not model:
        return 1
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = longest
    params.n_threads = params.n_threads_batch = request["threads"]
    params.type_k = params.type_v = _GGML_TYPE_F32
    params.flash_attn_type = _FLASH_ATTENTION_DISABLED
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        return 1
    found = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    if found != vocab_size:
        print(f"the file has {found} tokens, the model {vocab_size}", file=sys.stderr)
        return 1
    batch = llama_cpp.llama_batch_init(longest, 0, 1)
    for row in rows:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(row)
        for place, token in enumerate(row):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if llama_cpp.llama_decode(context, batch):
            print("llama_decode failed", file=sys.stderr)
            return 1
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(row), vocab_size))
        sys.stdout.buffer.write(logits.tobytes())
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(_answer())
