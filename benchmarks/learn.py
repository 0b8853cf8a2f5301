"""How much a model learns in a fixed time: bits per byte of text held out, ours beside the stock Trainer.

    python -m benchmarks.learn --text novels.txt essays.txt --minutes 6 --seeds 3 --peer stock

The files are cut into documents of about 4 KB at paragraph borders. Every 100th is held out: neither the tokenizer nor
training reads it. Each run trains a fresh model for that time, compilation left out, and is scored by its last state
over 512-token windows of the held-out text that do not overlap: nats / ln 2 / bytes. How many updates fit is measured
beforehand, because a schedule must know its end; a run that is slower than that is stopped by the clock.

Ours is a bundled configuration (--config, with --key value overrides); the peer is transformers' Trainer with
LlamaForCausalLM of 10 million parameters in bf16, compiled, at its defaults. --tokens in place of --minutes gives every
run that many tokens, to the token: for sweeps, which hold out other documents (--hold_out 50) and never see those of
the comparison. Each --variant is a run of its own, with settings of its own:
    --variant "" "learning_rate=5e-3" "global_batch_tokens=2048 batch_growth=[[100_352,4_096]]"
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import itertools
import json
import statistics
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_tinylm.config import load_config
from hf_tinylm.data.splitters import find_splitter, split_text
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.planning.updates import UpdatePlan, plan_of_config, plan_updates
from hf_tinylm.sections import RunConfig
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.load import token_bytes
from hf_tinylm.tokenization.special import END_OF_TEXT_ID
from hf_tinylm.tokenization.train import train_tokenizer
from hf_tinylm.training.arguments import cpu_threads, training_arguments
from hf_tinylm.training.curves import Curve, Points, draw_losses
from hf_tinylm.training.trainer import LMTrainer

from .contenders import Rows
from .machine import machine

LENGTH, EVERY = 512, 100
PEER = {"hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 5, "intermediate_size": 864}
PEER_VOCABULARY, PEER_ROWS, PEER_ACCUMULATION, PEER_RATE = 8_192, 16, 2, 1e-3
PEER_BATCH = PEER_ROWS * PEER_ACCUMULATION * LENGTH
CALIBRATION_UPDATES, CURVE_POINTS, SAFETY = 8, 24, 0.98


@dataclass(frozen=True)
class Task:
    """The text as one tokenizer reads it. `train` and `held_out` are ids, `sizes` the bytes of each token (V,)."""

    tokenizer: Any
    train: np.ndarray
    held_out: np.ndarray
    sizes: np.ndarray
    facts: dict[str, Any]

    def windows(self, seed: int) -> TokenWindows:
        """Training windows in an order of their own for each seed."""
        return TokenWindows([self.train], LENGTH, "permutation", seed)


def documents_of(files: list[Path]) -> list[str]:
    """Documents of about 4 KB, in the order of the files."""
    splitter = find_splitter("paragraphs_4096")
    return [text.decode() for file in files for _, text, _ in split_text([file.read_bytes()], splitter)]


def task_of(documents: list[str], vocab_size: int, hold_out: int) -> Task:
    """Train the tokenizer and encode; of 100 documents that at `hold_out` is scored, that at 0 never trained on."""
    read = [text for number, text in enumerate(documents) if number % EVERY not in (0, hold_out)]
    held_out = documents[hold_out::EVERY]
    tokenizer, _ = train_tokenizer(read, vocab_size)
    encoder = FastEncoder(tokenizer)
    order = np.random.default_rng(1).permutation(len(read))
    sizes = np.zeros(vocab_size, dtype=np.int64)  # the separator stands for no byte of the text
    for token, spelled in token_bytes(tokenizer).items():
        sizes[token] = len(spelled)
    facts = {
        "documents": len(documents),
        "bytes": sum(len(text.encode()) for text in documents),
        "held_out_bytes": sum(len(text.encode()) for text in held_out),
        "hold_out": hold_out,
        "vocab_size": vocab_size,
    }
    return Task(tokenizer, _stream(encoder, [read[n] for n in order]), _stream(encoder, held_out), sizes, facts)


def _stream(encoder: FastEncoder, texts: list[str]) -> np.ndarray:
    separator = np.array([END_OF_TEXT_ID], dtype=np.uint16)
    return np.concatenate([part for ids in encoder.encode_batch(texts) for part in (separator, ids.astype(np.uint16))])


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, task: Task) -> float:
    """Over windows of the held-out text that do not overlap, in float32; a last part of a window is left out."""
    windows = TokenWindows([task.held_out], LENGTH, "sequential", 0)
    model.eval()
    nats, count = 0.0, 0
    for first in range(0, len(windows), 8):
        batch = windows.batch(range(first, min(first + 8, len(windows))))
        logits = model(input_ids=batch["input_ids"]).logits.float()
        targets = batch["shift_labels"].flatten()
        nats += float(functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
        count += int(task.sizes[targets.numpy()].sum())
    return nats / np.log(2) / count


class Clock(TrainerCallback):
    """Seconds of training, with the first update, which compiles, counted as long as the median of the others.

    Args:
        limit: seconds after which the run is ended.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        self.limit, self.ends = limit, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end of an update, and end the run when its time is up."""
        self.ends.append(time.perf_counter())
        if self.at(len(self.ends)) + self.median > self.limit:
            control.should_training_stop = True

    @property
    def median(self) -> float:
        """Seconds of an update."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends)) if len(self.ends) > 1 else 0.0

    def at(self, updates: int) -> float:
        """Seconds of training after that many updates."""
        return self.ends[updates - 1] - self.ends[0] + self.median if updates else 0.0


