"""K-quants by llama.cpp's own quantizer, through llama-cpp-python in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from ..errors import ExportError, MissingExtraError
from ..files import atomic_file
from .llamacpp import how_it_ended


def check_quantizer() -> None:
    """Find out before long work that the quantizer is not installed.

    Raises:
        MissingExtraError: naming the extra to install.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        raise MissingExtraError("llama-cpp-python", "quantize", "writing a K-quant such as q4_k_m")


def quantize_file(source: Path, output: Path, file_type: int) -> None:
    """Quantize an F32 GGUF file to the `general.file_type` asked for; metadata are kept.

    Raises:
        MissingExtraError: llama-cpp-python is not installed.
        ExportError: llama.cpp failed; no file is left.
    """
    check_quantizer()
    with atomic_file(output) as temporary:
        request = {"source": str(source), "output": str(temporary), "file_type": file_type}
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not temporary.is_file():
            raise ExportError(f"llama.cpp did not quantize {output.name}: {how_it_ended(done.returncode, done.stderr)}")


def _quantize_in_child() -> int:
    """The child: read one request from stdin; 0 when the file is written."""
    import llama_cpp

    request = json.load(sys.stdin)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = request["file_type"]
    params.nthread = os.cpu_count() or 1
    return int(llama_cpp.llama_model_quantize(os.fsencode(request["source"]), os.fsencode(request["output"]), params))


if __name__ == "__main__":
    raise SystemExit(_quantize_in_child())
