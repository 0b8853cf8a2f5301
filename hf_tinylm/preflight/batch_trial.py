"""One try of a micro-batch size: `python -m hf_tinylm.preflight.batch_trial REQUEST` answers with a line of JSON."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ..config import load_config
from ..data.windows import TokenWindows
from ..errors import exit_with_error_line
from ..modeling.factory import new_model
from ..sections import RunConfig
from ..training.arguments import training_arguments
from ..training.trainer import LMTrainer

# Micro-batches of a timed update at most: as in the run where it has fewer, else enough that the optimizer's step,
# which the run makes once for all of them, weighs little.
_MICRO_BATCHES = 4


class _Measured(Exception):
    """Enough updates were timed."""


class _Watch(TrainerCallback):
    """Times updates after the first, which also pays for what happens once, and ends the run before it saves."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.times: list[float] = []
        self.began: float | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Called when the device has finished an update."""
        now = time.monotonic()
        if self.began is not None:
            self.times.append(now - self.began - sum(self.times))
        else:
            self.began = now
        if len(self.times) >= 2 and now - self.began >= self.seconds:
            raise _Measured


def measure(config: RunConfig, vocab_size: int, seconds: float) -> dict[str, Any]:
    """Speed and peak memory of real updates on random ids."""
    rows, length = config.training.per_device_train_batch_size, config.data.sequence_length
    args = training_arguments(config)
    streams = [np.random.default_rng(0).integers(0, vocab_size, 64 * rows * length + 1, dtype=np.uint32)]
    model = new_model(config.model, vocab_size, length, config.training.seed)
    separator = 0 if config.data.document_attention else None
    windows = TokenWindows(streams, length, "permutation", 0, separator=separator)
    watch = _Watch(seconds)
    trainer = LMTrainer(model, args, windows, callbacks=[watch])
    with contextlib.suppress(_Measured):
        trainer.train()
    tokens = trainer.plan.global_batch_tokens
    on_gpu = args.device.type == "cuda"
    peak = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"fits": True, "tokens_per_second": tokens / statistics.median(watch.times), "peak_bytes": int(peak)}


def main() -> int:
    """Answer the request of the command line."""
    request = json.loads(sys.argv[1])
    if request["memory_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request["memory_limit"], request["memory_limit"]))
    config = load_config(request["config"])
    training, rows = config.training, int(request["rows"])
    micro = rows * config.data.sequence_length
    training.per_device_train_batch_size = rows
    training.global_batch_tokens = micro * min(_MICRO_BATCHES, max(1, training.global_batch_tokens // micro))
    training.batch_growth = []
    training.train_tokens = 10**6 * training.global_batch_tokens  # the watch ends it
    training.torch_compile = training.torch_compile is True  # it needs less memory, and takes a minute of each trial
    training.output_dir, training.report_to, training.warmup_steps = request["output_dir"], [], 0
    training.eval_steps = training.save_steps = training.save_minutes = training.milestone_steps = None
    training.init_from, training.init_optimizer, training.mirror_dir = None, False, None
    training.stop_after_updates = training.max_hours = training.max_cost = training.resume_from_checkpoint = None
    try:
        found = measure(config, int(request["vocab_size"]), float(request["seconds"]))
    except torch.OutOfMemoryError as error:
        found = {"fits": False, "reason": str(error).splitlines()[0][:160]}
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        found = {"fits": False, "reason": "out of memory"}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(exit_with_error_line(main))