class Losses(TrainerCallback):
    """Training losses in nats per token, as they are logged: of text that is read for the first time."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Keep the loss of an update."""
        if "loss" in logs:
            self.values.append(float(logs["loss"]))


@dataclass
class System:
    """One side of the comparison: `fit(seed, plan, limit)` trains and gives the model, the clock and the losses."""

    name: str
    task: Task
    config: RunConfig | None = None
    keep: Path | None = None

    @property
    def batch_tokens(self) -> int:
        """Tokens of an update, of the first where the batch grows."""
        return PEER_BATCH if self.config is None else self.config.training.global_batch_tokens

    def plan(self, tokens: int) -> UpdatePlan:
        """How exactly so many tokens are cut into updates; the peer makes whole ones only."""
        if self.config is None:
            return plan_updates(tokens // PEER_BATCH * PEER_BATCH, PEER_BATCH, LENGTH, PEER_ROWS, 1)
        return plan_of_config(dataclasses.replace(self.config.training, train_tokens=tokens), LENGTH, 0)

    def fit(self, seed: int, plan: UpdatePlan, limit: float = float("inf")) -> tuple[Any, Clock, Losses]:
        """Train a fresh model to the end of that plan, or until the limit in seconds."""
        clock, losses = Clock(limit), Losses()
        with tempfile.TemporaryDirectory() as folder:
            if self.config is None:
                return self._stock(Path(folder), seed, plan.updates, [clock, losses]), clock, losses
            return self._ours(self.config, Path(folder), seed, plan, [clock, losses]), clock, losses

    def _ours(self, asked: RunConfig, folder: Path, seed: int, plan: UpdatePlan, callbacks: list[Any]) -> Any:
        config = copy.deepcopy(asked)
        settings = config.training
        settings.output_dir, settings.seed = str(folder / "run"), seed
        settings.train_tokens = plan.train_tokens
        settings.eval_steps = settings.save_steps = settings.save_minutes = None
        settings.logging_steps, settings.warmup_steps = 1, min(settings.warmup_steps, plan.updates // 2)
        model = new_model(config.model, config.tokenizer.vocab_size, LENGTH, seed)
        args = training_arguments(config)
        args.disable_tqdm = True
        trainer = LMTrainer(
            model, args, self.task.windows(seed), processing_class=self.task.tokenizer, callbacks=callbacks
        )
        trainer.train()
        if self.keep is not None:
            trainer.save_model(str(self.keep))
        return model

    def _stock(self, folder: Path, seed: int, updates: int, callbacks: list[Any]) -> Any:
        set_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=PEER_VOCABULARY, tie_word_embeddings=True, **PEER))
        args = TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=PEER_ROWS, max_steps=updates, seed=seed,
            gradient_accumulation_steps=PEER_ACCUMULATION, learning_rate=PEER_RATE, bf16=True, torch_compile=True,
            use_cpu=not torch.cuda.is_available(), logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        Trainer(model, args, train_dataset=Rows(self.task.windows(seed)), callbacks=callbacks).train()
        return model


def measure(system: System, seeds: int, seconds: float | None, tokens: int | None) -> Iterator[dict[str, Any]]:
    """One result for each seed; updates are those that fit into `seconds`, or that `tokens` give."""
    update = 0.0
    if seconds is not None:
        _, clock, _ = system.fit(0, system.plan(CALIBRATION_UPDATES * system.batch_tokens))
        update = clock.median
    for seed in range(seeds):
        if seconds is not None:
            tokens = max(2, int(SAFETY * seconds / update)) * system.batch_tokens
        plan = system.plan(tokens or 0)
        model, clock, losses = system.fit(seed, plan, seconds or float("inf"))
        done = len(clock.ends)
        if done < 2:
            raise SystemExit(f"{system.name}: {seconds} seconds hold {done} updates; 2 or more are needed.")
        update = clock.at(done) / done
        found = {
            "system": system.name,
            "seed": seed,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "updates": done,
            "planned_updates": plan.updates,
            "tokens": plan.tokens_before(done),
            "training_seconds": round(clock.at(done), 1),
            "tokens_per_second": round(plan.tokens_before(done) / clock.at(done)),
            "bits_per_byte": round(bits_per_byte(model, system.task), 4),
        }
        print(json.dumps(found), flush=True)
        yield {**found, "curve": curve(system.task, plan, clock, losses.values)}


