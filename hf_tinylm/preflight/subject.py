"""The run that is examined, and copies of its model that checks may train and throw away."""

from __future__ import annotations

import contextlib
import copy
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.pack import Pack
from ..files import TEMPORARY_PREFIX
from ..modeling.model import TinyLMForCausalLM
from ..sections import RunConfig
from ..training.source_loss import SOURCE_IDS
from ..training.trainer import LMTrainer
from ..training.update import Update
from ..training.wrapping import run_precision

PROBE_LENGTH = 64  # tokens of a window in checks that train a copy of the model


class Alone:
    """What `Update` asks of an accelerator, for a model that every process trains by itself."""

    num_processes = 1
    process_index = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """There is nobody to synchronise with."""
        return contextlib.nullcontext()


class Noted:
    """Windows that note which of them are asked for."""

    def __init__(self, windows: Any) -> None:
        self.windows, self.asked = windows, np.empty(0, dtype=np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.windows, name)

    def batch(self, ks: Any) -> dict[str, torch.Tensor]:
        """The windows' own batch."""
        self.asked = np.concatenate([self.asked, np.asarray(ks, dtype=np.int64).reshape(-1)])
        batch: dict[str, torch.Tensor] = self.windows.batch(ks)
        return batch


class Subject:
    """A run that is ready to train. Nothing here changes its model, optimizer, state or folder.

    Args:
        scratch: a folder on the volume of `output_dir` for probe runs, the same on all processes.
    """

    def __init__(self, config: RunConfig, trainer: LMTrainer, pack: Pack, output_dir: Path, scratch: Path) -> None:
        self.config, self.trainer, self.pack = config, trainer, pack
        self.output_dir, self.scratch = output_dir, scratch
        self.device: torch.device = trainer.args.device
        self.model_config = trainer.model.config
        self.flash = str(self.model_config._attn_implementation).startswith("flash")

    def probe(self, dropout: bool = True) -> TinyLMForCausalLM:
        """A copy of the run's fresh model in training mode, on request without dropout."""
        model = copy.deepcopy(self.trainer.model).train()
        if not dropout:
            model.config.attention_dropout = 0.0
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The run's own optimizer for a copy of its model."""
        held, self.trainer.optimizer = self.trainer.optimizer, None  # type: ignore[assignment]
        try:
            return self.trainer.create_optimizer(model)
        finally:
            self.trainer.optimizer = held

    def update(self, model: nn.Module) -> Update:
        """The run's own update of a copy, on this process alone."""
        return Update(Alone(self.device), model, self.optimizer(model), self.trainer.args.max_grad_norm)

    def precision(self) -> AbstractContextManager[Any]:
        """Matrix products as the run makes them; float16, which needs a scaler, is left to its own check."""
        bf16 = self.trainer.args.bf16
        return run_precision(self.trainer.args, self.trainer.accelerator) if bf16 else contextlib.nullcontext()

    def exact(self) -> AbstractContextManager[Any]:
        """Float32, except for attention kernels that have none."""
        rounded = run_precision(self.trainer.args, self.trainer.accelerator)
        return rounded if self.flash else contextlib.nullcontext()

    @property
    def tolerance(self) -> float:
        """Relative difference that `exact` arithmetic may have between two ways to the same number."""
        return 3e-2 if self.flash else 1e-3

    def batches(self, number: int) -> list[dict[str, torch.Tensor]]:
        """The first micro-batches of the run on this process, at most `number`, as its own loader gives them."""
        micro_batches = (batch for update in self.trainer.get_train_dataloader() for batch in update)
        return list(islice(micro_batches, number))

    def noted(self, updates: int) -> tuple[np.ndarray, list[list[dict[str, torch.Tensor]]]]:
        """The micro-batches of the first updates on this process, and the windows (n,) that they were made of."""
        own = self.trainer.train_dataset
        self.trainer.train_dataset = noted = Noted(own)
        try:
            found = list(islice(self.trainer.get_train_dataloader(), updates))
        finally:
            self.trainer.train_dataset = own
        return noted.asked, found

    def sample(self, rows: int, length: int = PROBE_LENGTH) -> dict[str, torch.Tensor]:
        """The beginning of the run's first windows, each tensor (rows, length) or less, on the device."""
        batches = self.batches(-(-rows // self.trainer.plan.per_device_train_batch_size))
        return {
            name: torch.cat([batch[name] for batch in batches])[:rows, :length].contiguous().to(self.device)
            for name in batches[0]
            if name != SOURCE_IDS
        }

    def logits(self, model: TinyLMForCausalLM, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Logits (B, T, tokens) in float32 without dropout, by the path that training takes, padding rows left out."""
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.exact():
                logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
        finally:
            model.train(training)
        return logits[..., : self.model_config.num_tokens].float()


def existing_parent(path: Path) -> Path:
    """`path` itself, or the nearest place above it that exists: it is on the volume where `path` will be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


@contextlib.contextmanager
def scratch_folder(output_dir: Path) -> Iterator[Path]:
    """A new folder on the volume of `output_dir`, removed afterwards. Its name is one that a later start cleans up."""
    folder = existing_parent(output_dir) / f"{TEMPORARY_PREFIX}preflight-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
