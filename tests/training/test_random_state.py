from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hf_tinylm.training.random_state import random_tensors, restore_random, undisturbed_random


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        float(torch.rand(1)),
        float(torch.randn(1)),
    ]


def test_every_generator_continues_from_a_file_as_if_never_stopped(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second normal number waiting
    np.random.randn()
    save_file(random_tensors(), tmp_path / "rng.safetensors")
    expected = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draws() != expected
    restore_random(load_file(tmp_path / "rng.safetensors"))
    assert draws() == expected


def test_a_block_that_draws_leaves_no_trace() -> None:
    saved = random_tensors()
    expected = draws()
    restore_random(saved)
    with undisturbed_random():
        draws()
    assert draws() == expected
