from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_tinylm.config import OF_MUON, OF_WSD, load_config
from hf_tinylm.errors import ConfigError
from hf_tinylm.sections import TrainingSection
from hf_tinylm.training import arguments
from hf_tinylm.training.arguments import (
    HONOURED,
    REFUSED,
    LMTrainingArguments,
    cpu_threads,
    training_arguments,
)
from hf_tinylm.training.device import DeviceFacts


def test_every_field_of_training_arguments_is_honoured_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert not names - HONOURED - set(REFUSED), "a transformers release added fields without a stand on them"
    assert not HONOURED & set(REFUSED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", 10), ("num_train_epochs", 1.0), ("gradient_accumulation_steps", 4),
        ("deepspeed", {}), ("warmup_steps", 0.1), ("eval_strategy", "epoch"), ("save_strategy", "best"),
        ("logging_strategy", "epoch"), ("metric_for_best_model", "accuracy"), ("push_to_hub", True), ("debug", "x"),
        ("eval_on_start", True),
        ("fsdp", "full_shard"), ("auto_find_batch_size", True), ("optim", "adafactor"), ("label_smoothing_factor", 0.1),
        ("lr_scheduler_type", "constant"), ("load_best_model_at_end", True), ("logging_nan_inf_filter", False),
        ("dataloader_num_workers", 2), ("neftune_noise_alpha", 5.0), ("average_tokens_across_devices", False),
    ],
)  # fmt: skip
def test_a_field_that_the_loop_does_not_honour_is_an_error_when_set(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"{name}=.*(is not supported by LMTrainer|must be a whole number|is not measured)"
    ):
        LMTrainingArguments(output_dir=str(tmp_path), **{name: value})


def test_the_configuration_reaches_the_arguments(tmp_path: Path) -> None:
    overrides = ["--output_dir", str(tmp_path), "--learning_rate", "3e-4", "--eval_steps", "7", "--use_cpu"]
    overrides += ["--bf16", "false", "--adam_beta2", "0.98", "--save_steps", "9", "--report_to", "tensorboard"]
    args = training_arguments(load_config(None, [*overrides, "--cpu_threads", "1"]))
    assert (args.learning_rate, args.eval_steps, args.adam_beta2, args.save_steps) == (3e-4, 7, 0.98, 9)
    assert (args.eval_strategy, args.save_strategy, args.report_to) == ("steps", "steps", ["tensorboard"])
    assert args.mixed_precision == "no"
    assert args.device.type == "cpu"


def test_an_output_folder_is_needed() -> None:
    with pytest.raises(ConfigError, match="output_dir is missing"):
        training_arguments(load_config(None, []))


def test_flex_attention_on_a_cpu_is_refused_before_its_missing_backward_pass_is_met(tmp_path: Path) -> None:
    given = ["--output_dir", str(tmp_path), "--use_cpu", "--cpu_threads", "1"]
    with pytest.raises(ConfigError, match="trains on a GPU only"):
        training_arguments(load_config(None, [*given, "--attn_implementation", "flex_attention"]))
    assert training_arguments(load_config(None, [*given, "--attn_implementation", "eager"])).use_cpu


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--use_cpu"], "USE_TORCH_XLA=0"),
        (["--precision", "fp16"], "precision: bf16"),
        (["--torch_compile", "true"], "XLA compiles by itself"),
        (["--optim", "muon"], "optim: adamw"),
        (["--attn_implementation", "flex_attention"], "an XLA device"),
    ],
)
def test_what_an_xla_device_cannot_do_is_refused_by_name(
    given: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "uses_xla", lambda: True)
    monkeypatch.setattr(arguments, "device_facts", lambda use_cpu: DeviceFacts("xla", "XLA (TPU)", bf16=True))
    with pytest.raises(ConfigError, match=words):
        training_arguments(load_config(None, ["--output_dir", str(tmp_path), *given]))


def test_a_launcher_that_sets_one_thread_does_not_leave_cores_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cpu_threads(None) == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * cores))
    assert cpu_threads(None) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (cpu_threads(None), cpu_threads(5)) == (3, 5)


