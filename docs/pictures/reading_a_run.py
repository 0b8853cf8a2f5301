"""Make the runs and the pictures of docs/reading-a-run.md: real small runs on the bundled prose, healthy and sick.

    python docs/pictures/reading_a_run.py                        all runs with a picture, in runs/reading-a-run
    python docs/pictures/reading_a_run.py good rate_too_high     some of them
    python docs/pictures/reading_a_run.py --work DIR --pictures DIR

A finished run is not made again and a stopped one goes on, so the command can be repeated. Each run is made by the
function of its name in `RUNS` or `FAULTS`, which writes an ordinary run folder with recipes/pretrain.py. Faults of code
are planted for the time of a run and taken away after it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from runpy import run_path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml

from hf_tinylm.config import load_config
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.tokenizer_corpus import train_from_config
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.evaluation.sampling import sample
from hf_tinylm.files import bundled
from hf_tinylm.modeling import model as modeling
from hf_tinylm.modeling.factory import load_model
from hf_tinylm.tokenization.load import load_tokenizer
from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.prefetch import Prefetched
from hf_tinylm.training.update import Update

RATE, UPDATES, BATCH_TOKENS = 4e-3, 250, 1_024
CONFIG: dict[str, Any] = {
    "model": {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        "intermediate_size": 192,
    },
    "tokenizer": {"vocab_size": 1024},
    "data": {
        **{"sequence_length": 64, "validation_fraction": 0.05, "shuffle": False, "shard_ids": 2**16},
        "sources": [
            {
                "name": "austen",
                "path": "bundled:austen.txt.xz",
                "splitter": "paragraphs_4096",
                "licence": "public domain",
            }
        ],
    },
    "training": {
        **{"train_tokens": UPDATES * BATCH_TOKENS, "global_batch_tokens": BATCH_TOKENS},
        **{"per_device_train_batch_size": 4, "learning_rate": RATE, "warmup_steps": 20, "bf16": False},
        **{"eval_steps": 25, "save_steps": 125, "save_total_limit": 1, "use_cpu": True, "cpu_threads": 1},
        **{"preflight": False},
    },
    "evaluation": {"eval_tokens": 8_192},
}


# ---- the runs: each function writes the run folder that it is given ------------------------------------------------


def good(run: Path, *settings: str) -> None:
    """Nothing wrong."""
    train(run, *settings)


def rate_too_high(run: Path, *settings: str) -> None:
    """Thirty times the rate."""
    train(run, "--learning_rate", f"{30 * RATE:g}", *settings)


def rate_too_low(run: Path, *settings: str) -> None:
    """A hundredth of the rate."""
    train(run, "--learning_rate", f"{RATE / 100:g}", *settings)


def five_times_the_rate_without_warmup(run: Path, *settings: str) -> None:
    """Five times the rate from the first update on; gradients are clipped."""
    train(run, "--learning_rate", f"{5 * RATE:g}", "--warmup_steps", "0", *settings)


def five_times_the_rate_without_warmup_or_clipping(run: Path, *settings: str) -> None:
    """The same without clipping."""
    train(run, "--learning_rate", f"{5 * RATE:g}", "--warmup_steps", "0", "--max_grad_norm", "0", *settings)


def tiny_data(run: Path, *settings: str) -> None:
    """The text of 24 documents only, again and again."""
    config = load_config(str(config_file(run.parent)), ["--shards", str(run.parent / "shards-tiny")])
    config.data.sources[0].max_documents, config.data.validation_fraction = 24, 0.1
    if not (run.parent / "shards-tiny" / "manifest.json").is_file():
        prepare(config, progress=False)
    train(run, "--shards", str(run.parent / "shards-tiny"), *settings)


def one_shard_replayed(run: Path, *settings: str) -> None:
    """A reader that begins again at the first shard when it has ended, in the order of the file."""
    own = TokenWindows.locate

    def first_shard(self: TokenWindows, ks: Any) -> tuple[np.ndarray, np.ndarray]:
        if self.order == "sequential":  # validation
            return own(self, ks)
        places = np.asarray(ks, dtype=np.int64).reshape(-1) % int(self._stride_ends[0])
        return np.zeros_like(places), places * self.sequence_length

    with mock.patch.object(TokenWindows, "locate", first_shard):
        train(run, *settings)


def unshifted_targets(run: Path, *settings: str) -> None:
    """Each token is its own target."""
    own = TokenWindows.batch

    def batch(self: TokenWindows, ks: Any) -> dict[str, torch.Tensor]:
        found = own(self, ks)
        return {**found, "shift_labels": found["input_ids"]}

    with mock.patch.object(TokenWindows, "batch", batch):
        train(run, *settings)


def missing_division(run: Path, *settings: str) -> None:
    """Each of the four micro-batches is divided by its own targets instead of those of the update."""
    own = modeling.normalised

    def of_micro_batch(total: torch.Tensor, labels: torch.Tensor, count: Any) -> torch.Tensor:
        return own(total, labels, None if torch.is_grad_enabled() else count)  # validation stays right

    with mock.patch.object(modeling, "normalised", of_micro_batch):
        train(run, *settings)


def five_bad_batches(run: Path, *settings: str) -> None:
    """Updates 121 to 125 read random tokens."""

    def disturb(updates: Update, number: int, batches: list[dict[str, torch.Tensor]]) -> None:
        generator = torch.Generator().manual_seed(number)
        for batch in batches if 120 <= number < 125 else ():
            batch["input_ids"] = torch.randint(4, 1_000, batch["input_ids"].shape, generator=generator)
            batch["shift_labels"] = batch["input_ids"].roll(-1, 1)

    with before_each_update(disturb):
        train(run, *settings)


def weights_damaged(run: Path, *settings: str) -> None:
    """Before update 201, when the rate is low, the vectors of every sixth token are mixed up."""

    def damage(updates: Update, number: int, batches: list[dict[str, torch.Tensor]]) -> None:
        if number == 200:
            with torch.no_grad():
                updates.parameters[0][::6] = updates.parameters[0][::6].flip(0)

    with before_each_update(damage):
        train(run, *settings)


def rate_far_too_high(run: Path, *settings: str) -> None:
    """Three thousand times the rate, from update 100 on, and no clipping."""

    def raise_rate(updates: Update, number: int, batches: list[dict[str, torch.Tensor]]) -> float:
        return 3_000.0 if number >= 100 else 1.0

    with before_each_update(raise_rate):
        train(run, "--max_grad_norm", "0", *settings)


def rate_never_lowered(run: Path, *settings: str) -> None:
    """Thirty times the rate, constant."""
    train(run, "--learning_rate", f"{30 * RATE:g}", "--min_lr_ratio", "1", *settings)


def too_short(run: Path, *settings: str) -> None:
    """Sixty updates, at a constant rate."""
    train(run, *settings, "--train_tokens", str(60 * BATCH_TOKENS), "--min_lr_ratio", "1")


def batch_too_small(run: Path, *settings: str) -> None:
    """The healthy run goes on with an eighth of its batch, for as many updates."""
    good(run.parent / "good", *settings)
    small = ["--global_batch_tokens", str(BATCH_TOKENS // 8), "--per_device_train_batch_size", "1"]
    small += ["--train_tokens", str(UPDATES * BATCH_TOKENS // 8), "--init_from", str(run.parent / "good" / "final")]
    train(run, *settings, *small)


def one_source_after_the_other(run: Path, *settings: str) -> None:
    """First a part of the Bible, then Austen, in the order of the file."""
    config = load_config(str(config_file(run.parent)), ["--shards", str(run.parent / "shards-two")])
    first = dataclasses.replace(config.data.sources[0], name="kjv", path="bundled:kjv.txt.xz", max_documents=40)
    config.data.sources = [first, config.data.sources[0]]
    if not (run.parent / "shards-two" / "manifest.json").is_file():
        prepare(config, progress=False)
    own = TokenWindows.locate

    def in_order(self: TokenWindows, ks: Any) -> tuple[np.ndarray, np.ndarray]:
        if self.order == "sequential":  # validation
            return own(self, ks)
        places = np.asarray(ks, dtype=np.int64).reshape(-1) % int(self._stride_ends[-1])
        streams = np.searchsorted(self._stride_ends, places, side="right")
        return streams, (places - np.concatenate(([0], self._stride_ends[:-1]))[streams]) * self.sequence_length

    with mock.patch.object(TokenWindows, "locate", in_order):
        train(run, "--shards", str(run.parent / "shards-two"), *settings)


def neighbour_on_the_machine(run: Path, *settings: str) -> None:
    """The last thirty updates take a quarter of a second longer."""

    def wait(updates: Update, number: int, batches: list[dict[str, torch.Tensor]]) -> None:
        if number >= UPDATES - 30:
            time.sleep(0.25)

    with before_each_update(wait):
        train(run, *settings)


def slow_disk(run: Path, *settings: str) -> None:
    """Each micro-batch of windows takes 0.15 seconds to read, and none is read ahead."""
    own = TokenWindows.batch

    def batch(self: TokenWindows, ks: Any) -> dict[str, torch.Tensor]:
        time.sleep(0.15 if self.order != "sequential" else 0.0)
        return own(self, ks)

    with mock.patch.object(TokenWindows, "batch", batch), mock.patch.object(Prefetched, "ahead"):
        train(run, *settings)


def saves_all_the_time(run: Path, *settings: str) -> None:
    """A checkpoint after each update, written while training waits."""
    train(run, "--save_steps", "1", "--save_in_background", "false", *settings)


def peak_too_low(run: Path, *settings: str) -> None:
    """The peak of the device is given as a billion FLOP/s."""
    train(run, "--peak_flops", "1e9", *settings)


def peak_of_a_gpu(run: Path, *settings: str) -> None:
    """A device with the peak of a large GPU that computes as fast as this processor."""
    train(run, "--peak_flops", "1e15", *settings)


@contextlib.contextmanager
def before_each_update(act: Callable[[Update, int, Any], float | None]) -> Iterator[None]:
    """Call `act(updates, zero-based number, batches)` before each; a number that it gives multiplies the rate."""
    own, numbers = Update.run, itertools.count()

    def run(self: Update, batches: Any, learning_rate: float, *more: Any) -> Any:
        factor = act(self, next(numbers), batches)
        return own(self, batches, learning_rate * (1.0 if factor is None else factor), *more)

    with mock.patch.object(Update, "run", run):
        yield


RUNS: dict[str, Callable[..., None]] = {
    run.__name__: run
    for run in (
        *(good, rate_too_high, rate_too_low, five_times_the_rate_without_warmup),
        *(five_times_the_rate_without_warmup_or_clipping, tiny_data, one_shard_replayed, unshifted_targets),
        missing_division,
    )
}


# Without a picture: what `hf-tinylm diagnose` finds in these is on the page, their curves are not.
FAULTS: dict[str, Callable[..., None]] = {
    run.__name__: run
    for run in (
        *(five_bad_batches, weights_damaged, rate_far_too_high, rate_never_lowered, too_short, batch_too_small),
        *(one_source_after_the_other, neighbour_on_the_machine, slow_disk, saves_all_the_time, peak_too_low),
        peak_of_a_gpu,
    )
}


def config_file(work: Path) -> Path:
    """The configuration of all runs in `work`, whose tokenizer and shards are written when they are not there."""
    path = work / "config.yaml"
    if not (work / "shards" / "manifest.json").is_file():
        work.mkdir(parents=True, exist_ok=True)
        values = {**CONFIG, "tokenizer": {**CONFIG["tokenizer"], "tokenizer_path": str(work / "tokenizer")}}
        values["data"] = {**CONFIG["data"], "shards": str(work / "shards")}
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        if not (work / "tokenizer").is_dir():
            train_from_config(load_config(str(path)), progress=False)
        prepare(load_config(str(path)), progress=False)
    return path


def train(run: Path, *settings: str) -> None:
    """Train `run` to its end with the recipe, unless that is done; a run that was stopped goes on.

    A run that breaks (a loss that is not finite) is left as it ended.
    """
    if (run / "DONE.json").is_file():
        return
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    arguments = ["--config", str(config_file(run.parent)), "--output_dir", str(run), *settings]
    recipe([*arguments, "--resume_from_checkpoint", "auto"])


# ---- pictures -------------------------------------------------------------------------------------------------------


def picture(run: Path, healthy: Path, target: Path) -> None:
    """Loss, gradient norm and rate of a run, and in grey those of the healthy one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(9, 2.5), dpi=80, layout="constrained")
    panels = dict(zip(("loss", "grad_norm", "learning_rate"), figure.subplots(1, 3), strict=True))
    for folder, colour, width in ((healthy, "0.75", 1.0), (run, "tab:blue", 1.0)):
        rows = read_rows(folder / "metrics.jsonl")
        updates = [row for row in rows if "loss" in row]
        for key, panel in panels.items():
            panel.plot([row["step"] for row in updates], [row[key] for row in updates], color=colour, lw=width)
        if folder == run:
            evaluated = [row for row in rows if "eval_loss" in row]
            panels["loss"].plot(
                [row["step"] for row in evaluated],
                [row["eval_loss"] for row in evaluated],
                "o",
                color="tab:red",
                ms=2.5,
            )
    titles = ("loss (blue: training, red: validation)", "gradient norm before clipping", "learning rate")
    for title, (key, panel) in zip(titles, panels.items(), strict=True):
        panel.set_title(title, fontsize=8)
        panel.tick_params(labelsize=7)
        if key == "learning_rate":
            panel.set_yscale("log")
            panel.yaxis.set_minor_formatter(NullFormatter())
    figure.savefig(target, metadata={"Software": None})


