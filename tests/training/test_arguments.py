from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError
from hf_tinylm.training.arguments import HONOURED, REFUSED, LMTrainingArguments, training_arguments


def test_every_field_of_training_arguments_is_honoured_or_refused() -> None:
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert not names - HONOURED - set(REFUSED), "a transformers release added fields without a stand on them"
    assert not HONOURED & set(REFUSED)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", 10), ("num_train_epochs", 1.0), ("gradient_accumulation_steps", 4), ("fp16", True), ("deepspeed", {}),
        ("fsdp", "full_shard"), ("auto_find_batch_size", True), ("optim", "adafactor"), ("label_smoothing_factor", 0.1),
        ("lr_scheduler_type", "constant"), ("load_best_model_at_end", True), ("logging_nan_inf_filter", False),
        ("dataloader_num_workers", 2), ("neftune_noise_alpha", 5.0), ("average_tokens_across_devices", False),
    ],
)  # fmt: skip
def test_a_field_that_the_loop_does_not_honour_is_an_error_when_set(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*is not supported by LMTrainer"):
        LMTrainingArguments(output_dir=str(tmp_path), **{name: value})


def test_the_configuration_reaches_the_arguments(tmp_path: Path) -> None:
    overrides = ["--output_dir", str(tmp_path), "--learning_rate", "3e-4", "--eval_steps", "7", "--use_cpu"]
    overrides += ["--bf16", "false", "--adam_beta2", "0.98", "--save_steps", "9", "--report_to", "tensorboard"]
    args = training_arguments(load_config(None, overrides))
    assert (args.learning_rate, args.eval_steps, args.adam_beta2, args.save_steps) == (3e-4, 7, 0.98, 9)
    assert (args.eval_strategy, args.save_strategy, args.report_to) == ("steps", "steps", ["tensorboard"])
    assert args.mixed_precision == "no"
    assert args.device.type == "cpu"


def test_an_output_folder_is_needed() -> None:
    with pytest.raises(ConfigError, match="output_dir is missing"):
        training_arguments(load_config(None, []))
