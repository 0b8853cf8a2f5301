"""What is wrong with a run, each with its evidence, what it means and what to do: `diagnose`.

The diagnoses are pure functions of a `History`. They are the same while a run goes on and after it; one that needs more
updates than there are says nothing. `docs/reading-a-run.md` shows the curves that they were made on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .diagnosis_course import (
    batch_below_noise_scale,
    clipping_always,
    noise_behind_plateau,
    plateau_without_decay,
    rate_too_low,
    still_falling,
)
from .diagnosis_data import cliffs_at_epoch_borders, source_loss_rises, text_replayed, training_and_validation_part
from .diagnosis_loss import (
    divergence,
    first_loss_far_from_uniform,
    loss_too_good,
    norm_spikes,
    spike_that_recovered,
    spike_that_stayed,
    training_loss_a_multiple,
)
from .diagnosis_speed import checkpoints_cost, input_starvation, mfu_too_high, mfu_too_low, throughput_drop
from .history import History, history_of
from .run import Run


@dataclass(frozen=True)
class Words:
    """What is always said of one kind of fault."""

    title: str
    meaning: str
    next_step: str


@dataclass(frozen=True)
class Finding:
    """One fault of one run. `name` is stable; the rest is for people."""

    name: str
    title: str
    evidence: str
    meaning: str
    next_step: str


# Each finds its fault and returns the evidence, or None. In the order of a run: start, course, data, speed.
DIAGNOSES: tuple[tuple[Callable[[History], str | None], Words], ...] = (
    (
        first_loss_far_from_uniform,
        Words(
            "The first loss is far from ln V",
            "A model that knows nothing predicts each of V tokens alike, a loss of ln V. Far below: the targets can be "
            "read off the input, or the weights were not new. Far above: the loss is divided wrongly, or a bad start.",
            "Stop. Run hf-tinylm preflight with this configuration: it checks targets, masks, division and weights.",
        ),
    ),
    (
        loss_too_good,
        Words(
            "The loss is too good to be true",
            "No model of text reaches this on text that it has not seen. The targets leak into the input, or "
            "validation holds what was trained on.",
            "Stop. Run hf-tinylm preflight; look at decoded windows and their targets with hf-tinylm inspect.",
        ),
    ),
    (
        divergence,
        Words(
            "The run diverges",
            "The loss has lost most of what it had learned, or is no finite number. It will not come back by itself.",
            "Stop. Start a new run from a checkpoint before the rise (--init_from) with a third of the learning_rate, "
            "warmup and clipping on.",
        ),
    ),
    (
        spike_that_stayed,
        Words(
            "The loss jumped and stayed up",
            "A bad update, or bad data, moved the weights to a worse place, and the rate is too low to leave it.",
            "Go back to the checkpoint before the jump. If it comes again at the same update look at those windows "
            "(hf-tinylm inspect --window), else lower the learning_rate.",
        ),
    ),
    (
        spike_that_recovered,
        Words(
            "The loss jumped and came back",
            "A few batches unlike the others, or a rate at its limit. One is harmless; several come before divergence.",
            "Look at the windows of that update (hf-tinylm inspect --window). If the data are fine and it goes on, "
            "lower the learning_rate by a third.",
        ),
    ),
    (
        norm_spikes,
        Words(
            "The gradient norm spikes",
            "The norm shows trouble before the loss does: single batches pull far harder than the rest, as a rate that "
            "is too high makes them.",
            "Lower the learning_rate by 3, or lengthen the warmup; hf-tinylm sweep finds a rate.",
        ),
    ),
    (
        training_loss_a_multiple,
        Words(
            "The training loss is a multiple of validation",
            "Both are nats per token and should lie together. A factor means that the training loss is divided by too "
            "few targets, for example by those of one micro-batch.",
            "Compare both losses on one batch; hf-tinylm preflight checks that a split batch gives the same gradient.",
        ),
    ),
    (
        rate_too_low,
        Words(
            "The learning rate is too low",
            "A healthy loss falls most at the beginning. This one is nearly straight: each update moves too little.",
            "Try three times the learning_rate; hf-tinylm sweep finds one.",
        ),
    ),
    (
        still_falling,
        Words(
            "The loss was still falling when the run ended",
            "The run ended before it had learned what this model and batch can learn.",
            "Train longer (train_tokens), or take a larger share of steps: a smaller batch or a higher rate.",
        ),
    ),
    (
        plateau_without_decay,
        Words(
            "The loss is flat and the rate was never lowered",
            "At a constant rate the loss settles where the noise of the updates balances what they learn. It is no "
            "limit of the model: a lower rate or a larger batch goes on from here.",
            "Lower the rate to a tenth over the last fifth of the run (min_lr_ratio: 0.1), or enlarge the batch.",
        ),
    ),
    (
        batch_below_noise_scale,
        Words(
            "The batch is far below the noise scale",
            "Most of each update is noise that the next ones must average away. Fewer, larger updates of the same "
            "tokens would reach the same loss at a higher rate, in less time where there are more devices.",
            "Enlarge global_batch_tokens towards the noise scale and raise learning_rate with its square root.",
        ),
    ),
    (
        clipping_always,
        Words(
            "Nearly every update is clipped",
            "Clipping is meant for exceptions. On every update it is a hidden change of the rate, and the limit "
            "decides what is learned.",
            "Raise max_grad_norm above the median norm; if that norm is the surprise, check how the loss is divided.",
        ),
    ),
    (
        training_and_validation_part,
        Words(
            "Training and validation part",
            "The model remembers its training text and learns no more that holds elsewhere.",
            "More text or fewer passes, or a smaller model; stop at the lowest validation loss.",
        ),
    ),
    (
        text_replayed,
        Words(
            "The same text comes again in the same order",
            "The loss repeats its own bumps after a fixed number of updates: the reader starts again before the end.",
            "Compare that number of updates with an epoch; look at windows so far apart (hf-tinylm inspect --window).",
        ),
    ),
    (
        cliffs_at_epoch_borders,
        Words(
            "The loss drops where an epoch ends",
            "Text that is seen again is partly remembered: from here on the training loss says less than validation.",
            "More text, or fewer passes; judge by validation.",
        ),
    ),
    (
        source_loss_rises,
        Words(
            "The loss of a source rises",
            "The model forgets that source: it is no longer trained on, or the order of the data changed its share.",
            "Shuffle the documents of all sources (shuffle: true), or give that source a larger share.",
        ),
    ),
    (
        throughput_drop,
        Words(
            "The run has become slower",
            "The same update takes much longer than before: another process, a hot device, or memory that is swapped.",
            "Look at the hardware (hf-tinylm tail), end what else runs there, check the cooling; then resume.",
        ),
    ),
    (
        input_starvation,
        Words(
            "The device waits for its input",
            "Reading windows takes a large share of the time, in which nothing is computed.",
            "Copy the shards to a local disk (stage_dir), or read from a faster volume.",
        ),
    ),
    (
        checkpoints_cost,
        Words(
            "Checkpoints take much of the time",
            "Training stands still while checkpoints are written.",
            "Save less often (save_steps, save_minutes: 30), keep save_in_background: true, use a faster volume.",
        ),
    ),
    (
        mfu_too_low,
        Words(
            "The device is mostly idle (MFU below 20%)",
            "Its arithmetic is starved: small micro-batches, no compilation, slow input, or a shared device.",
            "Raise per_device_train_batch_size, set torch_compile: true and bf16: true; hf-tinylm plan says what fits.",
        ),
    ),
    (
        mfu_too_high,
        Words(
            "MFU above 60% is hard to believe",
            "Training of this kind of model rarely passes 60%. The peak, the count of FLOPs or the clock is wrong.",
            "Check the peak of the device (peak_flops) and that the clock waits for the device.",
        ),
    ),
)

# What is said of a plateau in place of its own words where the noise scale tells its cause.
PLATEAU_OF_NOISE = Words(
    "The loss is flat because the batch is far below the noise scale",
    "At a constant rate the loss settles where the noise of the updates balances what they learn, and here nearly all "
    "of an update is noise. It is no limit of the model: the same weights go on from here under a larger batch.",
    "Branch from the newest checkpoint with its weights, a batch near the noise scale and a rate that falls to zero: "
    "--init_from CHECKPOINT --global_batch_tokens N --lr_schedule cosine --min_lr_ratio 0 (docs/adopt-a-run.md).",
)

NAMES = tuple(find.__name__ for find, _ in DIAGNOSES)


def findings(history: History) -> list[Finding]:
    """Every fault that shows, in the order of a run."""
    found = []
    for find, words in DIAGNOSES:
        evidence = find(history)
        if evidence is not None:
            if find is plateau_without_decay and (cause := noise_behind_plateau(history)) is not None:
                words, evidence = PLATEAU_OF_NOISE, f"{evidence}; {cause}"
            found.append(Finding(find.__name__, words.title, evidence, words.meaning, words.next_step))
    return found


def diagnose(run: Run) -> list[Finding]:
    """`findings` of a run as its folder has it now."""
    return findings(history_of(run))


def finding_lines(found: Sequence[Finding], updates: int) -> list[str]:
    """Findings for people; a word when there are none."""
    if not found:
        return [f"Nothing was found in {updates:,} updates."] if updates else ["There is no update to judge yet."]
    lines = []
    for one in found:
        lines += [
            one.title,
            f"  seen     {one.evidence}",
            f"  means    {one.meaning}",
            f"  do       {one.next_step}",
            "",
        ]
    return lines[:-1]


def as_json(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as plain values: `name title evidence meaning next_step`."""
    return [asdict(one) for one in found]
