"""The C sources of this folder as one library, compiled when a run first needs it, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from ...files import atomic_file, cache_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention.c", "loss.c"))
HEADER = Path(__file__).with_name("numbers.h")
FLAGS = (
    *("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq"),
    *("-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
)
_VECTORS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
_TILES = frozenset({"amx_tile", "amx_bf16"})


def has_vectors() -> bool:
    """Whether this processor has AVX-512 with bfloat16."""
    return _abilities() >= _VECTORS


def has_tiles() -> bool:
    """Whether this processor also multiplies bfloat16 matrices in tiles (AMX)."""
    return _abilities() >= _VECTORS | _TILES


def _abilities() -> frozenset[str]:
    """What Linux says of an x86 processor; nothing elsewhere."""
    told = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not told.is_file():
        return frozenset()
    lines = told.read_text(encoding="utf-8", errors="replace").splitlines()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled sources, from the cache if they are there.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, one that does not know these processors, or nowhere to write.
    """
    built = target()
    try:
        return ctypes.CDLL(str(built))
    except OSError:  # not there, or of another system that shares the folder
        _build(built)
        return ctypes.CDLL(str(built))


def target() -> Path:
    """Where the compiled sources are kept, under a name that their text and the flags decide."""
    text = b"".join(path.read_bytes() for path in (*SOURCES, HEADER)) + " ".join(FLAGS).encode()
    return cache_folder() / "kernels" / f"hf_tinylm-{hashlib.sha256(text).hexdigest()[:16]}.so"


def _build(to: Path) -> None:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise OSError("no C compiler (cc, gcc, clang; CC names another one)")
    with atomic_file(to) as temporary:
        command = [*compiler.split(), *FLAGS, *map(str, SOURCES), "-o", str(temporary), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise OSError(f"{compiler} ended with {done.returncode}: {done.stderr.strip()}")
