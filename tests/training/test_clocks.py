"""Where the time and the money of a run went, its budgets, and the callbacks that users bring."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import ConfigError, RunStopped
from hf_tinylm.planning.optimizer import RunFlops
from hf_tinylm.training import saver
from hf_tinylm.training.clocks import Clocks, budget_reached
from hf_tinylm.training.finish import write_done
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
TOKENS = 256  # supervised targets of one update of make_trainer
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}


class Crash(Exception):
    """Stands for the end of a process."""


class CrashAfter(TrainerCallback):
    """Saves once, and crashes after a later update."""

    def __init__(self, save_at: int | None, crash_at: int) -> None:
        self.save_at, self.crash_at = save_at, crash_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = state.global_step == self.save_at
        if state.global_step == self.crash_at:
            raise Crash
        return control


class Nap(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.2)


class SlowWindows:
    """Windows that take a while to read."""

    def __init__(self, windows: TokenWindows, seconds: float) -> None:
        self.windows, self.seconds = windows, seconds
        self.sequence_length, self.order = windows.sequence_length, windows.order

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, ks: Any) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return self.windows.batch(ks)


def untimed(path: Path) -> list[dict[str, Any]]:
    timed = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")
    return [{k: v for k, v in row.items() if k not in timed} for row in read_rows(path / "metrics.jsonl")]


def assert_same_end(first: Path, second: Path, step: int) -> None:
    """Weights, optimizer, random state and rows of two runs are the same bits."""
    for name in ("model.safetensors", "optimizer.safetensors", "rng-00000.safetensors"):
        a, b = (load_file(folder / f"checkpoint-{step:08d}" / name) for folder in (first, second))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    assert untimed(first) == untimed(second)


def test_a_run_goes_on_from_the_clocks_of_its_checkpoint() -> None:
    first = Clocks(training_seconds=10.0, evaluation_seconds=2.0, flops=500, began=time.time() - 20)
    state = json.loads(json.dumps(first.to_state()))  # as a checkpoint keeps it
    second = Clocks(began=time.time() - 5)
    started = {"event": "started", "wall_seconds": 1.0}
    counted = second.continue_from(state, 2, [], [started], RunFlops(7))
    assert counted == {"thrown_away_updates": 0, "thrown_away_flops": 0}
    assert (second.training_seconds, second.evaluation_seconds, second.flops) == (10.0, 2.0, 500)
    assert (second.invocations, second.thrown_away_seconds) == (2, 0.0)
    assert second.wall_seconds == pytest.approx(25, abs=0.5)
    assert second.invocation_seconds == pytest.approx(5, abs=0.5)


def test_updates_that_crashes_threw_away_stay_counted() -> None:
    """A checkpoint at update 2, a crash after 5, and one after 4 of the second invocation, which saved nothing."""
    state = {**Clocks(training_seconds=2.0, flops=7 * 20).to_state(), "wall_seconds": 3.0}
    row = {"loss": 1.0}
    one = [{**row, "step": step, "supervised_tokens": 10 * step, "wall_seconds": 1.0 + step} for step in range(1, 6)]
    events: list[dict[str, Any]] = [
        {"event": "started", "step": 0, "wall_seconds": 1.0, "thrown_away_updates": 0, "thrown_away_flops": 0}
    ]
    second = Clocks(began=time.time())
    told = second.continue_from(state, 2, one, events, RunFlops(7))
    assert told == {"thrown_away_updates": 3, "thrown_away_flops": 7 * 30}
    assert (second.thrown_away_updates, second.flops) == (3, 7 * 50)
    assert (second.wall_before, second.thrown_away_seconds) == (6.0, 3.0)

    events.append({"event": "resumed", "step": 2, "wall_seconds": 7.0, **told})
    again = [{**row, "step": step, "supervised_tokens": 10 * step, "wall_seconds": 6.0 + step} for step in (3, 4)]
    third = Clocks(began=time.time())
    told = third.continue_from(state, 2, [*one[:2], *again], events, RunFlops(7))
    assert told == {"thrown_away_updates": 2, "thrown_away_flops": 7 * 20}
    assert (third.thrown_away_updates, third.flops) == (5, 7 * 70)
    assert (third.wall_before, third.thrown_away_seconds, third.invocations) == (10.0, 7.0, 3)
    report = third.report(20, price_per_hour=3600.0)
    assert report["cost"] == pytest.approx(10.0, abs=0.1)
    assert report["seconds"]["thrown away"] == 7.0

    killed_before_the_rows_were_dropped = Clocks(began=time.time())
    told = killed_before_the_rows_were_dropped.continue_from(state, 2, one, events, RunFlops(7))
    assert told == {"thrown_away_updates": 0, "thrown_away_flops": 0}
    assert killed_before_the_rows_were_dropped.thrown_away_updates == 3


def test_positions_without_a_target_are_thrown_away_too() -> None:
    """Rows of a chat run: 64 positions an update, of which 10 are learned; and those of a version that did not say."""
    state = {**Clocks(flops=7 * 128).to_state(), "wall_seconds": 3.0}
    rows = [
        {"loss": 1.0, "step": n, "supervised_tokens": 10 * n, "positions": 64 * n, "wall_seconds": 1.0 + n}
        for n in range(1, 5)
    ]
    started = [{"event": "started", "step": 0, "wall_seconds": 1.0, "thrown_away_updates": 0, "thrown_away_flops": 0}]
    assert Clocks().continue_from(state, 2, rows, started, RunFlops(7))["thrown_away_flops"] == 7 * 2 * 64
    old = [{key: value for key, value in row.items() if key != "positions"} for row in rows]
    assert Clocks().continue_from(state, 2, old, started, RunFlops(7))["thrown_away_flops"] == 7 * 2 * 10


@pytest.mark.parametrize("saved", [2, None], ids=["after-a-checkpoint", "before-the-first-checkpoint"])
def test_a_run_that_crashed_counts_everything_it_computed(make_trainer: Make, saved: int | None) -> None:
    with pytest.raises(Crash):
        make_trainer(callbacks=[CrashAfter(saved, 5)]).train()
    with pytest.raises(Crash):
        make_trainer(callbacks=[CrashAfter(None, 4)], resume_from_checkpoint="auto").train()
    last_row = read_rows(make_trainer(resume_from_checkpoint="auto").output_dir / "metrics.jsonl")[-1]
    trainer = make_trainer(resume_from_checkpoint="auto")
    began = time.time()
    trainer.train()
    report = trainer.record.clocks.report(trainer.supervised_tokens, 2.0)
    thrown_away = (5 - saved) + (4 - saved) if saved else 5 + 4
    per_token = trainer.model.config.shape.flops_per_token_with_attention(32)
    assert report["supervised_tokens"] == 6 * TOKENS
    assert report["thrown_away_updates"] == thrown_away
    assert report["flops"] == per_token * (6 + thrown_away) * TOKENS
    assert report["invocations"] == 3
    elapsed = time.time() - began
    assert last_row["wall_seconds"] < report["wall_seconds"] < last_row["wall_seconds"] + elapsed + 1
    assert report["cost"] == pytest.approx(report["wall_seconds"] / 3600 * 2.0, rel=1e-2)


def test_the_seconds_of_a_run_add_up_and_lie_where_they_were_spent(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_write(*arguments: Any) -> Path:
        time.sleep(0.3)
        return write(*arguments)

    write = saver.write_checkpoint
    monkeypatch.setattr(saver, "write_checkpoint", slow_write)
    plain = make_trainer("plain")
    trainer = make_trainer(
        train=SlowWindows(
            plain.train_dataset, 0.1
        ),  # 4 micro-batches: the first update waits, later ones are read ahead
        evaluation=SlowWindows(plain.eval_dataset, 0.05),  # 46 windows in 12 batches, 3 times
        callbacks=[Nap()],
        **{**SAVES, "save_steps": 3, "save_in_background": False},
    )
    trainer.train()
    report = trainer.record.clocks.report(trainer.supervised_tokens, None)
    seconds = report["seconds"]
    assert sum(seconds.values()) == pytest.approx(report["wall_seconds"], abs=0.01)
    # No upper bounds: a busy machine is slower. Each sleep is in its own clock, and together they are the wall clock.
    assert seconds["data"] >= 0.4
    assert seconds["evaluation"] >= 1.8
    assert seconds["saving"] >= 0.6
    assert seconds["start-up"] >= 0.2
    assert seconds["other"] >= 0
    rows = [row for row in read_rows(trainer.output_dir / "metrics.jsonl") if "loss" in row]
    assert seconds["training"] == pytest.approx(sum(row["seconds"] for row in rows), abs=0.01)
    assert report["tokens_per_second_training"] == pytest.approx(6 * TOKENS / seconds["training"], rel=0.01)
    assert report["tokens_per_second_end_to_end"] == pytest.approx(6 * TOKENS / report["wall_seconds"], rel=0.01)
    assert report["cost"] is None


def test_done_holds_the_report_of_all_invocations(make_trainer: Make) -> None:
    with pytest.raises(RunStopped):
        make_trainer(**SAVES, stop_after_updates=4).train()
    trainer = make_trainer(**SAVES, price_per_hour=36.0, resume_from_checkpoint="auto")
    trainer.train()
    trainer.save_model(str(trainer.output_dir / "final"))
    write_done(trainer, trainer.output_dir / "final")
    clocks = json.loads((trainer.output_dir / "DONE.json").read_text())["clocks"]
    rows = [row for row in read_rows(trainer.output_dir / "metrics.jsonl") if "loss" in row]
    assert clocks["invocations"] == 2
    assert clocks["supervised_tokens"] == 6 * TOKENS
    assert clocks["thrown_away_updates"] == 0
    assert clocks["wall_seconds"] >= rows[-1]["wall_seconds"]
    assert clocks["seconds"]["training"] == pytest.approx(sum(row["seconds"] for row in rows), abs=0.01)
    assert clocks["cost"] == pytest.approx(clocks["wall_seconds"] / 100, rel=0.01)
    assert sum(clocks["seconds"].values()) == pytest.approx(clocks["wall_seconds"], abs=0.02)
    walls = [row["wall_seconds"] for row in rows]
    assert walls == sorted(walls)


def test_a_budget_is_spent_when_it_is_reached() -> None:
    none = {"stop_after_updates": None, "max_hours": None, "max_cost": None, "price_per_hour": 2.0}
    clocks = Clocks(began=time.time() - 3600, wall_before=36_000.0)  # one hour of this invocation
    for name, value, expected in [
        ("stop_after_updates", 6, None),
        ("stop_after_updates", 5, "stop_after_updates=5"),
        ("max_hours", 1.01, None),
        ("max_hours", 0.99, "max_hours=0.99"),
        ("max_cost", 2.01, None),
        ("max_cost", 1.99, "max_cost=1.99"),
    ]:
        assert budget_reached(clocks, 5, SimpleNamespace(**{**none, name: value})) == expected


@pytest.mark.parametrize(
    "budget",
    [{"stop_after_updates": 1}, {"max_hours": 1e-9}, {"max_cost": 1e-9, "price_per_hour": 1.0}],
    ids=lambda budget: next(iter(budget)),
)
def test_a_budget_ends_an_invocation_after_a_save_and_the_run_ends_as_if_uninterrupted(
    make_trainer: Make, budget: dict[str, float]
) -> None:
    """An invocation does one update; the last one has nothing left to stop and completes the run."""
    run = {**SAVES, "save_steps": 100, "model": {"attention_dropout": 0.1}}
    whole = make_trainer("whole", **run)
    whole.train()
    for update in range(1, 6 if "stop_after_updates" in budget else 2):
        trainer = make_trainer("parts", **run, **budget, resume_from_checkpoint="auto")
        with pytest.raises(RunStopped, match=f"{next(iter(budget))}=.*after update {update} of 6") as caught:
            trainer.train()
        assert caught.value.exit_code == 3
        assert read_rows(trainer.output_dir / "events.jsonl")[-1]["event"] == "interrupted"
        assert [row["step"] for row in untimed(trainer.output_dir) if "loss" in row][-1] == update
    left = budget if "stop_after_updates" in budget else {}
    last = make_trainer("parts", **run, **left, resume_from_checkpoint="auto")
    assert last.train().global_step == 6
    assert_same_end(whole.output_dir, last.output_dir, 6)


def test_a_cost_without_a_price_is_refused(make_trainer: Make) -> None:
    with pytest.raises(ConfigError, match="needs a price"):
        make_trainer(max_cost=3.0)


# ---- callbacks of Hugging Face and of users, unmodified -----------------------------------------------------------


class Count(TrainerCallback, ExportableState):
    """A user's own: it counts the targets it has seen logged, and stops nothing."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "supervised_tokens" in logs:
            self.seen += logs["supervised_tokens"]

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


