"""Each check is proven by a fault planted in the library, sent through the real command: it and its kin catch it."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling import model as modeling
from hf_tinylm.modeling.model import TinyLMAttention, TinyLMForCausalLM, TinyLMMLP
from hf_tinylm.tokenization.load import save_tokenizer
from hf_tinylm.tokenization.train import train_tokenizer
from hf_tinylm.training import optimizer, trainer
from hf_tinylm.training.interrupt import Interrupt
from hf_tinylm.training.schedule import Schedule
from hf_tinylm.training.update import Update

Plant = Callable[[pytest.MonkeyPatch, Path, Path], list[str]]


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function whose first argument is the original."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(own, *args, **kwargs))


def unshifted_targets(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    def batch(own: Any, self: TokenWindows, ks: Any) -> dict[str, torch.Tensor]:
        found = own(self, ks)
        return {**found, "shift_labels": found["input_ids"]}

    wrap(patch, TokenWindows, "batch", batch)
    return []


def broken_mask(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    def everything(inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        rows, length, _width = inputs_embeds.shape
        return torch.ones(rows, 1, length, length, dtype=torch.bool)

    patch.setattr(modeling, "create_causal_mask", lambda *, inputs_embeds, **rest: everything(inputs_embeds))
    return []


def leaked_future(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    patch.setattr(TinyLMAttention, "is_causal", False)
    return []


def detached_layer(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, TinyLMMLP, "forward", lambda own, self, x: own(self, x).detach())
    return []


def change_new_models(patch: pytest.MonkeyPatch, change: Callable[[torch.nn.Parameter], Any]) -> None:
    def init(own: Any, self: TinyLMForCausalLM, config: Any) -> None:
        own(self, config)
        change(self.model.layers[1].mlp.up_proj.weight)

    wrap(patch, TinyLMForCausalLM, "__init__", init)


def frozen_parameter(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    change_new_models(patch, lambda weight: weight.requires_grad_(False))
    return []


def nan_weight(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(
        patch,
        TinyLMForCausalLM,
        "_from_config",
        lambda own, *args, **kwargs: _with_nan(own(*args, **kwargs)),
    )
    return []


def _with_nan(model: TinyLMForCausalLM) -> TinyLMForCausalLM:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = math.nan
    return model


def missing_division(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    """Each micro-batch is divided by its own targets, so an update of n micro-batches has n times the loss."""
    wrap(patch, modeling, "normalised", lambda own, total, labels, count: own(total, labels, None))
    return []


def doubled_loss(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Update, "_targets_of_all", lambda own, self, *rest: own(self, *rest) // 2)
    return []


def rate_ten_times_the_plan(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Schedule, "__call__", lambda own, self, update: 10 * own(self, update))
    return []


def optimizer_at_ten_times_the_rate(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Update, "_commit", lambda own, self, rate, norm: own(self, 10 * rate, norm))
    return []


def warmup_missing(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Schedule, "__call__", lambda own, self, update: own(self, max(update, self.warmup_steps)))
    return []


def norms_decayed(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    def one_group(own: Any, model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters()), "weight_decay": weight_decay}]

    wrap(patch, optimizer, "parameter_groups", one_group)
    return []


def another_tokenizer(patch: pytest.MonkeyPatch, tmp_path: Path, shards: Path) -> list[str]:
    """As many tokens, learned from the same text with its case swapped."""
    text = (shards.parent / "prose.txt").read_text(encoding="utf-8")[:60_000].swapcase()
    save_tokenizer(train_tokenizer([text], 512)[0], tmp_path / "other")
    return ["--tokenizer_path", str(tmp_path / "other")]


def another_tokenizer_unnoticed(patch: pytest.MonkeyPatch, tmp_path: Path, shards: Path) -> list[str]:
    recorded = json.loads((shards / "manifest.json").read_text())["tokenizer_sha256"]
    patch.setattr("hf_tinylm.data.pack.tokenizer_sha256", lambda tokenizer: recorded)
    return another_tokenizer(patch, tmp_path, shards)


def overlapping_split(patch: pytest.MonkeyPatch, tmp_path: Path, shards: Path) -> list[str]:
    """A pack that is whole in itself, and whose validation file is a training file."""
    copied = shutil.copytree(shards, tmp_path / "shards")
    manifest = json.loads((copied / "manifest.json").read_text())
    validation, train = (manifest["splits"][name]["shards"][0] for name in ("validation", "train"))
    shutil.copy(copied / train["name"], copied / validation["name"])
    manifest["splits"]["validation"]["shards"] = [{**train, "name": validation["name"]}]
    (copied / "manifest.json").write_text(json.dumps(manifest))
    return ["--shards", str(copied)]


def windows_of_the_other_split(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    """Validation windows are cut from the files of training."""
    train: list[Any] = []

    def init(own: Any, self: TokenWindows, streams: Any, length: int, order: Any, seed: int, *more: Any) -> None:
        train.append((streams, more))
        streams, more = train[0] if order == "sequential" else train[-1]
        own(self, streams, length, order, seed, *more)

    wrap(patch, TokenWindows, "__init__", init)
    return []


def truncated_shard(patch: pytest.MonkeyPatch, tmp_path: Path, shards: Path) -> list[str]:
    copied = shutil.copytree(shards, tmp_path / "shards")
    file = next((copied / "train").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-100])
    return ["--shards", str(copied)]


def unwritable_folder(patch: pytest.MonkeyPatch, tmp_path: Path, _: Path) -> list[str]:
    (tmp_path / "file").touch()
    return ["--output_dir", str(tmp_path / "file" / "run")]


def full_disk(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    usage = namedtuple("usage", "total used free")
    patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**5, 10**5))
    return []


# ---- faults beyond those that every preflight must know ----------------------------------------------------------


def ids_beyond_the_vocabulary(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, TokenWindows, "gather", lambda own, self, ks: own(self, ks) * 2)
    return []


def separators_lost(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    """The separator stands behind its document instead of in front."""
    from hf_tinylm.data import shards

    def opened(own: Any, folder: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> Any:
        shard = own(folder, entry, manifest)
        return dataclasses.replace(shard, ids=np.roll(shard.ids, -1))

    wrap(patch, shards, "_open_shard", opened)
    return []


def first_weights_too_large(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, modeling.init, "normal_", lambda own, tensor, mean, std: own(tensor, mean=mean, std=4 * std))
    return []


def another_shape(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    from hf_tinylm.modeling import factory

    def wider(own: Any, section: Any, *arguments: Any, **token_ids: Any) -> Any:
        return own(dataclasses.replace(section, intermediate_size=80), *arguments, **token_ids)

    wrap(patch, factory, "model_configuration", wider)
    return []


def norm_in_half_precision(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    def crude(own: Any, self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) * (1.5 if torch.is_autocast_enabled("cpu") else 1.0)

    wrap(patch, modeling.TinyLMRMSNorm, "forward", crude)
    return ["--bf16", "true"]


def cache_of_the_wrong_positions(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    patch.setattr(modeling.DynamicCache, "get_seq_length", lambda self, *_: 0)
    return []


def optimizer_that_does_nothing(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    patch.setattr(torch.optim.AdamW, "step", lambda self: None)
    return []


def update_that_cannot_be_disabled(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Update, "_commit", lambda own, self, rate, norm: own(self, rate or 1e-3, norm))
    return []


def evaluation_with_dropout(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    from hf_tinylm.training import validation

    wrap(
        patch, validation, "_batch_sums", lambda own, accelerator, model, *rest: own(accelerator, model.train(), *rest)
    )
    return ["--attention_dropout", "0.3"]


def mode_not_restored(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, TinyLMForCausalLM, "train", lambda own, self, mode=True: own(self, mode and not _evaluated(self)))
    wrap(patch, TinyLMForCausalLM, "eval", lambda own, self: setattr(self, "evaluated", True) or own(self))
    return []


def _evaluated(model: Any) -> bool:
    return getattr(model, "evaluated", False)


def rounded_weights_in_files(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    from hf_tinylm.training import checkpoint

    def rounded(own: Any, tensors: dict[str, torch.Tensor], *rest: Any, **more: Any) -> None:
        own({k: v.half().float() if v.is_floating_point() else v for k, v in tensors.items()}, *rest, **more)

    wrap(patch, checkpoint, "save_file", rounded)
    return []


def moments_not_restored(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    patch.setattr("hf_tinylm.training.record.load_optimizer_tensors", lambda *_: None)
    return []


def random_state_not_restored(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    patch.setattr("hf_tinylm.training.trainer.restore_random", lambda *_: None)
    return ["--attention_dropout", "0.3"]


def signals_left_alone(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    patch.setattr(Interrupt, "install", lambda self: None)
    return []


def windows_taken_twice(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    def again(own: Any, dataset: Any, plan: Any, process: int, number: int, *rest: Any) -> Any:
        return own(dataset, plan, process, number // 2, *rest)

    wrap(patch, trainer, "micro_batches", again)
    return []


def too_little_memory(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    memory, process = namedtuple("memory", "available"), namedtuple("process", "rss")
    patch.setattr(psutil, "virtual_memory", lambda: memory(10**8))
    patch.setattr(psutil.Process, "memory_info", lambda self: process(10**8))
    return []


# What was planted, the checks that must catch it, and their kin that may.
MORE_FAULTS: list[tuple[Plant, set[str], set[str]]] = [
    (leaked_future, {"causality"}, {"masks", "generation", "random tokens"}),
    (doubled_loss, {"loss"}, set()),
    (optimizer_at_ten_times_the_rate, {"applied rate"}, {"overfit"}),
    (another_tokenizer_unnoticed, {"round trip"}, set()),
    (windows_of_the_other_split, {"split"}, set()),
    (ids_beyond_the_vocabulary, {"ids"}, set()),
    (separators_lost, {"separators"}, {"round trip"}),
    (first_weights_too_large, {"initial loss"}, {"overfit", "random tokens"}),
    (another_shape, {"parameters"}, {"decay groups"}),
    (norm_in_half_precision, {"precision"}, set()),
    (cache_of_the_wrong_positions, {"generation"}, set()),
    (optimizer_that_does_nothing, {"overfit", "applied rate"}, {"resume"}),
    (update_that_cannot_be_disabled, {"overfit"}, set()),
    (evaluation_with_dropout, {"validation"}, set()),
    (mode_not_restored, {"validation"}, set()),
    (rounded_weights_in_files, {"save"}, set()),
    (moments_not_restored, {"resume"}, set()),
    (random_state_not_restored, {"resume"}, set()),
    (signals_left_alone, {"signals"}, set()),
    (windows_taken_twice, {"windows"}, set()),
    (too_little_memory, {"memory"}, set()),
]

FAULTS: list[tuple[Plant, set[str], set[str]]] = [
    (unshifted_targets, {"targets", "random tokens"}, {"initial loss"}),
    (broken_mask, {"causality", "masks"}, set()),
    (detached_layer, {"gradients"}, set()),
    (frozen_parameter, {"gradients"}, {"decay groups"}),
    (nan_weight, {"weights"}, set()),
    (missing_division, {"loss"}, {"validation"}),
    (rate_ten_times_the_plan, {"schedule", "applied rate"}, set()),
    (warmup_missing, {"warmup", "schedule"}, set()),
    (norms_decayed, {"decay groups"}, set()),
    (another_tokenizer, {"tokenizer"}, set()),
    (overlapping_split, {"split"}, set()),
    (truncated_shard, {"shards"}, set()),
    (unwritable_folder, {"output folder"}, set()),
    (full_disk, {"disk"}, set()),
]


@pytest.mark.parametrize(
    ("plant", "catches", "kin"),
    [
        *(pytest.param(*fault, id=fault[0].__name__) for fault in FAULTS),
        *(pytest.param(*fault, id=fault[0].__name__, marks=pytest.mark.slow) for fault in MORE_FAULTS),
    ],
)
def test_a_planted_fault_is_caught_by_its_check_and_its_kin_alone(
    plant: Plant,
    catches: set[str],
    kin: set[str],
    preflight: Callable[..., dict[str, dict[str, Any]]],
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = preflight(*plant(monkeypatch, tmp_path, tiny_config.parent / "shards"))
    failed = {name for name, check in checks.items() if check["ok"] is False}
    shown = {name: (checks[name]["value"], checks[name]["expected"]) for name in failed}
    assert catches <= failed <= catches | kin, shown
