"""Every random generator of a process as named tensors, so that a resume continues the same draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .xla import uses_xla


def random_tensors() -> dict[str, torch.Tensor]:
    """State of Python's, NumPy's, torch's CPU and (if there is one) this process's GPU or XLA generator."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = state
    assert version == 3, f"Python's generator has state version {version}, 3 is known"
    assert kind == "MT19937", f"NumPy's global generator is {kind}, MT19937 is known"
    tensors = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy.keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy.counters": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.cached": torch.tensor([cached], dtype=torch.float64),
        "torch.cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["torch.cuda"] = torch.cuda.get_rng_state()
    if uses_xla():
        import torch_xla.core.xla_model as xm

        unsigned = np.array([xm.get_rng_state()], dtype=np.uint64)  # int64 holds half of these states
        tensors["torch.xla"] = torch.from_numpy(unsigned.view(np.int64))
    return tensors


def restore_random(tensors: dict[str, torch.Tensor]) -> None:
    """Put back what `random_tensors` gave; a generator that this machine lacks is left alone."""
    has_python_gauss, gauss = tensors["python.gauss"].tolist()
    random.setstate((3, tuple(tensors["python.words"].tolist()), gauss if has_python_gauss else None))
    position, has_gauss = tensors["numpy.counters"].tolist()
    keys = tensors["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(tensors["numpy.cached"])))
    torch.set_rng_state(tensors["torch.cpu"])
    if "torch.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["torch.cuda"])
    if "torch.xla" in tensors and uses_xla():
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int(tensors["torch.xla"].numpy().view(np.uint64)[0]))


@contextmanager
def undisturbed_random() -> Iterator[None]:
    """Leave every generator as it was, whatever the block draws."""
    saved = random_tensors()
    try:
        yield
    finally:
        restore_random(saved)
