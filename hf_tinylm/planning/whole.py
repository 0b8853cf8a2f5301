"""`hf-tinylm plan`: everything that follows from a configuration before a second is spent on it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files import read_record
from ..gguf_plan import GGUF_TYPES, file_bytes
from ..sections import RunConfig, TrainingSection
from .compilation import compiling_pays, rows_of_pass
from .disk import checkpoints_kept, id_bytes
from .memory import MemorySettings, peak_memory
from .optimizer import checkpoint_bytes, optimizer_flops
from .pack_facts import PackFacts, pack_facts
from .shape import ModelShape, export_bytes, uniform_loss
from .speed import Assumptions, named_device, speed
from .updates import (
    UpdatePlan,
    plan_of_windows,
    plan_updates,
    positions_of_budget,
    recorded_plan,
    stable_updates,
)

TOKENS_PER_PARAMETER = 20  # a fit of one regime, arXiv 2203.15556: a line to compare with, no law


def make_plan(config: RunConfig, asked: Assumptions, windows: Any = None) -> dict[str, Any]:
    """The whole plan as plain JSON values; what cannot be known is None, what a run would refuse is in `problems`.

    Args:
        windows: of a chat run's conversations (`updates.plan_of_windows`), which say how many positions its budget
            takes; without them only a budget in tokens is planned, as if every position had a target.

    Raises:
        ConfigError: inputs about speed, time and money disagree, or an unknown device or run folder.
    """
    problems: list[str] = []
    notices: list[str] = []
    pack = _pack(config, problems) if windows is None else _of_conversations(windows)
    vocab_size = pack.vocab_size or config.tokenizer.vocab_size
    if vocab_size != config.tokenizer.vocab_size:
        notices.append(
            f"the pack has a vocabulary of {vocab_size:,} tokens, the configuration says "
            f"{config.tokenizer.vocab_size:,}: the model takes the pack's"
        )
    shape = _shape(config, vocab_size, notices)
    updates = _updates(config, asked, pack, problems, windows)
    times = speed(shape, config, updates, asked, notices)
    rate = times["flops_per_second_without_attention"]
    return {
        **_size(shape, config, asked.loss),
        **_budget(shape, config, updates, pack),
        **_disk(shape, config, updates, pack),
        **_memory(shape, config, updates, asked),
        **times,
        "scale": [_scaled(parameters, config, rate) for parameters in asked.scale],
        "problems": problems,
        "notices": notices,
    }


def _shape(config: RunConfig, vocab_size: int, notices: list[str]) -> ModelShape:
    """That of the configuration; a chat stage has the shape of the model that it starts from."""
    base = config.training.init_from
    if not config.data.conversations:
        return ModelShape.from_config(config.model, vocab_size)
    described = Path(base).expanduser() / "config.json" if base else None
    if described is not None and described.is_file():
        return ModelShape.from_model_config(read_record(described))
    notices.append(
        f"a chat stage has the shape of the model it starts from, and init_from={base} is no folder with a "
        "config.json: sizes, FLOPs and memory are those of the model section"
    )
    return ModelShape.from_config(config.model, vocab_size)


def _pack(config: RunConfig, problems: list[str]) -> PackFacts:
    try:
        return pack_facts(config.data)
    except ConfigError as error:
        problems.append(str(error))
        return PackFacts()


def _of_conversations(windows: Any) -> PackFacts:
    return PackFacts(targets=windows.targets_of(len(windows) * windows.sequence_length), origin="conversations")


def _updates(
    config: RunConfig, asked: Assumptions, pack: PackFacts, problems: list[str], windows: Any
) -> UpdatePlan | None:
    """How the budget is cut; None when it is an epoch of a pack or of conversations that are not there."""
    training, length = config.training, config.data.sequence_length
    budget = asked.tokens or training.train_tokens
    wanted = replace(training, train_tokens=budget)
    if windows is not None:
        budget = positions_of_budget(wanted, windows)
    if budget == "epoch":
        if pack.origin != "manifest":
            return None
        budget = round(training.epochs * (pack.targets or 0))
    rows, batch = training.per_device_train_batch_size, training.global_batch_tokens
    try:
        if windows is None:
            plan = plan_updates(int(budget), batch, length, rows, asked.num_processes, training.batch_growth)
        else:
            plan = plan_of_windows(wanted, windows, asked.num_processes)
    except ConfigError as error:
        problems.append(str(error))
        if not budget:
            return None
        growth = tuple((point, size) for point, size in training.batch_growth)
        masked = 0 if windows is None else int(budget) - windows.targets_of(int(budget))
        plan = UpdatePlan(int(budget), batch, length, rows, asked.num_processes, masked, growth)
    if training.warmup_steps >= plan.updates:
        problems.append(
            f"warmup_steps={training.warmup_steps:,} leaves no update of this run's {plan.updates:,}. "
            f"Use {max(0, plan.updates - 1):,} or fewer, or more tokens."
        )
    elif (
        training.lr_schedule == "wsd" and stable_updates(plan.updates, training.decay_fraction) < training.warmup_steps
    ):
        problems.append(
            f"decay_fraction={training.decay_fraction:g} of {plan.updates:,} updates begins before the end of "
            f"warmup_steps={training.warmup_steps:,}. Lower one of them."
        )
    return plan


def _size(shape: ModelShape, config: RunConfig, loss: float | None) -> dict[str, Any]:
    length = config.data.sequence_length
    recomputes = config.training.gradient_checkpointing
    return {
        "parameters": shape.parameters,
        "decayed_parameters": shape.decayed_parameters,
        "undecayed_parameters": shape.undecayed_parameters,
        "parameters_by_part": shape.parts,
        "vocab_size": shape.vocab_size,
        "uniform_loss": uniform_loss(shape.vocab_size),
        "loss": loss,
        "perplexity": None if loss is None else math.exp(loss),
        "flops_per_token": shape.flops_per_token(),
        "flops_per_token_with_attention": shape.flops_per_token_with_attention(length),
        "flops_per_token_causal": shape.flops_per_token_causal(length),
        "flops_per_token_with_recomputation": shape.flops_per_token_with_recomputation(),
        "hardware_flops_per_token": (
            shape.flops_per_token_with_recomputation() if recomputes else shape.flops_per_token()
        ),
    }


def _budget(shape: ModelShape, config: RunConfig, updates: UpdatePlan | None, pack: PackFacts) -> dict[str, Any]:
    training, length = config.training, config.data.sequence_length
    batch = training.global_batch_tokens
    reference = TOKENS_PER_PARAMETER * shape.parameters
    found: dict[str, Any] = {
        "train_tokens": None,
        "positions": None,
        "global_batch_tokens": batch,
        "updates": None,
        "last_update_tokens": None,
        "full_updates": None,
        "tokens_of_full_updates": None,
        "gradient_accumulation_steps": None,
        "stages": None,
        "tokens_per_parameter": None,
        "reference_tokens": reference,
        "reference_flops": 6 * shape.parameters * reference,
        "total_flops": None,
        "total_flops_with_attention": None,
        "total_flops_causal": None,
        "optimizer_flops_per_update": optimizer_flops(shape, training.optim, training.muon_ns_steps),
        "optimizer_flops": None,
        "optim": training.optim,
        "lr_schedule": training.lr_schedule,
        "stable_updates": None,
        "available_tokens": pack.targets,
        "available_tokens_from": pack.origin,
        "epochs": None,
    }
    if updates is None:
        return found
    tokens, positions = updates.supervised_tokens, updates.train_tokens
    if training.lr_schedule == "wsd":
        found["stable_updates"] = stable_updates(updates.updates, training.decay_fraction)
    micro = updates.per_device_train_batch_size * length * updates.world_size
    return found | {
        "train_tokens": tokens,
        "positions": positions,
        "updates": updates.updates,
        "last_update_tokens": updates.last_update_tokens,
        "full_updates": updates.updates - (positions < updates.full_tokens),
        "tokens_of_full_updates": updates.full_tokens,
        "gradient_accumulation_steps": None if batch % micro else updates.accumulation_of(0),
        "stages": [_stage(updates, number, micro) for number in range(len(updates.stages))],
        "tokens_per_parameter": tokens / shape.parameters,
        "total_flops": positions * shape.flops_per_token(),
        "total_flops_with_attention": positions * shape.flops_per_token_with_attention(length),
        "total_flops_causal": positions * shape.flops_per_token_causal(length),
        "optimizer_flops": updates.updates * found["optimizer_flops_per_update"],
        "epochs": tokens / pack.targets if pack.targets else None,
    }


def _stage(updates: UpdatePlan, number: int, micro: int) -> dict[str, Any]:
    """One size of the batch: `from_update` counts from 1, as rows of metrics.jsonl do."""
    stage = updates.stages[number]
    after = updates.stages[number + 1].first_update if number + 1 < len(updates.stages) else updates.updates
    return {
        "from_tokens": stage.tokens_before,
        "from_update": stage.first_update + 1,
        "updates": after - stage.first_update,
        "global_batch_tokens": stage.batch_tokens,
        "gradient_accumulation_steps": None if stage.batch_tokens % micro else stage.batch_tokens // micro,
    }


def _disk(shape: ModelShape, config: RunConfig, updates: UpdatePlan | None, pack: PackFacts) -> dict[str, Any]:
    training = config.training
    kept = None
    if updates is not None:
        kept = checkpoints_kept(
            updates.updates, training.save_steps, training.save_minutes, training.save_total_limit,
            training.milestone_steps, bool(training.eval_steps),
        )  # fmt: skip
    exports = {kind: file_bytes(shape, kind) for kind in GGUF_TYPES}
    final = 4 * shape.parameters + export_bytes(shape, config.export.gguf)
    checkpoint = checkpoint_bytes(shape, training.optim)
    rotation = None if kept is None else (kept + 1) * checkpoint
    ids, origin = pack.ids, pack.origin
    if ids is None and updates is not None and not config.data.conversations:  # as many as an epoch needs
        ids, origin = math.ceil(updates.train_tokens / (1 - config.data.validation_fraction)), "one epoch of the budget"
    return {
        "checkpoint_bytes": checkpoint,
        "checkpoints_at_once": None if kept is None else kept + 1,  # the one being written beside those that stay
        "rotation_bytes": rotation,
        "gguf_f16_bytes": shape.gguf_f16_bytes,
        "export_bytes": exports,
        "final_bytes": final,
        "shard_ids": ids,
        "shard_bytes": None if ids is None else ids * id_bytes(shape.vocab_size),
        "shard_bytes_from": origin,
        "disk_bytes": None if rotation is None else rotation + final,
    }


def _memory(shape: ModelShape, config: RunConfig, updates: UpdatePlan | None, asked: Assumptions) -> dict[str, Any]:
    """On the device that the run would use, and on the other kind; without and with activation checkpointing.

    Compilation counts on a CPU, where its memory was measured; on a GPU it only lowers what is estimated.
    """
    training, length = config.training, config.data.sequence_length
    rows = training.per_device_train_batch_size
    compiled = training.torch_compile is True
    if training.torch_compile == "auto" and updates is not None:
        compiled = compiling_pays(shape.flops_per_token_with_attention(length) * updates.train_tokens, "cpu")
    on_cpu = training.use_cpu or (asked.device or "").lower() == "cpu"
    estimates = {}
    for place in ("gpu", "cpu"):
        for checkpointing in (False, True):
            settings = MemorySettings(
                tokens=rows_of_pass(rows, length, place == "cpu" and compiled) * length,
                sequence_length=length,
                bf16=_half(training, place == "cpu"),
                checkpointing=checkpointing,
                eager_attention=config.model.attn_implementation == "eager",
                document_attention=config.data.document_attention or bool(config.data.conversations),
                on_cpu=place == "cpu",
                compiled=place == "cpu" and compiled,
                optim=training.optim,
            )
            estimates[place, checkpointing] = peak_memory(shape, settings)
    place = "cpu" if on_cpu else "gpu"
    parts = estimates[place, training.gradient_checkpointing]
    peak = sum(parts.values())
    device = named_device(asked.device)
    room = device.memory_gib * 2**30 if device else None
    return {
        "memory_of": place,
        "peak_memory_bytes": peak,
        "peak_memory_by_part": parts,
        "peak_memory_with_checkpointing_bytes": sum(estimates[place, True].values()),
        "peak_memory_without_checkpointing_bytes": sum(estimates[place, False].values()),
        "activation_bytes_without_checkpointing": estimates[place, False]["activations"],
        "activation_bytes_with_checkpointing": estimates[place, True]["activations"],
        "peak_memory_on_gpu_bytes": sum(estimates["gpu", training.gradient_checkpointing].values()),
        "peak_memory_on_cpu_bytes": sum(estimates["cpu", training.gradient_checkpointing].values()),
        "device_memory_bytes": room,
        "fits_device": None if room is None else peak <= room,
    }


def _half(training: TrainingSection, on_cpu: bool) -> bool:
    """Whether products are of 16 bits; `auto` as training decides it, without loading torch."""
    if training.precision != "auto":
        return training.precision != "fp32"
    if training.fp16 or training.bf16 != "auto":
        return training.fp16 or bool(training.bf16)
    cpuinfo = Path("/proc/cpuinfo")
    return not on_cpu or (cpuinfo.is_file() and "avx512_bf16" in cpuinfo.read_text(errors="replace"))


def _scaled(parameters: int, config: RunConfig, flops_per_second: float | None) -> dict[str, Any]:
    """A run of another size at 20 tokens per parameter and this one's batch and FLOP/s: 6ND = 120 N^2."""
    tokens = TOKENS_PER_PARAMETER * parameters
    flops = 6 * parameters * tokens
    return {
        "parameters": parameters,
        "tokens": tokens,
        "updates": recorded_plan({**vars(config.training), "train_tokens": tokens}).updates,
        "total_flops": flops,
        "hours": None if flops_per_second is None else flops / flops_per_second / 3600,
        "checkpoint_bytes": 12 * parameters,
    }
