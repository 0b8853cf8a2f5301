"""Each check is proven by a fault planted in the library, sent through the real command: it and its kin catch it."""

from __future__ import annotations

import json
import math
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling import model as modeling
from hf_tinylm.modeling.model import TinyLMAttention, TinyLMForCausalLM, TinyLMMLP
from hf_tinylm.tokenization.load import save_tokenizer
from hf_tinylm.tokenization.train import train_tokenizer
from hf_tinylm.training import optimizer
from hf_tinylm.training.schedule import CosineSchedule
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
    wrap(patch, modeling, "normalised_loss", lambda own, logits, labels, count: own(logits, labels, None))
    return []


def doubled_loss(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Update, "_targets_of_all", lambda own, self, batches: own(self, batches) // 2)
    return []


def rate_ten_times_the_plan(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, CosineSchedule, "__call__", lambda own, self, update: 10 * own(self, update))
    return []


def optimizer_at_ten_times_the_rate(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, Update, "_commit", lambda own, self, rate, norm: own(self, 10 * rate, norm))
    return []


def warmup_missing(patch: pytest.MonkeyPatch, *_: Path) -> list[str]:
    wrap(patch, CosineSchedule, "__call__", lambda own, self, update: own(self, max(update, self.warmup_steps)))
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

    def init(own: Any, self: TokenWindows, streams: Any, length: int, order: Any, seed: int, names: Any = None) -> None:
        train.append((streams, names))
        streams, names = train[0] if order == "sequential" else train[-1]
        own(self, streams, length, order, seed, names)

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


# What was planted, the checks that must catch it, and their kin that may.
FAULTS: list[tuple[Plant, set[str], set[str]]] = [
    (unshifted_targets, {"targets", "random tokens"}, {"initial loss"}),
    (broken_mask, {"causality", "masks"}, set()),
    (leaked_future, {"causality"}, {"masks", "generation", "random tokens"}),
    (detached_layer, {"gradients"}, set()),
    (frozen_parameter, {"gradients"}, {"decay groups"}),
    (nan_weight, {"weights"}, set()),
    (missing_division, {"loss"}, {"validation"}),
    (doubled_loss, {"loss"}, set()),
    (rate_ten_times_the_plan, {"schedule", "applied rate"}, set()),
    (optimizer_at_ten_times_the_rate, {"applied rate"}, {"overfit"}),
    (warmup_missing, {"warmup", "schedule"}, set()),
    (norms_decayed, {"decay groups"}, set()),
    (another_tokenizer, {"tokenizer"}, set()),
    (another_tokenizer_unnoticed, {"round trip"}, set()),
    (overlapping_split, {"split"}, set()),
    (windows_of_the_other_split, {"split"}, set()),
    (truncated_shard, {"shards"}, set()),
    (unwritable_folder, {"output folder"}, set()),
    (full_disk, {"disk"}, set()),
]


@pytest.mark.parametrize(("plant", "catches", "kin"), FAULTS, ids=[plant.__name__ for plant, _, _ in FAULTS])
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