def test_every_training_key_of_a_configuration_reaches_the_arguments(tmp_path: Path) -> None:
    """A key that is read and then forgotten would be a setting that silently does nothing."""
    other: dict[str, Any] = {
        "output_dir": str(tmp_path / "other"), "train_tokens": 77, "global_batch_tokens": 2_048, "bf16": "true",
        "per_device_train_batch_size": 3, "per_device_eval_batch_size": 5, "learning_rate": 0.5, "min_lr_ratio": 0.5,
        "warmup_steps": 9, "weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_epsilon": 0.5,
        "max_grad_norm": 0.5, "torch_compile": "true", "gradient_checkpointing": "true", "use_cpu": "true",
        "logging_steps": 9, "eval_steps": 9, "save_steps": 9, "save_minutes": 9, "save_total_limit": 9,
        "resume_from_checkpoint": "auto", "report_to": "tensorboard", "run_name": "other", "seed": 9,
        "save_best": "true", "milestone_steps": 9, "save_in_background": "false", "init_from": "other",
        "branch_from": "other", "init_optimizer": "true", "nonfinite": "skip", "nonfinite_limit": 9,
        "stop_after_updates": 9, "max_hours": 9.0, "max_cost": 9.0, "price_per_hour": 9.0, "note": "other",
        "expect": "other",
        "source_loss": "true", "stage_dir": "other", "epochs": 2, "mirror_dir": "other",
        "optim": "muon", "embedding_lr_ratio": 9.0,
        "head_lr_ratio": 9.0, "gain_lr_ratio": 9.0, "muon_momentum": 0.5, "muon_momentum_warmup_steps": 9,
        "muon_ns_steps": 9, "lr_schedule": "wsd", "decay_fraction": 0.5, "decay_shape": "sqrt",
        "noise_scale": "false", "peak_flops": 1e12, "loss_kernel": "torch", "batch_growth": "[[9, 999_999]]",
    }  # fmt: skip
    # for torch itself, for a GPU (both tested below), and read by the recipes and by the pages
    not_arguments = {"cpu_threads", "fp16", "precision", "preflight", "sample_steps", "sensor_seconds", "price_per_kwh"}
    assert set(other) | not_arguments == {field.name for field in dataclasses.fields(TrainingSection)}
    base = ["--cpu_threads", "1", "--bf16", "false"]
    plain = training_arguments(load_config(None, [*base, "--output_dir", str(tmp_path)]))
    needed = {"max_cost": ["--price_per_hour", "1"], "init_optimizer": ["--init_from", "x"]}
    needed |= {key: ["--optim", "muon"] for key in OF_MUON} | {key: ["--lr_schedule", "wsd"] for key in OF_WSD}
    unchanged = []
    for key, value in other.items():
        together = needed.get(key, [])
        given = [*base, "--output_dir", str(tmp_path), f"--{key}", str(value), *together]
        changed = training_arguments(load_config(None, given))
        names = (field.name for field in dataclasses.fields(LMTrainingArguments))
        if all(getattr(plain, name) == getattr(changed, name) for name in names):
            unchanged.append(key)
    assert unchanged == (["use_cpu"] if plain.use_cpu else [])


def test_float16_is_refused_on_a_cpu_and_beside_bfloat16(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        training_arguments(load_config(None, ["--output_dir", str(tmp_path), "--fp16", "--use_cpu"]))
    with pytest.raises(ConfigError, match="bf16 and fp16 are both true"):
        load_config(None, ["--fp16", "--bf16"])


def test_the_arguments_decide_the_precision_whatever_a_launcher_or_an_earlier_run_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    for bf16, expected in ((False, "no"), (True, "bf16")):
        args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=bf16)
        assert args.device.type == "cpu"  # sets up the state that an Accelerator shares
        assert Accelerator().mixed_precision == expected


@pytest.mark.parametrize(
    ("name", "told"),
    [("nosuch", r"report_to=nosuch is unknown. Give one of .*wandb"), ("wandb", "Run: pip install wandb")],
)
def test_a_tracker_that_is_not_there_is_refused_before_anything_is_built(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "true")
    with pytest.raises(ConfigError, match=told):
        training_arguments(load_config(None, ["--output_dir", str(tmp_path / "run"), "--report_to", name]))
    assert not (tmp_path / "run").exists()
