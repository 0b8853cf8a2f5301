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
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput

from ..contract import RUN_FILE, check_contract, new_contract, write_contract
from ..errors import CheckpointError, ConfigError, TrainingError
from ..files import refuse_folder_in_use
from ..modeling.loss import IGNORE_INDEX
from ..modeling.model import TinyLMForCausalLM
from ..modeling.stock import save_stock_model
from ..planning import UpdatePlan, plan_updates
from .arguments import LMTrainingArguments
from .callbacks import ProgressBar
from .checkpoint import (
    Snapshot,
    read_checkpoint,
    rotate_checkpoints,
    select_checkpoint,
    write_checkpoint,
)
from .metrics import EVENTS, METRICS, Events, JsonLines, peak_flops
from .optimizer import adamw, load_optimizer_tensors, optimizer_tensors
from .random_state import random_tensors, restore_random, undisturbed_random
from .schedule import CosineSchedule
from .update import Update, UpdateResult
from .validation import validate


class LMTrainer(Trainer):
    """Train a causal language model on windows.

    Args:
        model: the model, with float32 weights.
        args: the arguments; `train_tokens` and `global_batch_tokens` decide the updates.
        train_dataset: windows with `sequence_length`, `len()` (windows per epoch) and `batch(ks)` giving `input_ids`
            and `shift_labels` (n, T) for any window numbers ks (`data.windows.TokenWindows`).
        eval_dataset: the same; its first `eval_tokens` targets are the validation set, every time.
        processing_class: the tokenizer, saved with the model.
        token_bytes: (V,) bytes of each token, for bits per byte; without it that number is left out.
        run_facts: what else identifies the run, such as hashes of its data; kept in run.json and compared on resume.
        run_config: the resolved configuration that would start this run again; kept in run.json.

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
    ) -> None:
        if not isinstance(args, LMTrainingArguments):
            raise ConfigError(f"LMTrainer needs LMTrainingArguments, not {type(args).__name__}.")
        self.plan = plan_run(args, train_dataset)
        self.schedule = CosineSchedule(args.learning_rate, args.min_lr_ratio, int(args.warmup_steps), self.plan.updates)
        self.output_dir = Path(str(args.output_dir))
        self.token_bytes = None if token_bytes is None else torch.from_numpy(token_bytes)
        self.run_facts, self.run_config = run_facts or {}, run_config
        if args.process_index == 0 and not args.resume_from_checkpoint:
            refuse_folder_in_use(self.output_dir)
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
        main = self.is_world_process_zero()
        self.metrics_log = JsonLines(self.output_dir / METRICS, enabled=main)
        self.events = Events(self.output_dir / EVENTS, enabled=main)
        self.supervised_tokens = 0
        self.wall_seconds_before = 0.0
        self.last_save_time = self.start_time = time.monotonic()
        set_seed(args.seed, device_specific=True)  # after the constructor, which seeds for itself

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
            TrainingError: a loss or gradient that is not finite; nothing of that update was applied.
        """
        if trial is not None or ignore_keys_for_eval or kwargs:
            raise ConfigError("LMTrainer.train takes resume_from_checkpoint only.")
        self.start_time = self.last_save_time = time.monotonic()
        asked = resume_from_checkpoint or self.args.resume_from_checkpoint
        model = self._prepare()
        start = self._start_or_resume("auto" if asked is True else asked)
        self.is_in_train = True
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        updates = Update(self.accelerator, model, self.optimizer, self.args.max_grad_norm)
        losses = 0.0
        try:
            for number, batches in enumerate(self.get_train_dataloader(start), start):
                losses += self._one_update(number, batches, updates)
                if self.control.should_training_stop:
                    break
        finally:
            self.is_in_train = False
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        done = max(1, self.state.global_step - start)
        return TrainOutput(self.state.global_step, losses / done, {"train_loss": losses / done})

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with decayed matrices and undecayed gains, float32 asserted."""
        if self.optimizer is None:
            args = self.args
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = adamw(model or self.model, args.learning_rate, betas, args.adam_epsilon, args.weight_decay)
        return self.optimizer

    def get_train_dataloader(self, start: int = 0) -> Iterator[list[dict[str, torch.Tensor]]]:  # type: ignore[override]
        """For each update from `start` on, this process's micro-batches (input_ids, shift_labels), on the host."""
        for number in range(start, self.plan.updates):
            yield [self._micro_batch(number, row) for row in range(self.plan.gradient_accumulation_steps)]

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss in nats, and bits per byte, over the same fixed validation windows every time.

        Raises:
            TrainingError: there is nothing to evaluate, or the loss is not finite.
        """
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise TrainingError("There is no validation set to evaluate on. Pass eval_dataset.")
        with undisturbed_random():
            found = validate(
                self.accelerator,
                self.model,
                dataset,
                self.args.eval_tokens,
                self.args.per_device_eval_batch_size,
                self.token_bytes,
            )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a stock `llama` or `qwen3` folder with its tokenizer, atomically, on the main process."""
        folder = Path(output_dir or self.output_dir / "final")
        if self.is_world_process_zero():
            save_stock_model(self.model, folder, self.processing_class)
        self.accelerator.wait_for_everyone()

    # ---- one update ---------------------------------------------------------------------------------------------

    def _one_update(self, number: int, batches: list[dict[str, torch.Tensor]], updates: Update) -> float:
        """Run update `number` (zero-based), record it, and evaluate and save where that is due; its loss."""
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        began = time.monotonic()
        result = updates.run(batches, self.schedule(number))
        if not result.finite:
            raise self._not_finite(number, result)
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        seconds = time.monotonic() - began
        self.state.global_step = number + 1
        self.supervised_tokens += result.targets
        self.state.epoch = self.state.global_step * self.plan.windows_per_update / len(self.train_dataset)
        row = self._metrics_row(result, self.schedule(number), seconds)
        self.metrics_log.append(row)
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.control.should_log or self.state.global_step == self.plan.updates:
            self.control.should_log = False
            self.log({k: v for k, v in row.items() if k != "step" and v is not None})
        if self.control.should_evaluate:
            self.control.should_evaluate = False
            self._evaluate_and_record()
        if self._save_is_due():
            self.control.should_save = False
            self._save_checkpoint_now()
        return result.loss

    def _micro_batch(self, number: int, row: int) -> dict[str, torch.Tensor]:
        """Micro-batch `row` of update `number` on this process; targets beyond the token budget are masked."""
        plan, rows = self.plan, self.plan.per_device_train_batch_size
        first = self.accelerator.process_index * plan.windows_per_process + row * rows
        within = np.arange(first, first + rows)  # positions within the update, the same however many processes share it
        batch = self.train_dataset.batch(number * plan.windows_per_update + within)
        left = plan.tokens_of_update(number)
        if left < plan.global_batch_tokens:
            length = plan.sequence_length
            beyond = torch.from_numpy(within[:, None] * length + np.arange(length)[None, :] >= left)
            batch["shift_labels"] = batch["shift_labels"].masked_fill(beyond, IGNORE_INDEX)
        return batch

    def _metrics_row(self, result: UpdateResult, learning_rate: float, seconds: float) -> dict[str, Any]:
        flops = self.model.config.shape.flops_per_token_with_attention(self.plan.sequence_length)
        rate = result.targets / seconds
        peak = peak_flops()
        return {
            "step": self.state.global_step,
            "supervised_tokens": self.supervised_tokens,
            "loss": result.loss,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "clipped": result.clipped,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(rate, 1),
            "flops_per_second": round(flops * rate),
            "mfu": None if peak is None else flops * rate / (peak * self.accelerator.num_processes),
            "wall_seconds": round(self._wall_seconds(), 3),
        }

    def _evaluate_and_record(self) -> None:
        found = self.evaluate()
        row = {"step": self.state.global_step, "eval_loss": found["eval_loss"]}
        if "eval_bits_per_byte" in found:
            row["bits_per_byte"] = found["eval_bits_per_byte"]
        self.metrics_log.append({**row, "eval_tokens": int(found["eval_tokens"])})
        self.events.add("evaluated", self.state.global_step, eval_loss=found["eval_loss"])

    def _not_finite(self, number: int, result: UpdateResult) -> TrainingError:
        first = number * self.plan.windows_per_update
        last = first + self.plan.windows_per_update - 1
        self.events.add("warned", number, reason="not finite", windows=[first, last])
        return TrainingError(
            f"Update {number + 1:,} has loss {result.loss} and gradient norm {result.grad_norm}; "
            "nothing of it was applied. "
            f"Its windows are {first:,} to {last:,}. Look at them (hf-tinylm inspect), lower learning_rate, and resume "
            f"with resume_from_checkpoint: auto."
        )

    # ---- start, save, resume ------------------------------------------------------------------------------------

    def _prepare(self) -> nn.Module:
        """Wrap the model for autocast, compilation and DDP once; create the optimizer."""
        args = self.args
        if self.model_wrapped is self.model:
            if args.gradient_checkpointing:
                self.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs or {"use_reentrant": False})
            self.create_optimizer()
            if args.torch_compile:  # the method, not the module: parameter names stay as they are
                backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
                compiled = torch.compile(self.model.forward, backend=backend, mode=mode)
                self.model.forward = compiled  # type: ignore[method-assign]
            bucket = {} if args.ddp_bucket_cap_mb is None else {"bucket_cap_mb": args.ddp_bucket_cap_mb}
            self.accelerator.ddp_handler = DistributedDataParallelKwargs(
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                static_graph=bool(args.ddp_static_graph),
                **bucket,
            )
            self.model_wrapped = self.accelerator.prepare_model(self.model)
        self.model.train()
        self.callback_handler.model = self.model
        self.callback_handler.optimizer = self.optimizer
        return self.model_wrapped

    def _start_or_resume(self, asked: str | None) -> int:
        """Write or check the contract, restore a checkpoint if asked, and give the first update to run."""
        everyone: list[Any] = [*self.callback_handler.callbacks, self.control]
        stateful: list[Any] = [callback for callback in everyone if isinstance(callback, ExportableState)]
        self.state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=stateful,
        )
        self.state.max_steps = self.plan.updates
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self.state.compute_steps(self.args, self.plan.updates)
        contract = self._contract()
        folder, passed_over = select_checkpoint(self.output_dir, asked) if asked else (None, [])
        known = asked and (self.output_dir / RUN_FILE).is_file()
        changed = check_contract(self.output_dir, contract) if known or folder is not None else []
        if not known and self.is_world_process_zero():
            refuse_folder_in_use(self.output_dir)
            write_contract(self.output_dir, contract)
        for line in passed_over:
            self.events.add("warned", 0, reason=line)
        if folder is not None:
            return self._restore(folder, changed)
        self.metrics_log.drop_after(0)
        self.events.add("started", 0, updates=self.plan.updates, train_tokens=self.plan.train_tokens)
        return 0

    def _contract(self) -> dict[str, Any]:
        args, plan = self.args, self.plan
        identity = {
            "model": self.model.config.identity,
            "training": {
                name: getattr(args, name)
                for name in (
                    "learning_rate",
                    "min_lr_ratio",
                    "warmup_steps",
                    "weight_decay",
                    "adam_beta1",
                    "adam_beta2",
                    "adam_epsilon",
                    "max_grad_norm",
                    "bf16",
                    "seed",
                )
            }
            | {"train_tokens": plan.train_tokens, "global_batch_tokens": plan.global_batch_tokens},
            "data": {
                "sequence_length": plan.sequence_length,
                "window_order": getattr(self.train_dataset, "order", None),
                "windows_per_epoch": len(self.train_dataset),
                **self.run_facts,
            },
        }
        execution = {
            "processes": self.accelerator.num_processes,
            "device": self.args.device.type,
            "cpu_threads": torch.get_num_threads() if self.args.device.type == "cpu" else None,
            "per_device_train_batch_size": plan.per_device_train_batch_size,
            "torch_compile": args.torch_compile,
        }
        return new_contract(identity, execution, self.run_config, {})

    def _restore(self, folder: Path, changed: list[str]) -> int:
        snapshot = read_checkpoint(folder)
        missing, unexpected = self.model.load_state_dict(snapshot.weights, strict=False)
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        if unexpected or set(missing) - tied:
            raise CheckpointError(f"{folder} does not fit the model: missing {missing}, unexpected {unexpected}.")
        load_optimizer_tensors(self.optimizer, self.model, snapshot.optimizer)
        rank = self.accelerator.process_index
        if len(snapshot.random_states) == self.accelerator.num_processes:
            restore_random(snapshot.random_states[rank])
        state = snapshot.trainer_state
        self.state.global_step = int(state["step"])
        self.state.epoch = state["epoch"]
        self.supervised_tokens = int(state["supervised_tokens"])
        self.wall_seconds_before = float(state["wall_seconds"])
        dropped = self.metrics_log.drop_after(self.state.global_step)
        facts = {"checkpoint": folder.name, "dropped_rows": dropped, "changed": changed}
        self.events.add("resumed", self.state.global_step, **facts)
        return self.state.global_step

    def _save_is_due(self) -> bool:
        minutes = self.args.save_minutes
        timed = minutes is not None and time.monotonic() - self.last_save_time >= 60 * minutes
        if self.accelerator.num_processes > 1:
            flag = torch.tensor([float(timed)], device=self.args.device)
            timed = bool(self.accelerator.reduce(flag, reduction="sum").item())
        return self.control.should_save or timed or self.state.global_step == self.plan.updates

    def _save_checkpoint_now(self) -> None:
        began = time.monotonic()
        states = self._gathered_random_states()
        if self.is_world_process_zero():
            folder = write_checkpoint(self.output_dir, self._snapshot(states))
            rotate_checkpoints(self.output_dir, self.args.save_total_limit)
            self.events.add(
                "saved", self.state.global_step, checkpoint=folder.name, seconds=round(time.monotonic() - began, 3)
            )
        self.accelerator.wait_for_everyone()
        self.last_save_time = time.monotonic()
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _snapshot(self, random_states: list[dict[str, torch.Tensor]]) -> Snapshot:
        weights = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.model.state_dict().items()
            if not (name == "lm_head.weight" and self.model.config.tie_word_embeddings)
        }
        optimizer = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in optimizer_tensors(self.optimizer, self.model).items()
        }
        state = {
            "step": self.state.global_step,
            "epoch": self.state.epoch,
            "supervised_tokens": self.supervised_tokens,
            "next_window": self.state.global_step * self.plan.windows_per_update,
            "wall_seconds": self._wall_seconds(),
            "processes": self.accelerator.num_processes,
        }
        return Snapshot(self.state.global_step, self.model.config.to_dict(), weights, optimizer, random_states, state)

    def _gathered_random_states(self) -> list[dict[str, torch.Tensor]]:
        own = random_tensors()
        if self.accelerator.num_processes == 1:
            return [own]
        gathered: list[Any] = [None] * self.accelerator.num_processes
        torch.distributed.all_gather_object(gathered, own)
        return gathered

    def _wall_seconds(self) -> float:
        return self.wall_seconds_before + time.monotonic() - self.start_time


def plan_run(args: LMTrainingArguments, train_dataset: Any) -> UpdatePlan:
    """Updates, windows and micro-batches of a run on `train_dataset`."""
    length = int(train_dataset.sequence_length)
    budget = len(train_dataset) * length if args.train_tokens == "epoch" else int(args.train_tokens)
    return plan_updates(budget, args.global_batch_tokens, length, args.per_device_train_batch_size, args.world_size)
