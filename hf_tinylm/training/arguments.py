"""`LMTrainingArguments`: Hugging Face's `TrainingArguments` with a token budget, and a stand on every field of it.

A field is honoured by `LMTrainer` or refused when set. There is no third way: a setting that silently does nothing
makes a broken run look like a result. A test fails when a new transformers release adds a field with no stand here.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from transformers import TrainingArguments

from ..errors import ConfigError
from ..sections import DecayShape, LRSchedule, Optim, RunConfig, TrainingSection
from .device import Precision, choose_precision, device_facts
from .xla import uses_xla, xla_kind

HONOURED = frozenset(
    """
    output_dir per_device_train_batch_size per_device_eval_batch_size learning_rate warmup_steps weight_decay
    optim adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16 tf32 torch_compile torch_compile_backend
    torch_compile_mode
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs
    use_cache logging_strategy logging_steps logging_first_step log_on_each_node log_level log_level_replica
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
    eval_steps eval_delay save_strategy save_steps save_total_limit metric_for_best_model
    greater_is_better full_determinism seed use_cpu
    ddp_bucket_cap_mb ddp_static_graph ddp_backend ddp_timeout do_train do_eval do_predict resume_from_checkpoint
    local_rank
    """.split()
)

REFUSED: dict[str, str] = {
    "num_train_epochs": "give train_tokens (or train_tokens: epoch, and epochs)",
    "max_steps": "give train_tokens; the updates follow from it and global_batch_tokens",
    "gradient_accumulation_steps": "it follows from global_batch_tokens and per_device_train_batch_size",
    "average_tokens_across_devices": "the loss is always divided by the targets of all processes",
    "lr_scheduler_type": "give lr_schedule",
    "lr_scheduler_kwargs": "give lr_schedule, min_lr_ratio, decay_fraction and decay_shape",
    "optim_args": "the optimizer's settings are arguments of their own",
    "optim_target_modules": "the optimizer holds every weight",
    "label_smoothing_factor": "the loss is plain cross-entropy",
    "fp16_full_eval": "evaluation uses the precision of training",
    "bf16_full_eval": "evaluation uses the precision of training",
    "use_liger_kernel": "the model is not patched; loss_kernel takes the kernel of the loss",
    "liger_kernel_config": "the model is not patched",
    "neftune_noise_alpha": "embeddings are not disturbed",
    "torch_empty_cache_steps": "the cache is left to torch",
    "auto_find_batch_size": "a batch that changes by itself cannot be accounted for",
    "logging_nan_inf_filter": "a loss that is not finite stops the run and is never hidden",
    "include_num_input_tokens_seen": "supervised_tokens is always reported",
    "prediction_loss_only": "evaluation never keeps logits",
    "eval_do_concat_batches": "evaluation never keeps logits",
    "eval_use_gather_object": "evaluation never keeps logits",
    "eval_accumulation_steps": "evaluation never keeps logits",
    "include_for_metrics": "evaluation never keeps logits",
    "batch_eval_metrics": "evaluation never keeps logits",
    "save_only_model": "a checkpoint without its optimizer cannot be resumed exactly",
    "save_on_each_node": "the main process writes the checkpoint",
    "enable_jit_checkpoint": "saves are made at update borders",
    "eval_on_start": "the first evaluation is at eval_steps",
    "debug": "a loss or gradient that is not finite is always looked for",
    "push_to_hub": "set it in the export section of a configuration, or run hf-tinylm push",
    "hub_token": "no setting holds a token; log in once: hf auth login",
    "hub_private_repo": "set it in the export section of a configuration, or run hf-tinylm push",
    "hub_model_id": "set it in the export section of a configuration, or run hf-tinylm push",
    "hub_revision": "a run is uploaded once, after its last update, to the main branch",
    "hub_strategy": "a run is uploaded once, after its last update, to the main branch",
    "hub_always_push": "a run is uploaded once, after its last update, to the main branch",
    "load_best_model_at_end": "the run ends with its last weights",
    "ignore_data_skip": "the window order is a function of seed and position, so nothing is skipped or replayed",
    "restore_callback_states_from_checkpoint": "callback states are always restored",
    "data_seed": "one seed decides weights and window order",
    "accelerator_config": "batches are cut by this trainer",
    "parallelism_config": "this trainer runs one process or DistributedDataParallel",
    "dataloader_drop_last": "every window counts",
    "dataloader_num_workers": "windows are read from memory-mapped shards",
    "dataloader_pin_memory": "windows are read from memory-mapped shards",
    "dataloader_persistent_workers": "windows are read from memory-mapped shards",
    "dataloader_prefetch_factor": "windows are read from memory-mapped shards",
    "dataloader_multiprocessing_context": "windows are read from memory-mapped shards",
    "dataloader_in_order": "windows are read from memory-mapped shards",
    "remove_unused_columns": "windows have no other columns",
    "label_names": "targets are shift_labels",
    "train_sampling_strategy": "the window order is data.window_order",
    "length_column_name": "every window has the same length",
    "ddp_find_unused_parameters": "every parameter receives a gradient",
    "ddp_broadcast_buffers": "the model has no buffer that changes",
    "fsdp": "this trainer runs one process or DistributedDataParallel",
    "fsdp_config": "this trainer runs one process or DistributedDataParallel",
    "deepspeed": "this trainer runs one process or DistributedDataParallel",
    "skip_memory_metrics": "memory is not traced",
}


_METRICS = ("loss", "bits_per_byte")


@dataclass
class LMTrainingArguments(TrainingArguments):
    """Arguments of `LMTrainer`. `global_batch_tokens` and `train_tokens` count supervised targets over all processes.

    Raises:
        ConfigError: a `TrainingArguments` field that `LMTrainer` does not honour was set.
    """

    global_batch_tokens: int = 524_288
    batch_growth: list[list[int]] = dataclasses.field(default_factory=list)
    train_tokens: int | Literal["epoch"] = "epoch"
    epochs: float = 1.0
    optim: Optim = "adamw"
    embedding_lr_ratio: float = 1.0
    head_lr_ratio: float = 1.0
    gain_lr_ratio: float = 1.0
    muon_momentum: float = 0.95
    muon_momentum_warmup_steps: int = 0
    muon_ns_steps: int = 5
    lr_schedule: LRSchedule = "cosine"
    decay_fraction: float = 0.2
    decay_shape: DecayShape = "linear"
    min_lr_ratio: float = 0.1
    save_minutes: float | None = None
    save_best: bool = False
    milestone_steps: int | None = None
    save_in_background: bool = True
    eval_tokens: int = 1_048_576
    init_from: str | None = None
    init_optimizer: bool = False
    branch_from: str | None = None
    loss_kernel: Literal["auto", "torch"] = "auto"
    source_loss: bool = False
    noise_scale: bool = True
    peak_flops: float | None = None
    stage_dir: str | None = None
    nonfinite: Literal["stop", "skip"] = "stop"
    nonfinite_limit: int = 10
    stop_after_updates: int | None = None
    max_hours: float | None = None
    max_cost: float | None = None
    price_per_hour: float | None = None
    note: str | None = None
    expect: str | None = None
    mirror_dir: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(TrainingArguments):
            if field.name in REFUSED and getattr(self, field.name) != _default(field):
                raise ConfigError(
                    f"{field.name}={getattr(self, field.name)!r} is not supported by LMTrainer: "
                    f"{REFUSED[field.name]}. Leave it out."
                )
        if self.warmup_steps != int(self.warmup_steps):
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} must be a whole number of updates, not a share of the run."
            )
        if self.optim not in get_args(Optim):
            raise ConfigError(
                f"optim={self.optim!r} is not supported by LMTrainer: give {' or '.join(get_args(Optim))}."
            )
        if self.max_cost is not None and self.price_per_hour is None:
            raise ConfigError(f"max_cost={self.max_cost:g} needs a price. Give price_per_hour.")
        for name in ("eval_strategy", "save_strategy", "logging_strategy"):
            value = str(getattr(getattr(self, name), "value", getattr(self, name)))
            if value not in ("no", "steps"):
                raise ConfigError(f"{name}={value!r} is not supported by LMTrainer: give steps, or no.")
        if self.metric_for_best_model not in (None, *_METRICS, *(f"eval_{name}" for name in _METRICS)):
            raise ConfigError(
                f"metric_for_best_model={self.metric_for_best_model!r} is not measured; give {' or '.join(_METRICS)}."
            )
        if uses_xla():
            self._check_xla()
        # LMTrainer compiles by itself; Accelerate would do it again, and rename the weights.
        asked = (self.torch_compile, self.torch_compile_backend, self.torch_compile_mode)
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = False, None, None
        if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
            os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"
        # These arguments decide, not a launcher or another run of this process.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16" if self.fp16 else "bf16" if self.bf16 else "no"
        if not self.use_cpu and not accelerator_present():
            self.use_cpu = True
        stock: Any = TrainingArguments.__dataclass_fields__["optim"].default  # which knows other names
        optim, self.optim = self.optim, stock
        super().__post_init__()
        self.optim = optim
        if uses_xla():  # Accelerate is told of no other precision there: see `wrapping.run_precision`
            self.mixed_precision = os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        asked_for: Any = asked[0] or any(asked)  # "auto" is decided by LMTrainer, which knows the length of the run
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = asked_for, asked[1], asked[2]

    def _check_xla(self) -> None:
        """Refuse what cannot be done, or was never tried, on a device of torch_xla."""
        if self.use_cpu:
            raise ConfigError(
                "use_cpu is set, but torch_xla is installed and Accelerate takes its device. For the CPU set the "
                "environment variable USE_TORCH_XLA=0; otherwise leave use_cpu out."
            )
        for name, asked, why in (
            ("fp16", self.fp16, "give precision: bf16"),
            ("torch_compile", self.torch_compile is True, "XLA compiles by itself; leave it out"),
            ("optim", self.optim == "muon", "it was never run there; give optim: adamw"),
        ):
            if asked:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not supported on XLA devices: {why}.")
        # Accelerate 1.15 numbers the processes of a host on TPUs only; elsewhere none would be the first.
        if xla_kind() != "TPU":
            os.environ.setdefault("LOCAL_RANK", "0")


def accelerator_present() -> bool:
    """Whether a GPU, TPU or other accelerator would be used."""
    return uses_xla() or torch.accelerator.is_available()


def precision_of(training: TrainingSection, use_cpu: bool) -> tuple[Precision, str]:
    """The precision of a run's matrix products on this process's device, and why."""
    if training.precision != "auto":
        return training.precision, "as asked"
    if training.fp16 or training.bf16 != "auto":
        return "fp16" if training.fp16 else "bf16" if training.bf16 else "fp32", "as asked"
    return choose_precision(device_facts(use_cpu))


def cpu_threads(asked: int | None) -> int:
    """Threads of one CPU process: as asked, else as OMP_NUM_THREADS says, else this host's cores over its processes.

    Launchers set OMP_NUM_THREADS=1 by themselves, which would leave all cores but one idle, so a 1 there says nothing.
    """
    if asked is not None:
        return asked
    from_environment = os.environ.get("OMP_NUM_THREADS", "")
    if from_environment.isdecimal() and int(from_environment) > 1:
        return int(from_environment)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def training_arguments(config: RunConfig) -> LMTrainingArguments:
    """Arguments in which every value is resolved: nothing is left for the Trainer to guess."""
    training = config.training
    if training.output_dir is None:
        raise ConfigError("output_dir is missing. Give a new folder for the run: --output_dir runs/NAME.")
    _check_trackers(training.report_to)
    use_cpu = training.use_cpu or not accelerator_present()
    if use_cpu:
        torch.set_num_threads(cpu_threads(training.cpu_threads))
    precision, why = precision_of(training, use_cpu)
    if precision == "fp16" and use_cpu:
        raise ConfigError("fp16 needs a GPU; this run is on a CPU. Leave it out, or use bf16.")
    if os.environ.get("RANK", "0") == "0":
        print(f"precision {precision}: {why}", file=sys.stderr, flush=True)
    if config.model.attn_implementation == "flex_attention" and (use_cpu or uses_xla()):
        where = "an XLA device" if uses_xla() else "a CPU"
        raise ConfigError(f"attn_implementation=flex_attention trains on a GPU only; this run is on {where}. Use sdpa.")
    values: dict[str, Any] = {
        "output_dir": training.output_dir,
        "train_tokens": training.train_tokens,
        "global_batch_tokens": training.global_batch_tokens,
        "batch_growth": training.batch_growth,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "per_device_eval_batch_size": training.per_device_eval_batch_size or training.per_device_train_batch_size,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "torch_compile": training.torch_compile,
        "use_cpu": use_cpu,
        "logging_steps": training.logging_steps,
        "eval_strategy": "steps" if training.eval_steps else "no",
        "eval_steps": training.eval_steps,
        "eval_tokens": config.evaluation.eval_tokens,
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 500,
        **{name: getattr(training, name) for name in _SAME_NAME},
        "report_to": training.report_to or "none",
        "run_name": training.run_name,
        "resume_from_checkpoint": training.resume_from_checkpoint,
        "seed": training.seed,
    }
    if training.gradient_checkpointing:
        names = {field.name for field in dataclasses.fields(TrainingArguments)}
        values["activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"] = True
    return LMTrainingArguments(**values)


def _check_trackers(names: list[str]) -> None:
    """Refuse a tracker that is unknown or not installed before anything is built."""
    if not names:
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    there = {"all", "none", *get_available_reporting_integrations()}
    for name in names:
        if name not in there and name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(f"report_to={name} is unknown. Give one of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}.")
        if name not in there:
            raise ConfigError(
                f"report_to={name} needs its package, which is not installed here or switched off in the environment. "
                f"Run: pip install {name}"
            )


_SAME_NAME = (
    *("save_minutes", "save_total_limit", "save_best", "milestone_steps", "save_in_background", "init_from"),
    *("init_optimizer", "branch_from", "nonfinite", "nonfinite_limit", "stop_after_updates", "max_hours", "max_cost"),
    *("optim", "learning_rate", "embedding_lr_ratio", "head_lr_ratio", "gain_lr_ratio", "muon_momentum"),
    *("muon_momentum_warmup_steps", "muon_ns_steps", "lr_schedule", "decay_fraction", "decay_shape", "min_lr_ratio"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("price_per_hour", "note", "expect", "epochs", "source_loss", "stage_dir", "mirror_dir"),
    *("noise_scale", "peak_flops", "loss_kernel"),
)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None
