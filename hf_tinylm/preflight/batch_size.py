"""The micro-batch size that fits and the one that is fastest, measured on this device with real updates.

Each size is tried in a process of its own, since running out of memory may kill it: that is a result, not a failure.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import save_config
from ..errors import ConfigError, TrainingError
from ..planning.memory import MemorySettings, peak_memory
from ..planning.pack_facts import pack_facts
from ..planning.shape import ModelShape
from ..sections import RunConfig

LONGEST_TRY = 900.0  # seconds; a size that needs longer for three updates is of no use
_KILLED = (-9, 137)


@dataclass(frozen=True)
class Trial:
    """One size: whether it fits, its median speed, its peak memory (of the process on a CPU, else of the device)."""

    rows: int
    fits: bool
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class BatchSearch:
    """Every trial by size; `largest` fits, `fastest` is the one to use."""

    trials: list[Trial]
    largest: int
    fastest: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """A table, and what to use."""
        lines = ["rows     tokens/s    peak memory"]
        for trial in self.trials:
            if trial.fits:
                speed, peak = trial.tokens_per_second or 0.0, (trial.peak_bytes or 0) / 2**30
                lines.append(f"{trial.rows:<6} {speed:>10,.0f}   {peak:>8.2f} GiB")
            else:
                lines.append(f"{trial.rows:<6} {'-':>10}   {trial.reason}")
        return [*lines, f"largest that fits: {self.largest}; fastest: {self.fastest}"]


def sizes_of(config: RunConfig, num_processes: int, max_rows: int | None = None) -> list[int]:
    """Rows that make every update a whole number of micro-batches on every process, ascending.

    Raises:
        ConfigError: the update cannot be shared among so many processes, or no size is small enough.
    """
    batch = math.gcd(config.training.global_batch_tokens, *(size for _, size in config.training.batch_growth))
    windows, rest = divmod(batch, config.data.sequence_length * num_processes)
    if rest or not windows:
        what = "greatest common divisor of global_batch_tokens and batch_growth"
        what = what if config.training.batch_growth else "global_batch_tokens"
        raise ConfigError(
            f"{what}={batch:,} is no whole number of windows of "
            f"{config.data.sequence_length:,} tokens on each of {num_processes} processes. Change one of them."
        )
    sizes = [rows for rows in range(1, windows + 1) if windows % rows == 0 and rows <= (max_rows or windows)]
    if not sizes:
        raise ConfigError(f"max_rows={max_rows} leaves no size to try; give 1 or more.")
    return sizes


def search(sizes: Sequence[int], attempt: Callable[[int], Trial]) -> BatchSearch:
    """Double until a size does not fit, refine between, then try the neighbours of the fastest.

    Args:
        sizes: the possible ones, ascending.

    Raises:
        TrainingError: not even the smallest fits.
    """
    tried: dict[int, Trial] = {}

    def fits(rows: int) -> bool:
        if rows not in tried:
            tried[rows] = attempt(rows)
        return tried[rows].fits

    low, high = -1, len(sizes)  # positions: the largest known to fit, the smallest known not to
    position = 0
    while position < high:
        if not fits(sizes[position]):
            high = position
            break
        low = position
        doubled = [i for i in range(low + 1, len(sizes)) if sizes[i] >= 2 * sizes[low]]
        position = doubled[0] if doubled else len(sizes) - 1 if low < len(sizes) - 1 else high
    if low < 0:
        raise TrainingError(
            f"Not even {sizes[0]} row(s) of a micro-batch fit: {tried[sizes[0]].reason}. Use a smaller model or "
            "sequence_length, or gradient_checkpointing: true."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle]) else (low, middle)
    fastest = _fastest(tried)
    for neighbour in (sizes.index(fastest) - 1, sizes.index(fastest) + 1):
        if 0 <= neighbour <= low:
            fits(sizes[neighbour])
    return BatchSearch([tried[rows] for rows in sorted(tried)], sizes[low], _fastest(tried))


def _fastest(tried: dict[int, Trial]) -> int:
    return max((trial for trial in tried.values() if trial.fits), key=lambda trial: trial.tokens_per_second or 0.0).rows


def find_batch(
    config: RunConfig, num_processes: int = 1, seconds: float = 10.0, max_rows: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> BatchSearch:  # fmt: skip
    """Measure sizes for a configuration on this device; `seconds` is how long each is timed at least.

    Args:
        num_processes: processes that will share an update; the measurement runs on one.
        tell: gets a line on each size as it begins.

    Raises:
        TrainingError: not even one row fits, or a try fails for another reason than memory.
    """

    def attempt(rows: int) -> Trial:
        tell(f"trying {rows} row(s) of {config.data.sequence_length:,} tokens")
        too_large = _too_large(config, rows)
        if too_large is not None:
            return Trial(rows, fits=False, reason=too_large)
        return try_size(config, rows, seconds)

    return search(sizes_of(config, num_processes, max_rows), attempt)


def _too_large(config: RunConfig, rows: int) -> str | None:
    """On a CPU, why a size is not tried: the system would take memory from other programs before it said no."""
    from ..training.arguments import accelerator_present, precision_of

    if not config.training.use_cpu and accelerator_present():
        return None
    import psutil

    shape = ModelShape.from_config(config.model, _vocab_size(config))
    settings = MemorySettings(
        tokens=rows * config.data.sequence_length,
        sequence_length=config.data.sequence_length,
        bf16=precision_of(config.training, use_cpu=True)[0] != "fp32",
        checkpointing=config.training.gradient_checkpointing,
        eager_attention=config.model.attn_implementation == "eager",
        document_attention=config.data.document_attention,
        on_cpu=True,
        optim=config.training.optim,
    )
    needed, free = sum(peak_memory(shape, settings).values()), psutil.virtual_memory().available
    if needed <= free:
        return None
    return f"not tried: about {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} are free"


def _vocab_size(config: RunConfig) -> int:
    return pack_facts(config.data).vocab_size or config.tokenizer.vocab_size


def try_size(config: RunConfig, rows: int, seconds: float, memory_limit: int | None = None) -> Trial:
    """Run updates with `rows` in a process of its own; running out of memory there makes a trial that does not fit.

    Args:
        memory_limit: bytes of data that the process may hold; None: as many as there are.

    Raises:
        TrainingError: it failed for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="find-batch-") as folder:
        path = Path(folder) / "config.yaml"
        save_config(config, path)
        request = {"config": str(path), "rows": rows, "vocab_size": _vocab_size(config), "seconds": seconds}
        request |= {"memory_limit": memory_limit, "output_dir": str(Path(folder) / "run")}
        command = [sys.executable, "-m", "hf_tinylm.preflight.batch_trial", json.dumps(request)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_TRY, check=False)
        except subprocess.TimeoutExpired:
            return Trial(rows, fits=False, reason=f"three updates took longer than {LONGEST_TRY:,.0f} s")
    if done.returncode in _KILLED:
        return Trial(rows, fits=False, reason="killed by the system, as it does when memory runs out")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TrainingError(f"The try with {rows} row(s) failed: {last.removeprefix('error: ')}")
    return Trial(rows, **json.loads(done.stdout.strip().splitlines()[-1]))
