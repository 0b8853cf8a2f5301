"""What a branch of a run with constant rate is worth: decayed to half its budget, against a cosine run of that half.

    python -m benchmarks.wsd --text novels.txt essays.txt --tokens 802_816 --fractions 0.2 0.4 --seeds 3 --key value ...

For each seed a `wsd` run of --tokens (--config, with --key value overrides) trains at its constant rate; from a
checkpoint of it, `branch_from` decays over each of the fractions so that half of --tokens are trained on in all. The
parent is ended at the last branching point: no branch reads what comes after. Scores and curves are those of
`benchmarks.learn`, on the same text and split.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from hf_tinylm.config import load_config
from hf_tinylm.errors import RunStopped
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.planning.updates import stable_updates
from hf_tinylm.sections import RunConfig
from hf_tinylm.training.arguments import cpu_threads, training_arguments
from hf_tinylm.training.trainer import LMTrainer

from .learn import CURVE_POINTS, LENGTH, Task, bits_per_byte, documents_of, task_of, write
from .machine import machine


class SaveAt(TrainerCallback):
    """Saves after the updates of those numbers."""

    def __init__(self, updates: Sequence[int]) -> None:
        self.updates = set(updates)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a checkpoint where one is wanted."""
        control.should_save |= state.global_step in self.updates


def fit(
    config: RunConfig, task: Task, seed: int, folder: Path, save_at: Sequence[int] = (), **settings: Any
) -> LMTrainer:
    """Train with these settings of the training section, to the end or to `stop_after_updates`."""
    config = copy.deepcopy(config)
    quiet = {"eval_steps": None, "save_steps": None, "save_minutes": None, "noise_scale": False}
    for key, value in {**quiet, "output_dir": str(folder), "seed": seed, **settings}.items():
        setattr(config.training, key, value)
    model = new_model(config.model, config.tokenizer.vocab_size, LENGTH, seed)
    args = training_arguments(config)
    args.disable_tqdm = True
    trainer = LMTrainer(model, args, task.windows(seed), callbacks=[SaveAt(save_at)])
    with contextlib.suppress(RunStopped):
        trainer.train()
    return trainer


def result_of(name: str, seed: int, trainer: LMTrainer, task: Task) -> dict[str, Any]:
    """The score of a run that is at its end, and its curve; a branch has its parent's rows before its own."""
    assert trainer.state.global_step == trainer.plan.updates, f"{name} was ended early"
    rows = trainer.record.metrics.rows()
    per_byte = np.log(2) * float(task.sizes[task.train].mean())
    borders = np.linspace(0, len(rows), min(CURVE_POINTS, len(rows)) + 1).astype(int)
    return {
        "system": name,
        "seed": seed,
        "parameters": trainer.model.num_parameters(),
        "updates": len(rows),
        "tokens": trainer.supervised_tokens,
        "bits_per_byte": round(bits_per_byte(trainer.model, task), 4),
        "curve": [
            {
                "tokens": rows[end - 1]["supervised_tokens"],
                "seconds": rows[end - 1]["wall_seconds"],
                "bits_per_byte": round(float(np.mean([row["loss"] for row in rows[start:end]])) / per_byte, 4),
            }
            for start, end in itertools.pairwise(borders)
        ],
    }


def measure(
    config: RunConfig, task: Task, seeds: int, tokens: int, fractions: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """For each seed the cosine run of half the tokens, then a branch for each fraction."""
    half = tokens // 2
    updates = -(-half // config.training.global_batch_tokens)
    points = {fraction: stable_updates(updates, fraction) for fraction in fractions}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            cosine = fit(config, task, seed, folder / "cosine", train_tokens=half, lr_schedule="cosine")
            yield result_of("cosine", seed, cosine, task)
            fit(
                config, task, seed, folder / "parent", points.values(), train_tokens=tokens, lr_schedule="wsd",
                decay_fraction=min(fractions), stop_after_updates=max(points.values()),
            )  # fmt: skip
            for fraction, point in points.items():
                branch = fit(
                    config, task, seed, folder / f"branch-{fraction}", train_tokens=half, lr_schedule="wsd",
                    decay_fraction=fraction, branch_from=str(folder / "parent" / f"checkpoint-{point:08d}"),
                )  # fmt: skip
                yield result_of(f"wsd, decay over {fraction:g}", seed, branch, task)


def main() -> None:
    """Read the command line, run, print, and write a JSON file with a picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="text files, in this order")
    parser.add_argument("--tokens", type=int, required=True, help="of the parent; twice those of the other runs")
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.2], help="shares of the half that decay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", default="speedrun-10m")
    parser.add_argument("--hold_out", type=int, default=50, help="which of every 100 documents is scored")
    parser.add_argument("--name", default=f"wsd-{datetime.date.today().isoformat()}", help="of the files written")
    known, overrides = parser.parse_known_args()
    config = load_config(known.config, overrides)
    torch.set_num_threads(cpu_threads(config.training.cpu_threads))
    task = task_of(documents_of(known.text), config.tokenizer.vocab_size, known.hold_out)
    asked = {"tokens": known.tokens, "fractions": known.fractions, "overrides": overrides, "text": task.facts}
    facts = {"benchmark": "wsd", "date": datetime.date.today().isoformat(), "machine": machine(), "asked": asked}
    results: list[dict[str, Any]] = []
    for found in measure(config, task, known.seeds, known.tokens, known.fractions):
        print(json.dumps({key: value for key, value in found.items() if key != "curve"}), flush=True)
        results.append(found)
        scores = {(one["system"], one["seed"]): one["bits_per_byte"] for one in results}
        above: dict[str, list[float]] = {}
        for (system, seed), score in scores.items():
            above.setdefault(system, []).append(score / scores["cosine", seed] - 1)
        shares = {system: {"mean": statistics.mean(each), "seeds": each} for system, each in above.items()}
        write(results, {**facts, "above_cosine": shares}, known.name)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
