"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny matrices are faster on one thread, and sums do not depend on the machine's cores."""
    torch.set_num_threads(1)
