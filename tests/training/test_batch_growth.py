"""A batch that grows, in training: the windows that are read, the weights that result, and what a resume may change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_tinylm.errors import ContractError, TrainingError
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
T = 32
# Updates of 4 windows, then of 8 from 10 windows on (which is after 3 of them), then of 12 from 28 on; the last is cut.
SIZES = [4, 4, 4, 8, 8, 12, 12]
GROWN = {"global_batch_tokens": 4 * T, "batch_growth": [[10 * T, 8 * T], [27 * T, 12 * T]], "train_tokens": 52 * T - 40}


class Noted:
    """A data set that remembers which windows were asked of it."""

    def __init__(self, windows: Any) -> None:
        self.windows, self.asked = windows, list[int]()
        self.sequence_length, self.order = windows.sequence_length, windows.order

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, ks: Any) -> dict[str, torch.Tensor]:
        self.asked += [int(k) for k in ks]
        return self.windows.batch(ks)


def plain_run(trainer: Any) -> list[float]:
    """The same run as a plain loop over whole updates: the losses; the trainer's fresh model becomes its result."""
    model, windows, args = trainer.model, trainer.train_dataset, trainer.args
    groups = [[p for p in model.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": args.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon,
    )  # fmt: skip
    losses, first = [], 0
    for update, size in enumerate(SIZES):
        batch = windows.batch(range(first, first + size))
        labels = batch["shift_labels"].flatten()
        if update == len(SIZES) - 1:
            labels[size * T - 40 :] = -100
        logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = trainer.schedule(update)
        optimizer.step()
        losses.append(float(loss.detach()))
        first += size
    return losses


def test_a_growing_run_is_that_of_a_plain_loop_over_its_updates(make_trainer: Make) -> None:
    """7 updates of 4, 8 and 12 windows in micro-batches of 2; the last one lacks 40 targets."""
    reference = make_trainer("reference", **GROWN)
    losses = plain_run(reference)
    trainer = make_trainer("run", **GROWN)
    noted = trainer.train_dataset = Noted(trainer.train_dataset)
    trainer.train()
    assert noted.asked[-sum(SIZES) :] == list(range(52))
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    assert [row["supervised_tokens"] for row in rows] == [n * T for n in (4, 8, 12, 20, 28, 40)] + [52 * T - 40]
    assert [row["learning_rate"] for row in rows] == [trainer.schedule(update) for update in range(7)]
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5)
    expected = reference.model.state_dict()
    assert max(float((w - expected[n]).abs().max()) for n, w in trainer.model.state_dict().items()) < 1e-5
    assert trainer.state.epoch == pytest.approx(52 / len(noted))
    recorded = json.loads((trainer.output_dir / "run.json").read_text())
    assert recorded["identity"]["training"]["batch_growth"] == GROWN["batch_growth"]
    inputs = {entry["update"]: entry["windows"] for entry in recorded["facts"]["inputs"]["updates"]}
    assert inputs == {
        0: [0, 1, 2, 3],
        3: list(range(12, 20)),
        5: list(range(28, 36)),
        6: list(range(40, 48)),
    }


def test_a_run_without_growth_has_the_contract_that_it_always_had(make_trainer: Make) -> None:
    trainer = make_trainer("run", train_tokens=2 * 256, warmup_steps=0)
    trainer.train()
    assert "batch_growth" not in json.loads((trainer.output_dir / "run.json").read_text())["identity"]["training"]


def test_another_growth_is_another_run_and_is_refused_on_resume(make_trainer: Make) -> None:
    saved = {**GROWN, "save_strategy": "steps", "save_steps": 3, "save_total_limit": None}
    whole = make_trainer("run", **saved)
    whole.train()
    shutil.rmtree(whole.output_dir / "checkpoint-00000007")
    shutil.rmtree(whole.output_dir / "checkpoint-00000006")
    for growth in ([[10 * T, 8 * T]], [[10 * T, 8 * T], [27 * T, 16 * T]], []):
        with pytest.raises(ContractError, match=r"training\.batch_growth: \[\[320, 256\], \[864, 384\]\] -> "):
            make_trainer("run", **{**saved, "batch_growth": growth}, resume_from_checkpoint="auto").train()
    pairs = [tuple(pair) for pair in GROWN["batch_growth"]]  # type: ignore[attr-defined]
    again = make_trainer("run", **{**saved, "batch_growth": pairs}, resume_from_checkpoint="auto")
    again.train()
    assert all(torch.equal(w, again.model.state_dict()[n]) for n, w in whole.model.state_dict().items())


def poison(trainer: Any, update: int) -> None:
    """The first micro-batch of that update, counted from 0 and once only, has a loss that is not finite."""
    forward, before = trainer.model.forward, 2 + sum(SIZES[:update]) // 2
    calls = []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) == before - 1:
            output.loss = output.loss * float("nan")
        return output

    trainer.model.forward = poisoned


def test_windows_go_on_without_a_gap_after_a_skipped_update_before_the_growth(make_trainer: Make) -> None:
    """The third update is tried twice: its second try takes the next 4 windows, and larger updates follow them."""
    fields = {**GROWN, "nonfinite": "skip", "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    whole = make_trainer("run", **fields)
    noted = whole.train_dataset = Noted(whole.train_dataset)
    poison(whole, 2)
    whole.train()
    assert sorted(set(noted.asked)) == list(range(56))
    states = {
        step: json.loads((whole.output_dir / f"checkpoint-{step:08d}" / "trainer_state.json").read_text())
        for step in (2, 3, 4, 7)
    }
    assert {step: state["next_window"] for step, state in states.items()} == {2: 8, 3: 16, 4: 24, 7: 56}
    for step in (5, 6, 7):
        shutil.rmtree(whole.output_dir / f"checkpoint-{step:08d}")
    resumed = make_trainer("run", **fields, resume_from_checkpoint="auto")
    again = resumed.train_dataset = Noted(resumed.train_dataset)
    resumed.train()
    assert sorted(set(again.asked) - set(range(8))) == list(range(24, 56))
    assert all(torch.equal(w, resumed.model.state_dict()[n]) for n, w in whole.model.state_dict().items())


def test_a_failed_update_of_a_grown_batch_names_its_own_windows(make_trainer: Make) -> None:
    trainer = make_trainer("run", **GROWN)
    poison(trainer, 3)
    with pytest.raises(TrainingError, match="Update 4 has loss nan"):
        trainer.train()
    event = next(row for row in read_rows(trainer.output_dir / "events.jsonl") if row["event"] == "nonfinite")
    assert event["windows"] == [12, 13]
