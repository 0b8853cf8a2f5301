"""Checks of the mathematics of training: loss, rate, decay, and that learning happens where it may and only there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..data.shards import id_dtype
from ..data.windows import TokenWindows
from ..modeling.loss import IGNORE_INDEX
from ..planning import uniform_loss
from ..training.validation import validate
from .checks import Finding, rule
from .model import MODEL_RUNS, SIGMAS, reference_loss
from .report import plot
from .subject import PROBE_LENGTH, Subject

LEARNS = (*MODEL_RUNS, "gradients")
OVERFIT_UPDATES, OVERFIT_LOSS = 120, 0.1
RANDOM_UPDATES, RANDOM_ROWS = 16, 4
SEVERAL = 2_000  # rates of a long schedule that are compared
SEPARATE_ALPHABET = 64  # tokens of random text for a model whose output rows must learn each token by itself


@rule(
    "loss",
    "the sum over micro-batches is not divided by the targets of the whole update: loss and gradient are too large, "
    "or batches with few targets count too much",
    needs=MODEL_RUNS,
)
def loss(subject: Subject) -> Finding:
    """One update in micro-batches with unequal targets gives the mean loss over all targets, and its gradient."""
    batch = subject.sample(4)
    rows = batch["shift_labels"].shape[0]
    for row, labels in enumerate(batch["shift_labels"]):  # 1, 1/2, 1/3, ... of the targets
        places = torch.nonzero(labels != IGNORE_INDEX)[:, 0]
        labels[places[len(places) // (row + 1) :]] = IGNORE_INDEX
    model = subject.probe(dropout=False)
    with subject.exact():
        expected = reference_loss(model, batch)
        expected.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        model.zero_grad()
        result = subject.update(model).run([{k: v[row : row + 1] for k, v in batch.items()} for row in range(rows)], 0)
    wanted = (float(expected.detach()), norm)
    ratios = [
        found / one if one else math.inf for found, one in zip((result.loss, result.grad_norm), wanted, strict=True)
    ]
    value = f"loss {ratios[0]:.4f} and gradient {ratios[1]:.4f} times those of the mean over all targets"
    return Finding(all(abs(ratio - 1) <= 10 * subject.tolerance for ratio in ratios), value, "1 and 1")


@rule(
    "decay groups",
    "weight decay pulls norm gains to zero, or misses matrices (a type or a name was not recognised)",
    on_resume=True,
)
def decay_groups(subject: Subject) -> Finding:
    """Matrices are decayed and vectors are not: as many of each as the plan counts, every one once."""
    shape = subject.planned_shape
    decay = subject.trainer.args.weight_decay
    found = {"decayed": 0, "not decayed": 0}
    misplaced = 0
    for group in subject.optimizer(subject.trainer.model).param_groups:
        for parameter in group["params"]:
            decayed = group["weight_decay"] == decay if parameter.ndim >= 2 else group["weight_decay"] != 0
            found["decayed" if decayed else "not decayed"] += parameter.numel()
            misplaced += parameter.numel() if decayed != (parameter.ndim >= 2) else 0
    planned = {"decayed": shape.decayed_parameters, "not decayed": shape.undecayed_parameters}
    measured, expected = (", ".join(f"{n:,} {name}" for name, n in which.items()) for which in (found, planned))
    return Finding(found == planned and not misplaced, measured, expected)


@rule("schedule", "the learning rate is not the one that was configured, or it ends elsewhere", on_resume=True)
def schedule(subject: Subject) -> Finding:
    """Every update's rate is the configured warmup and cosine, computed here once more from the configuration."""
    updates, warmup = subject.trainer.plan.updates, subject.config.training.warmup_steps
    numbers = np.unique(np.linspace(0, updates - 1, min(updates, SEVERAL), dtype=np.int64)).tolist()
    numbers = sorted({*numbers, *range(min(updates, warmup + 2, SEVERAL)), updates - 1})
    rates = {number: subject.trainer.schedule(number) for number in numbers}
    wrong = [number for number, rate in rates.items() if abs(rate - planned_rate(subject, number)) > 1e-9 * rate]
    if wrong:
        first = wrong[0]
        value = f"{len(wrong):,} of {len(rates):,} rates differ: update {first + 1:,} has {rates[first]:.3g}"
        return Finding(False, value, f"{planned_rate(subject, first):.3g}")
    shown = ", ".join(f"{rates[number]:.3g}" for number in numbers[:3])
    top = min(warmup, updates - 1)
    value = f"{shown}, ...; {rates.get(top, math.nan):.3g} at update {top + 1:,}; last {rates[updates - 1]:.3g}"
    lines = plot([rates[number] for number in numbers], f"learning rate over {updates:,} updates")
    return Finding(True, value, "as configured", lines)