def curve(task: Task, plan: UpdatePlan, clock: Clock, losses: list[float]) -> list[dict[str, float]]:
    """Training loss as bits per byte of text read for the first time: means over the tokens of equally many updates."""
    per_token = float(task.sizes[task.train].mean())
    sizes = [plan.tokens_of_update(update) for update in range(len(losses))]
    borders = np.linspace(0, len(losses), min(CURVE_POINTS, len(losses)) + 1).astype(int)
    return [
        {
            "tokens": plan.tokens_before(int(end)),
            "seconds": round(clock.at(int(end)), 2),
            "bits_per_byte": round(
                float(np.average(losses[start:end], weights=sizes[start:end])) / np.log(2) / per_token, 4
            ),
        }
        for start, end in itertools.pairwise(borders)
    ]


def draw(results: list[dict[str, Any]], picture: Path) -> None:
    """Every run's curve over tokens and over hours."""
    curves = []
    for result in results:
        values = {name: np.array([point[name] for point in result["curve"]]) for name in result["curve"][0]}
        tokens, hours = values["tokens"].astype(float), values["seconds"] / 3600
        nothing = Points(*(np.zeros(0),) * 4)
        points = Points(tokens, tokens * np.nan, hours, values["bits_per_byte"])
        name = textwrap.fill(f"{result['system']}, seed {result['seed']}", 40)
        curves.append(Curve(name, points, nothing))
    draw_losses(curves, picture, ("tokens", "hours"), "bits per byte of new text")


def write(results: list[dict[str, Any]], facts: dict[str, Any], name: str) -> dict[str, float]:
    """Write benchmarks/learning/NAME.json and NAME.png; the mean bits per byte of each system."""
    scores: dict[str, list[float]] = {}
    for result in results:
        scores.setdefault(result["system"], []).append(result["bits_per_byte"])
    means = {system: round(statistics.mean(found), 4) for system, found in scores.items()}
    folder = Path(__file__).parent / "learning"
    folder.mkdir(exist_ok=True)
    content = json.dumps({**facts, "bits_per_byte": means, "results": results}, indent=1)
    (folder / f"{name}.json").write_text(content + "\n", encoding="utf-8")
    draw(results, folder / f"{name}.png")
    return means


def systems_of(
    configs: dict[str, RunConfig], documents: list[str], hold_out: int, peer: bool, keep: Path | None
) -> list[System]:
    """What is to be measured; systems of the same vocabulary share their tokenizer and ids."""
    sizes = {config.tokenizer.vocab_size for config in configs.values()} | ({PEER_VOCABULARY} if peer else set())
    tasks = {size: task_of(documents, size, hold_out) for size in sorted(sizes)}
    systems = [System(name, tasks[config.tokenizer.vocab_size], config, keep) for name, config in configs.items()]
    if peer:
        systems.insert(0, System("stock Trainer", tasks[PEER_VOCABULARY]))
    return systems


def main() -> None:
    """Read the command line, run, print, and write a JSON file with a picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="text files, in this order")
    parser.add_argument("--minutes", type=float, help="training time of each run")
    parser.add_argument("--tokens", type=int, help="tokens of each run, in place of a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peer", choices=["stock"], help="run the peer too, before each of ours")
    parser.add_argument("--config", default="speedrun-10m")
    parser.add_argument("--hold_out", type=int, default=0, help="which of every 100 documents is scored")
    parser.add_argument("--keep", type=Path, help="folder for the model of the last seed")
    parser.add_argument("--name", default=f"learn-{datetime.date.today().isoformat()}", help="of the files written")
    parser.add_argument("--variant", nargs="+", default=[""], help='"KEY=VALUE KEY=VALUE": settings of one more run')
    known, overrides = parser.parse_known_args()
    if (known.minutes is None) == (known.tokens is None):
        parser.error("give --minutes or --tokens")
    configs = {
        f"{known.config} {variant}".strip(): load_config(
            known.config, [*overrides, *(f"--{setting}" for setting in variant.split()), "--output_dir", "unused"]
        )
        for variant in known.variant
    }
    if known.minutes is not None and any(config.training.batch_growth for config in configs.values()):
        parser.error(
            "how many updates fit into a time is known when they are of one size; give --tokens for batch_growth"
        )
    torch.set_num_threads(cpu_threads(next(iter(configs.values())).training.cpu_threads))
    systems = systems_of(configs, documents_of(known.text), known.hold_out, bool(known.peer), known.keep)
    seconds = None if known.minutes is None else 60 * known.minutes
    text = {system.name: system.task.facts for system in systems}
    asked = {"minutes": known.minutes, "tokens": known.tokens, "overrides": overrides, "text": text}
    facts = {"benchmark": "learn", "date": datetime.date.today().isoformat(), "machine": machine(), "asked": asked}
    results: list[dict[str, Any]] = []
    for system in systems:
        for found in measure(system, known.seeds, seconds, known.tokens):
            results.append(found)
            means = write(results, facts, known.name)  # each time: what was measured stays when a later run fails
    print(json.dumps(means))


if __name__ == "__main__":
    main()
