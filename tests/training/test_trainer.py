"""The update loop against the stock Trainer and against itself, split in other ways."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import ConfigError, TrainingError
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.schedule import Schedule

Make = Callable[..., Any]
LENGTH = 32


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


class InOrder(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The windows of a run in the order of the run, for a stock Trainer that does not shuffle."""

    def __init__(self, windows: TokenWindows, count: int) -> None:
        self.windows, self.count = windows, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        row = self.windows[k]
        return {**row, "labels": row["input_ids"]}


class StockInOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def stock_run(model: Any, windows: TokenWindows, updates: int, folder: Path, rate: Callable[[int], float]) -> Any:
    """20 updates of transformers' own Trainer: AdamW over the same groups, rates from the same function."""
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=updates,
        learning_rate=1.0, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, optim="adamw_torch",
        remove_unused_columns=False,  # it would drop shift_labels and supervise 31 of 32 targets
    )  # fmt: skip
    trainer = StockInOrder(model, args, train_dataset=InOrder(windows, updates * 8))
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    trainer.train()
    return model


def test_twenty_updates_equal_the_stock_trainer_on_the_same_windows_and_rates(
    make_trainer: Make, tmp_path: Path
) -> None:
    """Tolerance 5e-6 at learning rate 1e-4: float32 sums in another order, divided by Adam's small second moments."""
    ours = make_trainer(learning_rate=1e-4, warmup_steps=3, train_tokens=20 * 8 * LENGTH)
    stock = stock_model(ours.model).train()
    start = weights(stock)
    rate = Schedule(1e-4, 0.1, 3, 20)
    stock_run(stock, ours.train_dataset, 20, tmp_path / "stock", lambda update: rate(min(update, 19)))
    ours.train()
    assert largest_difference(start, weights(stock)) > 1e-3, "a run that hardly moves proves nothing"
    assert largest_difference(weights(ours.model), weights(stock)) < 5e-6


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_split_into_micro_batches_does_not_change_the_run(make_trainer: Make, rows: int) -> None:
    reference, other = (
        make_trainer("a", learning_rate=1e-4),
        make_trainer("b", learning_rate=1e-4, per_device_train_batch_size=rows),
    )
    reference.train()
    other.train()
    assert largest_difference(weights(reference.model), weights(other.model)) < 5e-6


class Ragged:
    """Four rows of 32 tokens with 30, 1, 2 and 3 supervised targets, for ever."""

    sequence_length = LENGTH

    def __init__(self, counts: tuple[int, ...] = (30, 1, 2, 3)) -> None:
        self.counts = counts
        self.ids = torch.randint(4, 101, (len(counts), LENGTH + 1), generator=torch.Generator().manual_seed(11))

    def __len__(self) -> int:
        return len(self.counts)

    def batch(self, ks: Any) -> dict[str, torch.Tensor]:
        rows = [int(k) % len(self.counts) for k in ks]
        labels = self.ids[rows, 1:].clone()
        for position, row in enumerate(rows):
            labels[position, self.counts[row] :] = -100
        return {"input_ids": self.ids[rows, :-1], "shift_labels": labels}


def test_rows_with_unequal_targets_weigh_by_targets_however_they_are_split(make_trainer: Make) -> None:
    runs = []
    for rows in (4, 1):
        trainer = make_trainer(
            f"rows{rows}", train=Ragged(), per_device_train_batch_size=rows, global_batch_tokens=4 * LENGTH,
            train_tokens=4 * LENGTH, warmup_steps=0, min_lr_ratio=1.0, weight_decay=0.0, max_grad_norm=0.0,
        )  # fmt: skip
        with torch.no_grad():
            batch = Ragged().batch(range(4))
            logits = trainer.model(batch["input_ids"]).logits
        nll = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).double(), batch["shift_labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        trainer.train()
        row = read_rows(trainer.output_dir / "metrics.jsonl")[0]
        assert row["supervised_tokens"] == 36
        assert row["loss"] == pytest.approx(float(nll) / 36, abs=1e-6)
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) < 1e-6


def test_the_last_update_is_partial_to_the_token(make_trainer: Make) -> None:
    """The arithmetic of 2,000,000,000 tokens in updates of 262,144, scaled to 256: 7 full updates and 101 targets."""
    budget = 7 * 256 + 101
    trainer = make_trainer(train_tokens=budget)
    trainer.train()
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    assert [row["supervised_tokens"] for row in rows] == [*range(256, 1793, 256), budget]
    trainer.state.global_step = 7
    batches = next(iter(trainer.get_train_dataloader()))
    kept = [int((batch["shift_labels"] != -100).sum()) for batch in batches]
    assert kept == [64, 37, 0, 0]  # micro-batches of 2 x 32: 101 = 64 + 37
    flat = torch.cat([batch["shift_labels"].flatten() for batch in batches])
    assert bool((flat[:101] != -100).all())
    assert bool((flat[101:] == -100).all())