@rule("warmup", "the first updates are taken at full rate, when gradients are largest: loss spikes, or never recovers")
def warmup(subject: Subject) -> Finding:
    """The first rates rise in equal steps to the highest one of the run."""
    steps, rate = subject.config.training.warmup_steps, subject.trainer.schedule
    if not steps:
        return Finding(True, "none configured", "none")
    numbers = sorted({0, steps // 2, steps - 1})
    found = [rate(number) / rate(steps - 1) for number in numbers]
    expected = [(number + 1) / steps for number in numbers]
    shown = [", ".join(f"{share:.3f}" for share in shares) for shares in (found, expected)]
    close = np.allclose(found, expected, rtol=1e-6)
    return Finding(
        close, f"{shown[0]} of the highest rate at updates {', '.join(f'{n + 1:,}' for n in numbers)}", shown[1]
    )


@rule(
    "applied rate",
    "the optimizer steps with another rate than the schedule says, or not at all",
    needs=LEARNS,
)
def applied_rate(subject: Subject) -> Finding:
    """Adam's first step moves a weight by the learning rate; norm gains, near 1, show which it was."""
    number = min(subject.config.training.warmup_steps, subject.trainer.plan.updates - 1)
    planned = planned_rate(subject, number) * subject.config.training.gain_lr_ratio
    model = subject.probe(dropout=False)
    gains = [p for p in model.parameters() if p.ndim < 2]
    before = [p.detach().clone() for p in gains]
    update = subject.update(model)
    for group in update.optimizer.param_groups:
        group["weight_decay"] = 0.0  # the rate alone; decay has a check of its own
    with subject.precision():
        update.run([subject.sample(2)], subject.trainer.schedule(number))
    moved = max(float((p.detach() - old).abs().max()) for p, old in zip(gains, before, strict=True))
    tolerance = 0.02 * planned + 2.0**-23  # half the spacing of float32 numbers near 1, twice
    value = f"gains move by {moved:.3g} at update {number + 1:,}"
    return Finding(abs(moved - planned) <= tolerance, value, f"{planned:.3g}")


@rule(
    "overfit",
    "the model cannot even remember one batch: gradients, optimizer or loss are broken; or it changes at rate 0",
    needs=LEARNS,
)
def overfit(subject: Subject) -> Finding:
    """One small batch is learnt by heart within bounded updates; an update at rate 0 moves no weight."""
    batch = subject.sample(2)
    still = subject.probe()
    with subject.precision():
        subject.update(still).run([batch], 0.0)
    pairs = zip(still.parameters(), subject.trainer.model.parameters(), strict=True)
    moved = sum(not torch.equal(one, other) for one, other in pairs)
    losses = _train(subject, lambda number: batch, OVERFIT_UPDATES, OVERFIT_LOSS)
    value = f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} updates; {moved} tensors move at rate 0"
    fell = min(losses) <= OVERFIT_LOSS
    return Finding(fell and not moved, value, f"below {OVERFIT_LOSS} within {OVERFIT_UPDATES}; 0")


@rule(
    "random tokens",
    "the model sees what it is to predict (unshifted targets, a mask that leaks): nothing can predict random tokens",
    needs=LEARNS,
)
def random_tokens(subject: Subject) -> Finding:
    """On fresh random tokens the loss stays at ln V or above; with inputs as targets, the bug, it falls below.

    The run's own windows, model, loss and update are used. The second part shows that the first would see it. Output
    rows of an untied model learn each token by itself, so its random text uses few tokens.
    """
    tokens = subject.model_config.num_tokens
    alphabet = tokens if subject.model_config.tie_word_embeddings else min(tokens, SEPARATE_ALPHABET)
    length = min(PROBE_LENGTH, subject.trainer.plan.sequence_length)
    count = (RANDOM_UPDATES + 1) * RANDOM_ROWS * length + 1
    stream = np.random.default_rng(0).integers(0, alphabet, count).astype(id_dtype(tokens))
    windows = TokenWindows([stream], length, "permutation", 0)

    def fresh(number: int) -> dict[str, torch.Tensor]:
        return windows.batch(np.arange(number * RANDOM_ROWS, (number + 1) * RANDOM_ROWS))

    def unshifted(number: int) -> dict[str, torch.Tensor]:
        batch = fresh(number)
        return {**batch, "shift_labels": batch["input_ids"]}

    floor = uniform_loss(alphabet)
    half = RANDOM_UPDATES // 2
    last = _train(subject, fresh, RANDOM_UPDATES)[half:]
    error = float(np.std(last, ddof=1)) / math.sqrt(len(last))
    noise = SIGMAS * max(error, 0.2 / math.sqrt(len(last) * RANDOM_ROWS * length))
    mean, control = float(np.mean(last)), min(_train(subject, unshifted, 4 * RANDOM_UPDATES, floor - 2 * noise))
    value = f"{mean:.4f}; with targets unshifted on purpose {control:.4f}"
    expected = f"at least ln V = {floor:.4f} - {noise:.4f} of noise; below it"
    return Finding(mean >= floor - noise and control < floor - noise, value, expected)


@rule(
    "validation",
    "evaluation is not repeatable (dropout stays on, other windows), or leaves the model in evaluation mode",
    needs=MODEL_RUNS,
)
def validation(subject: Subject) -> Finding:
    """The probe of the run gives the same number twice, the mean over its windows, and restores the mode."""
    trainer, windows = subject.trainer, subject.trainer.eval_dataset
    if windows is None:
        return Finding(True, "no test_conversations", "none")
    number = min(len(windows), 4 * trainer.accelerator.num_processes)
    model = subject.probe()
    with subject.precision():
        found = [validate(trainer.accelerator, model, windows, number * windows.sequence_length, 2) for _ in range(2)]
        restored = all(module.training for module in model.modules())
        batch = {name: tensor.to(subject.device) for name, tensor in windows.batch(range(number)).items()}
        with torch.no_grad():
            expected = float(reference_loss(model.eval(), batch))
    losses = [one["loss"] for one in found if one is not None]
    equal = len(losses) == 2 and losses[0] == losses[1] and abs(losses[0] - expected) <= 1e-2 * expected
    mode = "training mode restored" if restored else "training mode NOT restored"
    value = f"{' and '.join(f'{one:.6f}' for one in losses)}, {mode}"
    return Finding(equal and restored, value, f"{expected:.4f} +- 1%, twice")


def planned_rate(subject: Subject, number: int) -> float:
    """The rate of the zero-based update by the configuration: linear warmup, then its course to the floor."""
    training, updates = subject.config.training, subject.trainer.plan.updates
    if number < training.warmup_steps:
        return training.learning_rate * (number + 1) / training.warmup_steps
    low = training.learning_rate * training.min_lr_ratio
    rest = updates - 1 - training.warmup_steps
    done, shape = (number - training.warmup_steps) / rest if rest else 1.0, str(training.lr_schedule)
    if shape == "wsd":
        decay = max(1, round(training.decay_fraction * updates))
        done, shape = max(0, number + 1 - updates + decay) / decay, training.decay_shape
    left = {"cosine": math.cos(math.pi * done / 2) ** 2, "linear": 1 - done, "sqrt": 1 - done**0.5, "constant": 1.0}
    return low + (training.learning_rate - low) * left[shape]


def _train(subject: Subject, batch_of: Any, updates: int, until: float = -math.inf) -> list[float]:
    """Losses of a copy of the model, each before its update, at a rate that suits its width; ends below `until`."""
    rate = min(1e-2, 0.32 / subject.model_config.hidden_size)
    model = subject.probe()
    update, losses = subject.update(model), []
    for number in range(updates):
        with subject.precision():
            losses.append(update.run([batch_of(number)], rate).loss)
        if losses[-1] < until:
            break
    return losses


RULES = (loss, decay_groups, schedule, warmup, applied_rate, overfit, random_tokens, validation)
