"""Branches: a new run that starts from the weights of another one, or goes on from one of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..contract import RUN_FILE, difference
from ..errors import CheckpointError, ContractError
from ..files import read_json, sha256_of_file
from ..modeling.configuration import TinyLMConfig
from ..modeling.factory import load_model
from ..modeling.model import TinyLMForCausalLM
from .checkpoint import checkpoint_fault, read_checkpoint
from .optimizer import load_optimizer_tensors
from .schedule import Schedule, recorded_schedule

# What a run that goes on from another one's checkpoint may have otherwise, if the rates so far were the same.
_OF_THE_END = (
    *("train_tokens", "lr_schedule", "decay_fraction", "decay_shape", "min_lr_ratio"),
    *("init_from", "branch_from"),
)
# Differences that do not change which function the weights are; rows of padding are not weights of it.
_NO_SHAPE = ("initializer_range", "attention_dropout", "max_position_embeddings", "vocab_size", "unpadded_vocab_size")


def lineage(init_from: str, with_optimizer: bool) -> dict[str, Any]:
    """What a branch starts from, by content: hashes of its weights, and the identity of the run they are of."""
    folder = Path(init_from)
    parent = folder.parent / RUN_FILE
    return {
        "path": str(folder.resolve()),
        "weights_sha256": {path.name: sha256_of_file(path) for path in sorted(folder.glob("model*.safetensors"))},
        "with_optimizer": with_optimizer,
        "parent_identity": read_json(parent)["identity"] if parent.is_file() else None,
    }


def initialise_from(
    init_from: str, with_optimizer: bool, model: TinyLMForCausalLM, optimizer: torch.optim.Optimizer
) -> None:
    """Copy the weights (and moments) of a checkpoint or model folder into a new run.

    Raises:
        ConfigError: the folder holds no model.
        ContractError: its model has another shape.
        CheckpointError: the moments are asked for, and the folder is no whole checkpoint.
    """
    folder = Path(init_from)
    source = load_model(folder)
    differences = difference(_shape(source.config), _shape(model.config))
    if differences:
        raise ContractError(
            f"init_from {folder} is a model of another shape; {'; '.join(differences)}. "
            "Give its shape in the model section, or another init_from."
        )
    tokens = model.config.num_tokens
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in source.state_dict().items():
            rows = tokens if name in model.vocabulary_weights else len(tensor)
            state[name][:rows].copy_(tensor[:rows])
    if with_optimizer:
        fault = checkpoint_fault(folder)
        if fault:
            raise CheckpointError(f"init_optimizer needs a whole checkpoint, and {folder} is none: {fault}.")
        load_optimizer_tensors(optimizer, model, read_checkpoint(folder).optimizer)


def check_branch(folder: Path, identity: dict[str, Any], schedule: Schedule) -> None:
    """Refuse to go on from a checkpoint whose run differed before it in anything but its length.

    Raises:
        CheckpointError: the folder is no whole checkpoint, or not in the folder of its run.
        ContractError: the other run differs in more than budget and decay, or had other rates before the checkpoint.
    """
    fault = checkpoint_fault(folder)
    if fault or not (folder.parent / RUN_FILE).is_file():
        fault = fault or f"{folder.parent} has no {RUN_FILE}"
        raise CheckpointError(f"branch_from needs a whole checkpoint in the folder of its run; {folder}: {fault}.")
    parent = read_json(folder.parent / RUN_FILE)["identity"]
    before, now = (
        {**one, "training": {name: value for name, value in one["training"].items() if name not in _OF_THE_END}}
        for one in (parent, identity)
    )
    differences = difference(before, now)
    if differences:
        raise ContractError(
            f"branch_from {folder} is of a run that differs in more than its end; {'; '.join(differences)}. "
            "Use its values, or init_from for a run of its own."
        )
    old, step = recorded_schedule(parent["training"]), int(read_json(folder / "trainer_state.json")["step"])
    for update in range(step):
        if old(update) != schedule(update):
            raise ContractError(
                f"branch_from {folder} is after update {step:,}, but update {update + 1:,} had rate {old(update):.6g} "
                f"there and has {schedule(update):.6g} here. Branch from an earlier checkpoint, of the stable part of "
                f"both runs, or give train_tokens or decay_fraction so that the decay begins after it."
            )


def _shape(config: TinyLMConfig) -> dict[str, Any]:
    identity = {name: value for name, value in config.identity.items() if name not in _NO_SHAPE}
    return {**identity, "tokens": config.num_tokens}