def facts(name: str, run: Path) -> str:
    """A row of the page's table."""
    rows = read_rows(run / "metrics.jsonl")
    updates, evaluated = [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row]
    last = statistics.fmean(row["loss"] for row in updates[-20:])
    norm = statistics.median(row["grad_norm"] for row in updates[len(updates) // 12 :])
    best = min(row["eval_loss"] for row in evaluated)
    clipped = sum(row["clipped"] for row in updates) / len(updates)
    return (
        f"| {name} | {updates[0]['loss']:.2f} | {last:.2f} | {evaluated[-1]['eval_loss']:.2f} | {best:.2f} | "
        f"{norm:.2f} | {max(row['grad_norm'] for row in updates):.1f} | {clipped:.0%} |"
    )


def continuation(run: Path, work: Path) -> str:
    """What the model of a run writes after the beginning of a sentence."""
    model, tokenizer = load_model(run / "final"), load_tokenizer(work / "tokenizer")
    return sample(model, tokenizer, "She was not", 40, temperature=0.8, seed=1)


def main() -> None:
    """Make the runs that are named, their pictures, and print the page's table and samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS | FAULTS)}; default: those with a picture"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/reading-a-run"))
    parser.add_argument("--pictures", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    names = options.names or list(RUNS)
    for name in dict.fromkeys(("good", *names)):
        (RUNS | FAULTS)[name](options.work / name)
    print("| run | first loss | last 20 | validation | best | norm | highest norm | clipped |\n" + "|---" * 8 + "|")
    for name in names:
        print(facts(name, options.work / name))
        if name in RUNS:
            picture(options.work / name, options.work / "good", options.pictures / f"{name}.png")
    for name in names:
        print(f"{name}: She was not{continuation(options.work / name, options.work)!r}")


if __name__ == "__main__":
    main()
