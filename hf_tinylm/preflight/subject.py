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

from ..data.conversations import ChatData
from ..data.pack import Pack
from ..files import TEMPORARY_PREFIX, read_json
from ..modeling.loss import IGNORE_INDEX
from ..modeling.model import TinyLMForCausalLM
from ..planning import ModelShape
from ..sections import RunConfig
from ..training.checkpoint import list_checkpoints
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
        data: the pack of a pretraining run, or the conversations of a chat run.
        scratch: a folder on the volume of `output_dir` for probe runs, the same on all processes.
    """

    def __init__(
        self, config: RunConfig, trainer: LMTrainer, data: Pack | ChatData, output_dir: Path, scratch: Path
    ) -> None:
        self.config, self.trainer, self.data = config, trainer, data
        self.output_dir, self.scratch = output_dir, scratch
        self.device: torch.device = trainer.args.device
        self.model_config = trainer.model.config
        self.flash = str(self.model_config._attn_implementation).startswith("flash")

    @property
    def pack(self) -> Pack:
        """What a pretraining run reads."""
        assert isinstance(self.data, Pack), "its rules are for pretraining runs"
        return self.data

    @property
    def chats(self) -> ChatData:
        """What a chat run reads."""
        assert isinstance(self.data, ChatData), "its rules are for chat runs"
        return self.data

    @property
    def chat_tokenizer(self) -> Any:
        """The tokenizer of a chat run."""
        return self.trainer.processing_class

    @property
    def planned_shape(self) -> ModelShape:
        """The shape that the configuration gives; a chat run has that of the model it starts from."""
        if isinstance(self.data, Pack):
            return ModelShape.from_config(self.config.model, self.data.shards.vocab_size)
        return ModelShape.from_model_config(read_json(Path(str(self.trainer.args.init_from)) / "config.json"))

    @property
    def resumed(self) -> bool:
        """Whether the run goes on from a checkpoint of its own."""
        return self.config.training.resume_from_checkpoint is not None and bool(list_checkpoints(self.output_dir))

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
        """A part with targets of each of the run's first windows, each tensor (rows, length) or less, on the device.

        It is the beginning where targets begin there; prompts that are not learned may be longer than `length`.
        """
        batches = self.batches(-(-rows // self.trainer.plan.per_device_train_batch_size))
        whole = {n: torch.cat([batch[n] for batch in batches])[:rows] for n in batches[0] if n != SOURCE_IDS}
        labels = whole["shift_labels"]
        length = min(length, labels.shape[1])
        first = (labels != IGNORE_INDEX).int().argmax(dim=1)  # half the part may be what comes before it
        begins = (first - length // 2).clamp(0, labels.shape[1] - length)
        places = begins[:, None] + torch.arange(length)
        return {name: tensor.gather(1, places).to(self.device) for name, tensor in whole.items()}

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