def test_an_epoch_supervises_every_target_of_the_windows_once(make_trainer: Make) -> None:
    trainer = make_trainer(train_tokens="epoch", warmup_steps=0)
    dataset = trainer.train_dataset
    assert trainer.plan.train_tokens == dataset.targets_per_epoch
    seen = []
    for batches in trainer.get_train_dataloader():
        for batch in batches:
            seen += batch["shift_labels"][batch["shift_labels"] != -100].tolist()
    every = torch.cat([dataset[k]["shift_labels"] for k in range(len(dataset))])
    assert sorted(seen) == sorted(every.tolist())


def test_a_loss_that_is_not_finite_stops_the_run_and_changes_nothing(make_trainer: Make) -> None:
    trainer = make_trainer(save_strategy="steps", save_steps=1)
    forward, calls = trainer.model.forward, []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2 * 4 + 2:  # second micro-batch of the third update
            output.loss = output.loss * float("nan")
        return output

    trainer.model.forward = poisoned
    states: list[dict[str, torch.Tensor]] = []

    class Remember(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            states.append(weights(trainer.model))

    trainer.add_callback(Remember())
    with pytest.raises(
        TrainingError, match=r"Update 3 has loss nan .* with such a loss: 18, 19\. .*checkpoint-00000002"
    ):
        trainer.train()
    assert largest_difference(states[2], weights(trainer.model)) == 0.0
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss"]) and row["loss"] > 0 for row in rows)
    assert sorted(p.name for p in trainer.output_dir.glob("checkpoint-*")) == [
        "checkpoint-00000001",
        "checkpoint-00000002",
    ]


def poison(trainer: Any, calls_to_poison: set[int]) -> None:
    """Multiply the loss of the given forward calls (counted from 1) by NaN."""
    forward, calls = trainer.model.forward, []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) in calls_to_poison:
            output.loss = output.loss * float("nan")
        return output

    trainer.model.forward = poisoned


def test_a_failed_update_is_written_down_with_its_windows_and_their_text(make_trainer: Make) -> None:
    trainer = make_trainer()
    poison(trainer, {2 * 4 + 2})
    with pytest.raises(TrainingError):
        trainer.train()
    event = next(row for row in read_rows(trainer.output_dir / "events.jsonl") if row["event"] == "nonfinite")
    assert (event["action"], event["windows"], event["loss"]) == ("stopped", [18, 19], None)
    expected = trainer.train_dataset.batch([18])["input_ids"][0].tolist()
    assert event["excerpt"] == " ".join(map(str, expected))


def test_a_skipped_update_advances_neither_schedule_nor_budget(make_trainer: Make) -> None:
    trainer = make_trainer(nonfinite="skip", save_strategy="steps", save_steps=1)
    poison(trainer, {2 * 4 + 2})
    trainer.train()
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    assert [row["supervised_tokens"] for row in rows] == [256 * step for step in range(1, 7)]
    assert [row["learning_rate"] for row in rows] == [trainer.schedule(update) for update in range(6)]
    state = json.loads((trainer.output_dir / "checkpoint-00000006" / "trainer_state.json").read_text())
    assert (state["skipped_batches"], state["next_window"]) == (1, 7 * 8)


