"""Freed memory stays with the process: it is not faulted in a second time."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from hf_tinylm.training.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100_000_000, dtype=np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is asked")
def test_a_large_array_is_faulted_in_once() -> None:
    faults = {
        kind: int(subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, check=True).stdout)
        for kind in ("default", "kept")
    }
    assert faults["kept"] < faults["default"] / 10
