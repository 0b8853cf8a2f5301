"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class ProgressBar(TrainerCallback):
    """One bar over updates with loss, rate and tokens/s; tqdm adds the time left. Evaluations print a line above it."""

    def __init__(self) -> None:
        self.bar: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar at the step that the run starts from."""
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="update", dynamic_ncols=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar by one update."""
        if self.bar is not None:
            self._show(lambda: self.bar.update(1))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the newest numbers."""
        if self.bar is None or not logs:
            return
        if "eval_loss" in logs:
            bits = f", {logs['eval_bits_per_byte']:.4f} bits per byte" if "eval_bits_per_byte" in logs else ""
            line = f"update {state.global_step:,}: validation loss {logs['eval_loss']:.4f}{bits}"
            self._show(lambda: self.bar.write(line))
        elif "loss" in logs:
            self.bar.set_postfix_str(
                f"loss={logs['loss']:.4f} lr={logs['learning_rate']:.2e} {logs['tokens_per_second']:,.0f} tok/s",
                refresh=False,
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        if self.bar is not None:
            self._show(self.bar.close)
            self.bar = None

    def _show(self, draw: Callable[[], Any]) -> None:
        """Draw; when nobody reads any more, as after Ctrl-C with `| tee log` or in a closed terminal, draw no more."""
        try:
            draw()
        except OSError:
            self.bar = None