def test_a_run_with_a_skipped_update_resumes_to_the_same_bits(make_trainer: Make) -> None:
    fields = {"nonfinite": "skip", "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    whole = make_trainer("whole", **fields)
    poison(whole, {2 * 4 + 2})
    whole.train()
    for later in sorted(whole.output_dir.glob("checkpoint-*"))[4:]:
        shutil.rmtree(later)
    resumed = make_trainer("whole", **fields, resume_from_checkpoint="auto")
    resumed.train()
    assert largest_difference(weights(whole.model), weights(resumed.model)) == 0.0


def test_too_many_skipped_updates_stop_the_run(make_trainer: Make) -> None:
    trainer = make_trainer(nonfinite="skip", nonfinite_limit=2)
    poison(trainer, set(range(1, 200)))
    with pytest.raises(TrainingError, match="Update 1 has loss nan"):
        trainer.train()
    actions = [row["action"] for row in read_rows(trainer.output_dir / "events.jsonl") if row["event"] == "nonfinite"]
    assert actions == ["skipped", "skipped", "stopped"]


def test_clipping_scales_the_step_and_logs_the_norm_before_it(make_trainer: Make) -> None:
    clipped, free = make_trainer("c", max_grad_norm=0.01), make_trainer("f", max_grad_norm=0.0)
    clipped.train()
    free.train()
    rows, free_rows = (read_rows(t.output_dir / "metrics.jsonl") for t in (clipped, free))
    assert rows[0]["grad_norm"] == pytest.approx(free_rows[0]["grad_norm"], rel=1e-6)
    assert rows[0]["grad_norm"] > 0.1
    assert all(row["clipped"] for row in rows)
    assert not any(row["clipped"] for row in free_rows)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_validation_is_the_same_number_for_every_batch_size(make_trainer: Make, rows: int) -> None:
    """Rows with 30, 1, 2, 3 and 20 targets: the sum over 56 targets, not a mean of means."""
    windows = Ragged((30, 1, 2, 3, 20))
    trainer = make_trainer(evaluation=windows, per_device_eval_batch_size=rows, eval_strategy="steps", eval_steps=100)
    batch = windows.batch(range(5))
    with torch.no_grad():
        logits = trainer.model(batch["input_ids"]).logits.double()
    labels = batch["shift_labels"].flatten()
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    found = trainer.evaluate()
    assert found["eval_tokens"] == 56
    assert found["eval_loss"] == pytest.approx(float(nll) / 56, abs=1e-5)
    size = sum(int(token) % 5 for token in labels if token != -100)
    assert found["eval_bits_per_byte"] == pytest.approx(float(nll) / math.log(2) / size, rel=1e-5)


def test_validation_disturbs_neither_random_state_nor_mode(make_trainer: Make) -> None:
    runs = []
    for name, fields in (("with", {"eval_strategy": "steps", "eval_steps": 2}), ("without", {})):
        trainer = make_trainer(name, model={"attention_dropout": 0.2}, **fields)
        trainer.train()
        assert trainer.model.training
        runs.append(weights(trainer.model))
    assert largest_difference(*runs) == 0.0


def test_rows_and_callbacks_see_every_update(make_trainer: Make) -> None:
    seen: list[str] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert state.max_steps == 6
            assert kwargs["optimizer"] is not None
            seen.append("begin")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"step {state.global_step}")

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            seen.append(f"evaluated {state.global_step}")
            assert metrics["eval_loss"] > 0

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"saved {state.global_step}")

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                seen.append(f"log {state.global_step}")

    fields = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    trainer = make_trainer(callbacks=[Watch()], **fields)
    trainer.train()
    assert seen == [
        "begin", "step 1", "step 2", "log 2", "step 3", "saved 3", "step 4", "log 4", "evaluated 4", "step 5", "step 6",
        "log 6", "evaluated 6", "saved 6",
    ]  # fmt: skip
    rows = read_rows(trainer.output_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert list(rows[0]) == [
        "step", "supervised_tokens", "positions", "loss", "learning_rate", "grad_norm", "clipped", "seconds",
        "data_seconds", "tokens_per_second", "flops_per_second", "mfu", "wall_seconds", "gradient_signal",
        "gradient_noise", "noise_scale", "noise_scale_error", "signal_share",
    ]  # fmt: skip
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 6]


def test_a_callback_can_stop_the_run(make_trainer: Make) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    trainer = make_trainer(callbacks=[Stop()])
    assert trainer.train().global_step == 2


def test_a_batch_that_does_not_divide_and_a_folder_in_use_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a multiple of the 96 tokens of one micro-step .* Use 288"):
        make_trainer(per_device_train_batch_size=3)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        make_trainer("used").train()
    assert not (tmp_path / "run").exists(), "a refused run must not leave a folder"


def test_bfloat16_autocast_keeps_float32_weights_and_moments(make_trainer: Make) -> None:
    trainer = make_trainer(bf16=True)
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    moments = [v for state in trainer.optimizer.state.values() for v in state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    plain = make_trainer("plain")
    plain.train()
    rows, plain_rows = (read_rows(t.output_dir / "metrics.jsonl") for t in (trainer, plain))
    difference = [abs(a["loss"] - b["loss"]) for a, b in zip(rows, plain_rows, strict=True)]
    assert 0 < max(difference) < 0.02, "bf16 products must be used, and must stay close to float32"


def test_run_json_says_what_the_run_is(make_trainer: Make) -> None:
    trainer = make_trainer()
    trainer.train()
    contract = json.loads((trainer.output_dir / "run.json").read_text())
    assert contract["identity"]["training"]["learning_rate"] == 1e-3
    assert contract["identity"]["model"]["hidden_size"] == 32
    assert contract["execution"]["processes"] == 1
    assert contract["environment"]["torch"] == torch.__version__.split("+")[0] or contract["environment"]["torch"]
