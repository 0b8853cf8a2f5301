"""Saving off the critical path: isolated, one at a time, never lost without a word."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_tinylm.errors import TrainingError
from hf_tinylm.training import saver as saver_module
from hf_tinylm.training.checkpoint import Snapshot, checkpoint_fault, list_checkpoints
from hf_tinylm.training.metrics import Events, read_rows
from hf_tinylm.training.saver import CheckpointSaver, HostCopies

Make = Callable[..., Any]


class Disk:
    """Stands before `write_checkpoint`: slow until `go` is set, failing while `error` is, and counting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.error = threading.Event(), None
        self.at_once = self.most_at_once = 0
        self.steps: list[int] = []
        self.write = saver_module.write_checkpoint
        self.go.set()
        monkeypatch.setattr(saver_module, "write_checkpoint", self)

    def __call__(self, output_dir: Path, snapshot: Snapshot) -> Path:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            assert self.go.wait(30)
            if self.error is not None:
                raise self.error
            self.steps.append(snapshot.step)
            return self.write(output_dir, snapshot)
        finally:
            self.at_once -= 1


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def taking(step: int, weights: dict[str, torch.Tensor], eval_loss: float | None = None) -> Callable[..., Snapshot]:
    def take(host: HostCopies) -> Snapshot:
        state = {"step": step, "eval_loss": eval_loss}
        moments = {f"exp_avg.{name}": tensor * 2 for name, tensor in weights.items()}
        return Snapshot(step, {}, host.copy(weights, "w."), host.copy(moments, "o."), [{"x": torch.zeros(1)}], state)

    return take


def new_saver(folder: Path, keep: int | None = None, milestone_steps: int | None = None, **named: Any) -> Any:
    return CheckpointSaver(folder, Events(folder / "events.jsonl"), keep, milestone_steps, **named)


