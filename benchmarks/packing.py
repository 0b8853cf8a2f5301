"""Whether windows that keep to documents learn more from equal compute than plain ones, which begin anywhere.

    python -m benchmarks.packing --text novels.txt essays.txt --tokens 401_408 --seeds 3 --key value ...

`plain` is what the trainer reads: windows of T + 1 ids side by side through the whole stream. `best fit` cuts each
document into pieces of T + 1 ids from its start, a piece beginning with the id that the one before it ended with, and
packs what is left of all documents into windows by best fit, longest first. Of a piece that follows another one in its
window the first id is a target only where it begins a document; what stays free is padding, without a target. Source:
Ding et al. 2024, arXiv 2404.10830. Both train on as many windows, so on equal compute; text, split and the score over
plain windows are those of `benchmarks.learn`. The second score is over the held-out documents packed by best fit: there
each is read from its start.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import TrainerCallback

from hf_tinylm.config import load_config
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.loss import IGNORE_INDEX
from hf_tinylm.sections import RunConfig
from hf_tinylm.tokenization.special import END_OF_TEXT_ID
from hf_tinylm.training.arguments import cpu_threads, training_arguments
from hf_tinylm.training.trainer import LMTrainer

from .learn import LENGTH, Task, documents_of, task_of
from .machine import machine

Piece = tuple[int, int]  # first id in the stream, ids


def pieces_of(stream: np.ndarray, length: int) -> list[Piece]:
    """Every document cut into pieces of `length` + 1 ids, each beginning with the last id of the one before it."""
    starts = np.flatnonzero(stream == END_OF_TEXT_ID)
    found = []
    for start, end in zip(starts, [*starts[1:], len(stream)], strict=True):
        found += [(int(s), int(min(end - s, length + 1))) for s in range(start, max(start + 1, end - 1), length)]
    return found


def best_fit(pieces: Sequence[Piece], capacity: int) -> list[list[Piece]]:
    """Pieces in windows of `capacity` ids: longest first, each where it leaves least free."""
    windows: list[list[Piece]] = []
    free: list[tuple[int, int]] = []  # (ids, window), ascending
    for piece in sorted(pieces, key=lambda one: (-one[1], one[0])):
        place = bisect_left(free, (piece[1], -1))
        room, window = free.pop(place) if place < len(free) else (capacity, len(windows))
        if window == len(windows):
            windows.append([])
        windows[window].append(piece)
        if room > piece[1]:
            left = (room - piece[1], window)
            free.insert(bisect_left(free, left), left)
    return windows


class PackedWindows:
    """Windows of whole pieces in an order of their own for each seed; what `LMTrainer` reads.

    Args:
        seed: of the order; None: as packed.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int | None) -> None:
        self.stream, self.sequence_length, self.order = stream, length, "best fit"
        self.windows = best_fit(pieces_of(stream, length), length + 1)
        count = len(self.windows)
        self.places = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, ks: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """`input_ids` and `shift_labels` (n, T); padding and first ids of pieces within a document are no targets."""
        ids = np.full((len(ks), self.sequence_length + 1), END_OF_TEXT_ID, dtype=np.int64)
        labels = np.full_like(ids, IGNORE_INDEX)
        for row, k in enumerate(ks):
            place = 0
            for start, count in self.windows[self.places[int(k) % len(self)]]:
                ids[row, place : place + count] = self.stream[start : start + count]
                skipped = int(self.stream[start] != END_OF_TEXT_ID)
                labels[row, place + skipped : place + count] = self.stream[start + skipped : start + count]
                place += count
        return {
            "input_ids": torch.from_numpy(ids[:, :-1].copy()),
            "shift_labels": torch.from_numpy(labels[:, 1:].copy()),
        }


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, windows: Any, sizes: np.ndarray) -> float:
    """Over all windows, in float32."""
    model.eval()
    nats, count = 0.0, 0
    for first in range(0, len(windows), 8):
        batch = windows.batch(range(first, min(first + 8, len(windows))))
        targets = batch["shift_labels"].flatten()
        logits = model(input_ids=batch["input_ids"]).logits.float().flatten(0, 1)
        nats += float(functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX))
        count += int(sizes[targets[targets != IGNORE_INDEX].numpy()].sum())
    return nats / np.log(2) / count


def fit(config: RunConfig, windows: Any, seed: int, tokens: int) -> LMTrainer:
    """Train a fresh model on `tokens` positions of those windows."""
    config = copy.deepcopy(config)
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"eval_steps": None, "save_steps": None, "save_minutes": None, "noise_scale": False}
        settings = {**quiet, "output_dir": folder + "/run", "seed": seed, "train_tokens": tokens}
        for key, value in settings.items():
            setattr(config.training, key, value)
        model = new_model(config.model, config.tokenizer.vocab_size, LENGTH, seed)
        args = training_arguments(config)
        args.disable_tqdm = True
        trainer = LMTrainer(model, args, windows, callbacks=list[TrainerCallback]())
        trainer.train()
    return trainer


def measure(config: RunConfig, task: Task, seed: int, tokens: int) -> list[dict[str, Any]]:
    """Both kinds of windows from the same weights; scores of each over both kinds of held-out windows."""
    scored = {
        "bits_per_byte": TokenWindows([task.held_out], LENGTH, "sequential", 0),
        "bits_per_byte_from_document_starts": PackedWindows(task.held_out, LENGTH, None),
    }
    found = []
    for name, windows in (("plain", task.windows(seed)), ("best fit", PackedWindows(task.train, LENGTH, seed))):
        trainer = fit(config, windows, seed, tokens)
        scores = {key: round(bits_per_byte(trainer.model, held, task.sizes), 4) for key, held in scored.items()}
        counts = {"windows_per_epoch": len(windows), "updates": trainer.plan.updates, "positions": tokens}
        found.append({"windows": name, "seed": seed, **counts, "targets": trainer.supervised_tokens, **scores})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Read the command line, run, print, and write benchmarks/learning/NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="text files, in this order")
    parser.add_argument("--tokens", type=int, required=True, help="positions of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", default="speedrun-10m")
    parser.add_argument("--hold_out", type=int, default=50, help="which of every 100 documents is scored")
    parser.add_argument("--name", default=f"packing-{datetime.date.today().isoformat()}", help="of the file written")
    known, overrides = parser.parse_known_args()
    config = load_config(known.config, overrides)
    torch.set_num_threads(cpu_threads(config.training.cpu_threads))
    task = task_of(documents_of(known.text), config.tokenizer.vocab_size, known.hold_out)
    asked = {"tokens": known.tokens, "overrides": overrides, "text": task.facts}
    facts = {"benchmark": "packing", "date": datetime.date.today().isoformat(), "machine": machine(), "asked": asked}
    results: list[dict[str, Any]] = []
    for seed in range(known.seeds):
        results += measure(config, task, seed, known.tokens)
        means = {
            f"{kind}: {key}": round(statistics.mean(one[key] for one in results if one["windows"] == kind), 4)
            for kind in ("plain", "best fit")
            for key in ("bits_per_byte", "bits_per_byte_from_document_starts")
        }
        content = json.dumps({**facts, "means": means, "results": results}, indent=1)
        (Path(__file__).parent / "learning" / f"{known.name}.json").write_text(content + "\n", encoding="utf-8")
    print(json.dumps(means))


if __name__ == "__main__":
    main()
