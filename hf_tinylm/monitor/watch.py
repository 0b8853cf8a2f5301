"""A run that watches itself: sensors in the background, and diagnoses that become warnings while they still help."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..sections import TrainingSection
from ..training.trainer import LMTrainer
from .diagnosis import diagnose
from .run import Run
from .sensors import Sensors

_KEPT = 20_000  # updates that a live diagnosis looks back over
# Updates between two looks: ten, later a fiftieth of those done, so that their cost stays small.
_FIRST, _SHARE = 10, 50


@contextlib.contextmanager
def watched(trainer: LMTrainer, training: TrainingSection) -> Iterator[None]:
    """Watch what `trainer` trains inside the block. The main process does; the numbers of the run do not change."""
    if not trainer.is_world_process_zero():
        yield
        return
    watch = Watch(trainer, training.sensor_seconds)
    trainer.add_callback(watch)
    try:
        yield
    finally:
        trainer.remove_callback(watch)
        watch.close()


class Watch(TrainerCallback):
    """Starts with the run, whose folder is open then. `close` ends it however the run ended."""

    def __init__(self, trainer: LMTrainer, sensor_seconds: float | None) -> None:
        self.trainer, self.sensor_seconds = trainer, sensor_seconds
        self.sensors: Sensors | None = None
        self.run: Run | None = None
        self.told: set[str] = set()
        self.next_look = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the sensors, and read what the run has told so far: each kind of fault is told once in a run."""
        folder = self.trainer.output_dir
        self.run = Run(folder, keep=_KEPT)
        self.told = {str(event.get("finding")) for event in self.run.events}
        self.next_look = state.global_step + _FIRST
        if self.sensor_seconds is not None:
            self.sensors = Sensors(folder, self.sensor_seconds, gpu_names(self.trainer.args.device))
            self.sensors.start()
        self._tell_faults(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Diagnose where it is due, and after the last update."""
        step = state.global_step
        if step < self.next_look and step < state.max_steps:
            return
        self.next_look = step + max(_FIRST, step // _SHARE)
        self._tell_faults(step)
        if self.run is None:
            return
        try:
            self.run.refresh()
            found = [one for one in diagnose(self.run) if one.name not in self.told]
        except Exception as error:  # a fault of the watcher must not end the run that it watches
            self._warn(step, f"Live diagnosis ends here: {error!r}. hf-tinylm diagnose still reads the folder.")
            self.run = None
            return
        for one in found:
            self.told.add(one.name)
            words = {"finding": one.name, "meaning": one.meaning, "next_step": one.next_step}
            self._warn(step, f"{one.title}: {one.evidence}", **words)

    def close(self) -> None:
        """End the thread of the sensors."""
        if self.sensors is not None:
            self.sensors.stop()
            self._tell_faults(self.trainer.state.global_step)
            self.sensors = None

    def _tell_faults(self, step: int) -> None:
        for words in self.sensors.notices() if self.sensors is not None else ():
            self._warn(step, words)

    def _warn(self, step: int, reason: str, **words: str) -> None:
        print(f"\nwarning: {reason}", file=sys.stderr, flush=True)
        self.trainer.record.events.add("warned", step, reason=reason, **words)


def gpu_names(device: torch.device) -> list[str]:
    """NVML's names of the GPUs that the processes of this host train on; none when they train on something else."""
    if device.type != "cuda":
        return []
    count = min(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return [f"GPU-{torch.cuda.get_device_properties(place).uuid}" for place in range(count)]