def saved_steps(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


def test_training_that_goes_on_does_not_reach_into_the_file(tmp_path: Path, disk: Disk) -> None:
    """The write begins only after the weights were changed in place, and still holds the values of the snapshot."""
    weights = {"a": torch.arange(10.0), "b": torch.ones(3, 4, dtype=torch.bfloat16)}
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    saver = new_saver(tmp_path)
    disk.go.clear()
    saver.save(taking(1, weights))
    for tensor in weights.values():
        tensor.add_(100)
    disk.go.set()
    saver.wait()
    found = load_file(tmp_path / "checkpoint-00000001" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    moments = load_file(tmp_path / "checkpoint-00000001" / "optimizer.safetensors")
    assert torch.equal(moments["exp_avg.a"], expected["a"] * 2)


def test_a_second_save_waits_for_the_first_so_that_at_most_one_is_in_flight(tmp_path: Path, disk: Disk) -> None:
    weights = {"a": torch.zeros(1000)}
    saver = new_saver(tmp_path)
    disk.go.clear()
    assert saver.save(taking(1, weights)) < 5
    assert disk.steps == []
    threading.Timer(0.3, disk.go.set).start()
    weights["a"].fill_(2)
    assert saver.save(taking(2, weights)) > 0.2
    for step in (3, 4, 5):
        weights["a"].fill_(step)
        saver.save(taking(step, weights))
    saver.wait()
    assert disk.most_at_once == 1
    assert disk.steps == [1, 2, 3, 4, 5]
    values = [load_file(path / "model.safetensors")["a"][0].item() for path in list_checkpoints(tmp_path)]
    assert values == [0, 2, 3, 4, 5]
    stalls = [row["stall_seconds"] for row in read_rows(tmp_path / "events.jsonl")]
    assert stalls[0] < 0.2 < stalls[1]


@pytest.mark.parametrize("through", ["save", "wait"])
def test_a_failed_write_surfaces_at_the_next_save_or_wait_and_names_what_is_left(
    tmp_path: Path, disk: Disk, through: str
) -> None:
    weights = {"a": torch.zeros(10)}
    saver = new_saver(tmp_path)
    saver.save(taking(1, weights))
    saver.wait()
    disk.error = OSError(28, "No space left on device")
    saver.save(taking(2, weights))
    with pytest.raises(
        TrainingError, match=r"No space left on device.*checkpoint-00000001 is the last good checkpoint"
    ):
        saver.save(taking(3, weights)) if through == "save" else saver.wait()
    assert not saver.failed
    assert saved_steps(tmp_path) == [1]


def test_a_failure_in_the_foreground_is_raised_at_once(tmp_path: Path, disk: Disk) -> None:
    disk.error = OSError(28, "No space left on device")
    with pytest.raises(TrainingError, match="There is no good checkpoint yet"):
        new_saver(tmp_path, background=False).save(taking(1, {"a": torch.zeros(10)}))


class AfterTheWrite(TrainerCallback):
    """Lets an update begin only when the write in flight has ended, so that a test does not depend on speed."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        thread = self.trainer.record.saver._thread
        if thread is not None:
            thread.join(30)


def test_a_failed_write_in_the_background_ends_the_run_at_the_next_update(make_trainer: Make, disk: Disk) -> None:
    waiting = AfterTheWrite()
    settings = {"save_strategy": "steps", "save_steps": 2, "save_in_background": True}
    trainer = waiting.trainer = make_trainer(callbacks=[waiting], **settings)
    write = disk.write

    def full_at_four(output_dir: Path, snapshot: Snapshot) -> Path:
        if snapshot.step == 4:
            raise OSError(28, "No space left on device")
        return write(output_dir, snapshot)

    disk.write = full_at_four  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"No space left on device.*checkpoint-00000002 is the last good"):
        trainer.train()
    assert read_rows(trainer.output_dir / "metrics.jsonl")[-1]["step"] == 5
    assert saved_steps(trainer.output_dir) == [2]
    assert not (trainer.output_dir / "run.lock").exists()
    disk.write = write
    assert make_trainer(**settings, resume_from_checkpoint="auto").train().global_step == 6


def test_a_failure_of_the_last_write_ends_the_run_with_an_error(make_trainer: Make, disk: Disk) -> None:
    disk.error = OSError(5, "Input/output error")
    with pytest.raises(TrainingError, match=r"Input/output error.*There is no good checkpoint yet"):
        make_trainer(save_in_background=True).train()  # saves after the last update only


def test_the_newest_the_milestones_and_the_best_stay(tmp_path: Path) -> None:
    """Updates 3 and 6 share the lowest validation loss; the earlier one is the best."""
    saver = new_saver(tmp_path, keep=2, milestone_steps=4)
    losses = {1: 3.0, 3: 1.5, 6: 1.5, 9: 2.0}
    for step in range(1, 12):
        saver.save(taking(step, {"a": torch.zeros(10)}, losses.get(step)))
    saver.wait()
    assert saved_steps(tmp_path) == [3, 4, 8, 10, 11]
    removed = [name for row in read_rows(tmp_path / "events.jsonl") for name in row["removed"]]
    assert sorted(removed) == [f"checkpoint-{step:08d}" for step in (1, 2, 5, 6, 7, 9)]
    assert all(checkpoint_fault(path) is None for path in list_checkpoints(tmp_path))


def test_without_a_limit_every_checkpoint_stays(tmp_path: Path) -> None:
    saver = new_saver(tmp_path, keep=None)
    for step in (5, 9, 10, 100):
        saver.save(taking(step, {"a": torch.zeros(10)}))
    saver.wait()
    assert saved_steps(tmp_path) == [5, 9, 10, 100]


def test_save_best_saves_whenever_a_validation_is_the_best_so_far(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(
        **{"save_strategy": "steps", "save_steps": 100, "save_total_limit": 1, "save_best": True},
        **{"eval_strategy": "steps", "eval_steps": 1},
    )
    losses = iter([3.0, 2.0, 2.5, 1.0, 4.0, 5.0])
    monkeypatch.setattr(
        trainer, "evaluate", lambda: {"eval_loss": next(losses), "eval_tokens": 1, "eval_bits_per_byte": 1.0}
    )
    trainer.train()
    saved = [row for row in read_rows(trainer.output_dir / "events.jsonl") if row["event"] == "saved"]
    assert [row["step"] for row in saved] == [1, 2, 4, 6]  # 6 is the last update, which is always saved
    assert saved_steps(trainer.output_dir) == [4, 6]


def test_a_saved_event_tells_the_bytes_and_the_seconds(make_trainer: Make) -> None:
    """Float32 weights and two moments are 12 bytes per parameter; headers, RNG and JSON are below 1% of a million."""
    trainer = make_trainer(
        model={"hidden_size": 128, "num_hidden_layers": 6, "intermediate_size": 384}, train_tokens=256, warmup_steps=0
    )
    trainer.train()
    row = next(row for row in read_rows(trainer.output_dir / "events.jsonl") if row["event"] == "saved")
    folder = trainer.output_dir / row["checkpoint"]
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert parameters > 1_000_000
    assert row["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert row["bytes_per_parameter"] == pytest.approx(row["bytes"] / parameters, abs=1e-3)
    assert 12.0 < row["bytes_per_parameter"] < 12.1
    assert 0 < row["stall_seconds"] < 30
    assert 0 < row["write_seconds"] < 30
    assert row["step"] == 1


class Diary(TrainerCallback, ExportableState):
    """A callback whose state is a list that grows at every update."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.steps.append(state.global_step)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_the_state_of_a_callback_is_that_of_the_saved_update(make_trainer: Make, disk: Disk) -> None:
    """The write is held back until the run is in its last update."""
    disk.go.clear()

    class Release(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 5:
                disk.go.set()

    settings = {"save_strategy": "steps", "save_steps": 3, "save_in_background": True}
    trainer = make_trainer(callbacks=[Diary(), Release()], train_tokens=5 * 256, **settings)
    trainer.train()
    state = json.loads((trainer.output_dir / "checkpoint-00000003" / "trainer_state.json").read_text())
    assert state["callbacks"]["Diary"]["attributes"] == {"steps": [1, 2, 3]}


def test_the_interpreter_waits_for_the_write_before_it_ends(tmp_path: Path) -> None:
    program = f"""
import pathlib, sys, time, torch
from hf_tinylm.training import saver
from hf_tinylm.training.checkpoint import Snapshot
from hf_tinylm.training.metrics import Events
write = saver.write_checkpoint
saver.write_checkpoint = lambda *arguments: (time.sleep(1), write(*arguments))[1]
folder = pathlib.Path({str(tmp_path)!r})
one = saver.CheckpointSaver(folder, Events(folder / "events.jsonl"), None, None)
one.save(lambda host: Snapshot(1, {{}}, {{"a": torch.ones(3)}}, {{}}, [], {{"step": 1}}))
print(len(list(folder.glob("checkpoint-*"))))
sys.exit(7)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (7, "0"), done.stderr
    assert time.monotonic() - began > 1
    assert checkpoint_fault(tmp_path / "checkpoint-00000001") is None
    assert read_rows(tmp_path / "events.jsonl")[-1]["event"] == "saved"