def test_a_users_own_callback_continues_from_the_checkpoint(make_trainer: Make) -> None:
    whole = Count()
    make_trainer("whole", callbacks=[whole], logging_steps=1).train()
    assert whole.seen == TOKENS * (1 + 2 + 3 + 4 + 5 + 6)
    with pytest.raises(RunStopped):
        make_trainer(callbacks=[Count()], logging_steps=1, stop_after_updates=4).train()
    resumed = Count()
    make_trainer(callbacks=[resumed], logging_steps=1, resume_from_checkpoint="auto").train()
    assert resumed.seen == whole.seen


def early_stopping(make_trainer: Make, name: str, **fields: Any) -> Any:
    """A run whose validation loss gets worse from the second evaluation on: it stops at the third."""
    return make_trainer(
        name,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=10.0)],
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        **fields,
    )


def test_early_stopping_ends_a_run_and_keeps_its_patience_over_a_resume(make_trainer: Make) -> None:
    whole = early_stopping(make_trainer, "whole")
    assert whole.train().global_step == 3
    with pytest.raises(RunStopped, match="after update 2 of 6"):
        early_stopping(make_trainer, "parts", stop_after_updates=2).train()
    resumed = early_stopping(make_trainer, "parts", resume_from_checkpoint="auto")
    assert resumed.train().global_step == 3
    assert_same_end(whole.output_dir, resumed.output_dir, 3)
    again = early_stopping(make_trainer, "parts", resume_from_checkpoint="auto")
    assert again.train().global_step == 3, "a run that a callback has ended does not train on"


def test_tensorboard_receives_the_numbers_of_the_run(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = make_trainer(report_to="tensorboard", logging_steps=1, eval_strategy="steps", eval_steps=3)
    trainer.train()
    board = accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    for tag, key in [("train/loss", "loss"), ("eval/loss", "eval_loss")]:
        expected = [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows if key in row]
        assert [(event.step, event.value) for event in board.Scalars(tag)] == expected


def test_trackio_receives_the_numbers_of_the_run(
    make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    trainer = make_trainer(report_to="trackio", project="tiny", run_name="first", logging_steps=1, eval_strategy="no")
    trainer.train()
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    asked = [sys.executable, "-m", "trackio.cli", "get", "metric", "--project", "tiny", "--run", "first"]
    told = subprocess.run(
        [*asked, "--metric", "train/loss", "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    values = json.loads(told.stdout)
    assert [value["value"] for value in values["values"]] == pytest.approx([row["loss"] for row in rows])
