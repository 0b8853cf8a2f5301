"""`LMTrainer`: a `transformers.Trainer` whose update loop accounts for every token and decides once per update.

It overrides public methods only (`train`, `evaluate`, `create_optimizer`, `get_train_dataloader`, `save_model`), so
arguments, callbacks, reporting and hub methods are Hugging Face's own, unmodified.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput

from ..errors import ConfigError, RunStopped, TrainingError
from ..modeling.model import TinyLMForCausalLM
from ..modeling.native import use_native_kernels
from ..modeling.stock import save_stock_model
from ..planning.compilation import rows_of_pass
from ..planning.optimizer import RunFlops
from ..planning.updates import plan_of_windows
from .agreement import agree_on_start, all_are_here, loss_told
from .arguments import LMTrainingArguments
from .batches import micro_batches
from .callbacks import ProgressBar
from .clocks import budget_reached, synchronise
from .compiling import compiles
from .interrupt import INTERRUPT
from .loss_kernel import choose_loss_kernel
from .metrics import peak_flops
from .noise_scale import NoiseMeter
from .nonfinite import pass_over
from .optimizer import optimizer_of, set_momentum
from .prefetch import Prefetched
from .processes import gathered, group_left_at_exit
from .random_state import restore_random, undisturbed_random
from .record import RunRecord
from .schedule import momentum_at, schedule_of
from .source_loss import by_source, training_sources
from .update import Update, UpdateResult
from .validation import evaluation_row, is_best, validate, validation_metrics
from .wrapping import wrapped_for_training

# A float16 gradient that still overflows after so many halvings of the scale is not an overflow of the scale.
OVERFLOW_LIMIT = 40


class LMTrainer(Trainer):
    """Train a causal language model on windows.

    Args:
        model: the model, with float32 weights.
        args: the arguments; `train_tokens` and `global_batch_tokens` decide the updates.
        train_dataset: windows with `sequence_length`, `len()` (windows per epoch) and `batch(ks)` giving `input_ids`
            and `shift_labels` (n, T) for any window numbers ks (`data.windows.TokenWindows`).
        eval_dataset: the same; its first `eval_tokens` targets are the validation set, every time.
        eval_sets: others by name, each validated in the same way beside it.
        processing_class: the tokenizer, saved with the model.
        token_bytes: (V,) bytes of each token, for bits per byte; without it that number is left out.
        run_facts: what else identifies the run, such as hashes of its data; kept in run.json and compared on resume.
        run_config: the resolved configuration that would start this run again; kept in run.json.
        export_bytes: what will be written beside the checkpoints after the run, for the check of the disk.
        began: when this invocation began, in seconds since 1970 (`clocks.process_start()` counts imports); now if None.

    Raises:
        ConfigError: a batch that does not divide, a run too short for its warmup, an output folder in use.
    """

    args: LMTrainingArguments
    model: TinyLMForCausalLM
    optimizer: torch.optim.Optimizer
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: TinyLMForCausalLM,
        args: LMTrainingArguments,
        train_dataset: Any,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        token_bytes: np.ndarray | None = None,
        run_facts: dict[str, Any] | None = None,
        run_config: dict[str, Any] | None = None,
        export_bytes: int = 0,
        began: float | None = None,
        eval_sets: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(args, LMTrainingArguments):
            raise ConfigError(f"LMTrainer needs LMTrainingArguments, not {type(args).__name__}.")
        self.plan = plan_of_windows(args, train_dataset, args.world_size)
        self.schedule = schedule_of(args, self.plan.updates)
        length, shape = self.plan.sequence_length, model.config.shape
        self.flops = RunFlops.of(shape, length, args.optim, args.muon_ns_steps)
        self.output_dir = Path(str(args.output_dir))
        flops = self.flops(self.plan.updates, self.plan.train_tokens)
        args.torch_compile, self.not_compiled = compiles(args.torch_compile, flops, args.device.type)
        precision = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        self.loss_kernel = choose_loss_kernel(args.loss_kernel, args.device, model.config.num_tokens, precision)
        self.sources = training_sources(args.source_loss, train_dataset)
        self.token_bytes = None if token_bytes is None else torch.from_numpy(token_bytes)
        self.run_facts, self.eval_sets = run_facts or {}, eval_sets or {}
        self.run_config, self.export_bytes = run_config, export_bytes
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
        )
        for stock_progress in (ProgressCallback, PrinterCallback):
            self.remove_callback(stock_progress)
        if not args.disable_tqdm:
            self.add_callback(ProgressBar())
        self.expected_tokens_per_second: float | None = None  # as preflight measured it
        self.supervised_tokens = 0
        self.skipped_batches = 0  # updates' windows passed over because their loss was not finite
        self.skipped_windows = 0  # and how many windows those are
        self.evaluation_due = False  # the present update is still to be evaluated
        self.not_native: str | None = None  # why kernels that the processor could use are not used
        self.ended = False  # a callback ended the run at the checkpoint that is resumed
        self.random_state: dict[str, torch.Tensor] | None = None  # of the checkpoint that is resumed
        self.record = RunRecord(self, time.time() if began is None else began)
        agree_on_start(self)

    # ---- Trainer's public methods -------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """Run all updates of the plan, or those that a resumed run has left.

        Args:
            resume_from_checkpoint: a checkpoint folder, or `auto` (also `True`): the newest whole one, else a new run.
                Defaults to `args.resume_from_checkpoint`.

        Raises:
            ContractError: a resume whose settings are not those of the recorded run.
            DisagreementError: another process would go on from another checkpoint or start from other weights.
            TrainingError: a loss or gradient that is not finite (nothing of it applied), a failed save, a lost process.
            RunStopped: a signal or a budget ended the run after a clean save.
        """
        if trial is not None or ignore_keys_for_eval or kwargs:
            raise ConfigError("LMTrainer.train takes resume_from_checkpoint only.")
        asked = resume_from_checkpoint or self.args.resume_from_checkpoint
        with INTERRUPT.deferred(), loss_told(), group_left_at_exit(self):
            model = self._prepare()
            self.batches = Prefetched(self._batches_of)
            try:
                resumed = self.record.open("auto" if asked is True else asked)
                return self._run(model, resumed)
            finally:
                self.is_in_train = False
                self.batches.close()
                self.record.close()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that `optim` names, with decayed matrices and undecayed gains, float32 asserted."""
        if self.optimizer is None:
            self.optimizer = optimizer_of(model or self.model, self.args)
        return self.optimizer

    def get_train_dataloader(self) -> Iterator[list[dict[str, torch.Tensor]]]:  # type: ignore[override]
        """This process's micro-batches (`input_ids`, `shift_labels`), on the host, of each update that is left."""
        updates = range(self.state.global_step, self.plan.updates)
        return (self._batches_of(number, self.skipped_windows) for number in updates)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss in nats, of each source too, and bits per byte, over the same fixed validation windows every time.

        Returns:
            The numbers; empty when a signal ended the evaluation, on every process.

        Raises:
            TrainingError: there is nothing to evaluate, or the loss is not finite.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise TrainingError("There is no validation set to evaluate on. Pass eval_dataset.")
        args, sets = self.args, {"": dataset, **(self.eval_sets if eval_dataset is None else {})}
        with undisturbed_random(), self.record.clocks.measure("evaluation_seconds"):
            metrics = validation_metrics(sets, metric_key_prefix, lambda windows: validate(
                self.accelerator, self.model, windows, args.eval_tokens, args.per_device_eval_batch_size,
                self.token_bytes, lambda: self.is_in_train and INTERRUPT.requested,
            ))  # fmt: skip
        if not metrics:
            return {}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a stock folder with its tokenizer, atomically, on the main process."""
        folder = Path(output_dir or self.output_dir / "final")
        if self.is_world_process_zero():
            save_stock_model(self.model, folder, self.processing_class)
        all_are_here()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def _run(self, model: nn.Module, resumed: bool) -> TrainOutput:
        self.is_in_train = True
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        self.control.should_training_stop |= self.ended
        start, clocks = self.state.global_step, self.record.clocks
        norm, sources = self.args.max_grad_norm, len(self.sources)
        processes, device = self.accelerator.num_processes, self.args.device.type
        measured = self.args.noise_scale and device != "xla"  # it reads values in the middle of an update
        self.noise = NoiseMeter(self.optimizer, processes, self.scaler, measured)
        compiled_for_cpu = bool(self.args.torch_compile) and device == "cpu"
        rows = rows_of_pass(self.plan.per_device_train_batch_size, self.plan.sequence_length, compiled_for_cpu)
        see = self.noise.see_first
        updates = Update(self.accelerator, model, self.optimizer, norm, self.scaler, sources, see, rows)
        if (processes > 1 and device != "xla") or self.args.torch_compile:
            updates.warm_up(self._batches_of(start, self.skipped_windows)[0])
        set_seed(self.args.seed, device_specific=True)
        if resumed and self.random_state is not None:
            restore_random(self.random_state)
        self.noise.continue_from(self.record.metrics.rows())
        clocks.startup_seconds += clocks.invocation_seconds
        self.last_save_time = time.monotonic()
        if self.evaluation_due:
            eval_loss = self._evaluate_and_record()
            if self.evaluation_due:  # a signal ended it again
                self._end_if_asked(0)
            self._save_update(eval_loss)
        losses = 0.0
        while self.state.global_step < self.plan.updates and not self.control.should_training_stop:
            with clocks.measure("data_seconds"):
                batches = self.batches(self.state.global_step, self.skipped_windows)
            if self.state.global_step + 1 < self.plan.updates:
                self.batches.ahead(self.state.global_step + 1, self.skipped_windows)
            losses += self._one_update(batches, updates, time.monotonic(), self.state.global_step - start)
        self.record.close()
        self._end_if_asked(self.state.global_step - start)
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        done = max(1, self.state.global_step - start)
        return TrainOutput(self.state.global_step, losses / done, {"train_loss": losses / done})

    def _one_update(
        self, batches: list[dict[str, torch.Tensor]], updates: Update, began: float, done_before: int
    ) -> float:
        """Run the next update, record it, and evaluate, save and stop where that is due; its loss."""
        number = self.state.global_step
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        self.noise.before_update(number)
        result = self._attempt(batches, updates, done_before)
        if not result.applied:
            self.skipped_windows += pass_over(self, number, result, batches)
            self.skipped_batches += 1
            return 0.0
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        synchronise(self.args.device)
        self._count(result, time.monotonic() - began)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        last = self.state.global_step == self.plan.updates
        if self.control.should_log or last:
            self.control.should_log = False
            self.log({k: v for k, v in self._row.items() if k != "step" and v is not None})
        eval_loss = None
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            eval_loss = self._evaluate_and_record()
        stop, timed, failed = (bool(value) for value in result.requests[:3])
        stop = stop or self.evaluation_due  # an evaluation ends early only because of a signal
        if self.control.should_save or timed or last or stop or self.control.should_training_stop:
            self._save_update(eval_loss)
        if failed:
            self.record.saver.wait()  # raises on the main process, which knows why
            raise TrainingError("The main process could not write a checkpoint; its own error says why.")
        if stop:
            self._end_if_asked(done_before + 1)
        return result.loss

    def _save_update(self, eval_loss: float | None) -> None:
        """Save the state after the present update, and tell the callbacks."""
        self.control.should_save = False
        self.record.save(self.evaluation_due, eval_loss)
        self.last_save_time = time.monotonic()
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _attempt(self, batches: list[dict[str, torch.Tensor]], updates: Update, done_before: int) -> UpdateResult:
        """One update; with float16, tried again at a lower scale while its gradients overflow."""
        number, known = self.state.global_step, None
        rate = self.schedule(number)
        momentum = momentum_at(number, self.args.muon_momentum, self.args.muon_momentum_warmup_steps)
        set_momentum(self.optimizer, momentum)
        if getattr(self.train_dataset, "every_position_is_a_target", False):
            process = self.accelerator.process_index
            known = (self.plan.tokens_of_process(number, process), self.plan.tokens_of_update(number))
        for _ in range(OVERFLOW_LIMIT):
            result = updates.run(batches, rate, lambda: (*self._requests(done_before + 1), *self.noise.own()), known)
            if not result.overflow:
                break
            self.record.events.add("warned", self.state.global_step, reason="float16 overflow, scale lowered")
        return result

    def _requests(self, done: int) -> tuple[float, float, float]:
        """What this process asks of all: stop after this update, save for the time since the last, a failed write."""
        minutes = self.args.save_minutes
        timed = minutes is not None and time.monotonic() - self.last_save_time >= 60 * minutes
        stop = INTERRUPT.requested or self._budget_spent(done, self.state.global_step + 1) is not None
        return float(stop), float(timed), float(self.record.saver.failed)

    def _budget_spent(self, done: int, step: int) -> str | None:
        """The budget that is spent after `done` updates of this invocation, unless `step` ends the run anyway."""
        if step >= self.plan.updates or self.control.should_training_stop:
            return None
        return budget_reached(self.record.clocks, done, self.args)

    def _end_if_asked(self, done: int) -> None:
        """End the invocation, after a clean save, when a signal or a budget asks any process for it.

        Raises:
            RunStopped: why, where, and how to go on; with the same exit code on every process.
        """
        step = self.state.global_step
        own = (INTERRUPT.exit_code, INTERRUPT.name) if INTERRUPT.requested else None
        budget = self._budget_spent(done, step)
        asked = gathered(self.accelerator, own or (budget and (3, budget)))
        ending = max((one for one in asked if one), default=None)  # a signal before a budget
        if ending is None:
            return
        code, reason = ending
        self.record.close()
        self.record.events.add(
            "interrupted", step, reason=reason, wall_seconds=round(self.record.clocks.wall_seconds, 6)
        )
        # A launcher ends all workers when one has gone: none goes before the main process has written the checkpoint.
        self.accelerator.wait_for_everyone()
        raise RunStopped(
            f"{reason} ended the run after update {step:,} of {self.plan.updates:,}; checkpoint-{step:08d} is "
            f"saved in {self.output_dir}. Go on with --resume_from_checkpoint auto.",
            code,
        )

    def _count(self, result: UpdateResult, seconds: float) -> None:
        """Advance the clocks by an applied update and write its row."""
        clocks, plan = self.record.clocks, self.plan
        rate = self.schedule(self.state.global_step)
        self.state.global_step += 1
        self.supervised_tokens += result.targets
        self.state.epoch = plan.windows_before(self.state.global_step) / len(self.train_dataset)
        computed = plan.positions_before(self.state.global_step)
        positions = computed - plan.positions_before(self.state.global_step - 1)
        flops_per_second = self.flops.per_token * positions / seconds
        clocks.training_seconds += seconds
        clocks.flops += self.flops(1, positions)
        peak = peak_flops(self.args.peak_flops, self.args.device, self.args.bf16)
        self._row = {
            "step": self.state.global_step,
            "supervised_tokens": self.supervised_tokens,
            "positions": computed,
            "loss": result.loss,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "clipped": result.clipped,
            "seconds": round(seconds, 6),
            "data_seconds": round(clocks.lap("data_seconds"), 6),
            "tokens_per_second": round(result.targets / seconds, 1),
            "flops_per_second": round(flops_per_second),
            "mfu": None if peak is None else flops_per_second / (peak * self.accelerator.num_processes),
            "wall_seconds": round(clocks.wall_seconds, 3),
        }
        self._row |= self.noise.row(self.state.global_step, result.requests[3:], result.targets, result.grad_norm)
        parts = {"loss_by_source": by_source(self.sources, result.source_sums)} if self.sources else {}
        self.record.metrics.append(self._row | parts)

    def _batches_of(self, number: int, skipped: int) -> list[dict[str, torch.Tensor]]:
        """This process's micro-batches of the zero-based update, after `skipped` windows that were passed over."""
        process, sources = self.accelerator.process_index, bool(self.sources)
        batches = micro_batches(self.train_dataset, self.plan, process, number, skipped, sources)
        if self.args.device.type == "cuda":  # only from there is a copy to the device not waited for
            batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches]
        return batches

    def _evaluate_and_record(self) -> float | None:
        """Evaluate the present update and write its row; None, with `evaluation_due` set, when a signal ended it."""
        found = self.evaluate()
        self.evaluation_due = not found
        if not found:
            return None
        self.record.metrics.append({"step": self.state.global_step, **evaluation_row(found, self.eval_sets)})
        wall = round(self.record.clocks.wall_seconds, 6)
        self.record.events.add("evaluated", self.state.global_step, eval_loss=found["eval_loss"], wall_seconds=wall)
        if is_best(found, self.args, self.state) and self.args.save_best:
            self.control.should_save = True
        return found["eval_loss"]

    # ---- start --------------------------------------------------------------------------------------------------

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of float16, if that is the precision."""
        return self.accelerator.scaler if self.args.fp16 else None

    def stateful_callbacks(self) -> dict[str, Any]:
        """Callbacks whose state belongs into a checkpoint, by class name."""
        found: list[Any] = self.callback_handler.callbacks
        return {type(callback).__name__: callback for callback in found if isinstance(callback, ExportableState)}

    def _prepare(self) -> nn.Module:
        """Wrap the model for autocast, compilation and DDP once; create the optimizer and a fresh state."""
        args = self.args
        if self.model_wrapped is self.model:
            self.create_optimizer()
            self.model_wrapped = wrapped_for_training(self.model, args, self.accelerator, self.loss_kernel.of_chunk)
            if args.torch_compile and args.bf16 and args.device.type == "cpu":
                self.not_native = use_native_kernels(self.model, self.plan.sequence_length, args.loss_kernel)
        self.model.train()
        self.callback_handler.model = self.model
        self.callback_handler.optimizer = self.optimizer
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=list(self.stateful_callbacks().values()),
        )
        self.state.max_steps = self.plan.updates
        self.state.train_batch_size = args.per_device_train_batch_size
        self.state.compute_steps(args, self.plan.updates)
        return self.model_wrapped
