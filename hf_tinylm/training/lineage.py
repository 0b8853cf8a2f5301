"""Branches: a new run that starts from the weights of another one, or goes on from one of its checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ..contract import DONE_FILE, MANIFEST, RUN_FILE, difference, inherited_tokens
from ..errors import CheckpointError, ContractError, TokenizerError, TrainingError
from ..files import read_record, sha256_of_file
from ..modeling.configuration import TinyLMConfig
from ..modeling.factory import load_model
from ..modeling.model import TinyLMForCausalLM
from ..tokenization.load import load_backend
from ..tokenization.load import tokenizer_sha256 as hash_of_tokenizer
from .checkpoint import checkpoint_fault, read_checkpoint
from .optimizer import load_optimizer_tensors, moments_are_zero
from .schedule import Schedule, recorded_schedule

# What a run that goes on from another one's checkpoint may have otherwise, if the rates so far were the same.
_OF_THE_END = (
    *("train_tokens", "lr_schedule", "decay_fraction", "decay_shape", "min_lr_ratio"),
    *("init_from", "branch_from"),
)
# Differences that do not change which function the weights are; rows of padding are not weights of it.
_NO_SHAPE = ("initializer_range", "attention_dropout", "max_position_embeddings", "vocab_size", "unpadded_vocab_size")


def lineage(init_from: str, with_optimizer: bool) -> dict[str, Any]:
    """What a branch starts from, by content: hashes of its weights, and the identity of the run they are of.

    Returns:
        `path`, `weights_sha256` of each file, `manifest_sha256` of a checkpoint, `with_optimizer`, `parent_identity`,
        `step` and `parent_tokens` (updates and supervised targets of the parent so far), and `inherited_tokens` (those
        of the parent's own ancestors too); None for what the folder does not tell.
    """
    folder = Path(init_from)
    parent, manifest = folder.parent / RUN_FILE, folder / MANIFEST
    identity = read_record(parent, "identity")["identity"] if parent.is_file() else None
    step, tokens = _progress(folder)
    before = None if identity is None else inherited_tokens(identity)
    return {
        "path": str(folder.resolve()),
        "weights_sha256": {path.name: sha256_of_file(path) for path in sorted(folder.glob("model*.safetensors"))},
        "manifest_sha256": sha256_of_file(manifest) if manifest.is_file() else None,
        "with_optimizer": with_optimizer,
        "step": step,
        "parent_tokens": tokens,
        "inherited_tokens": None if tokens is None or before is None else before + tokens,
        "parent_identity": identity,
    }


def _progress(folder: Path) -> tuple[int | None, int | None]:
    """Updates and targets behind the weights of a checkpoint, or of the final folder of a finished run."""
    state = read_record(folder / "trainer_state.json") if (folder / "trainer_state.json").is_file() else {}
    if "supervised_tokens" in state:  # transformers' own Trainer writes a file of that name with other keys
        return int(state["step"]), int(state["supervised_tokens"])
    if folder.name == "final" and (folder.parent / DONE_FILE).is_file():
        done = read_record(folder.parent / DONE_FILE, "updates", "supervised_tokens")
        return int(done["updates"]), int(done["supervised_tokens"])
    return None, None


def changed_since(parent_identity: dict[str, Any] | None, identity: dict[str, Any]) -> list[str]:
    """What a branch does otherwise than the run that it starts from: `["training.learning_rate: 6e-05 -> 0.00024"]`."""
    if parent_identity is None:
        return []
    before, now = (
        {
            "training": {k: v for k, v in one["training"].items() if k not in ("init_from", "branch_from")},
            "data": one.get("data"),
        }
        for one in (parent_identity, identity)
    )
    return difference(before, now)


def check_tokenizer(init_from: str, tokenizer_sha256: str | None) -> None:
    """Refuse weights of another tokenizer: each row of their embedding would stand for another token.

    Args:
        tokenizer_sha256: of the new run; None: it is not known.

    Raises:
        TokenizerError: with both hashes.
    """
    parent = Path(init_from).parent / RUN_FILE
    if parent.is_file():
        theirs = read_record(parent, "identity")["identity"].get("data", {}).get("tokenizer_sha256")
    else:  # a copy without its run: by its own files
        own = (Path(init_from) / "tokenizer.json").is_file()
        theirs = hash_of_tokenizer(load_backend(init_from)) if own else None
    if theirs is None or tokenizer_sha256 is None or theirs == tokenizer_sha256:
        return
    raise TokenizerError(
        f"init_from {init_from} was trained with the tokenizer {theirs[:12]}..., and this run has "
        f"{tokenizer_sha256[:12]}...: ids would mean other tokens. Give the parent's tokenizer_path and write the "
        "shards with it: hf-tinylm prepare."
    )


def check_weights(init_from: str) -> None:
    """Refuse weights that are not those whose hashes their checkpoint's manifest or their run's `DONE.json` recorded.

    A model folder of other origin has no such record.

    Raises:
        CheckpointError: naming the file.
    """
    folder = Path(init_from)
    record = folder / MANIFEST if (folder / MANIFEST).is_file() else folder.parent / DONE_FILE
    if not record.is_file() or (record.name == DONE_FILE and folder.name != "final"):
        return
    try:
        found = read_record(record)
        if record.name == MANIFEST:
            hashes = {name: str(facts["sha256"]) for name, facts in found["files"].items()}
        else:
            hashes = dict(found.get("final_weights_sha256", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{record} is damaged ({error!r}). Give init_from another copy of it.") from error
    for name, recorded in sorted(hashes.items()):
        if not name.startswith("model") or not name.endswith(".safetensors"):
            continue
        if not (folder / name).is_file() or sha256_of_file(folder / name) != recorded:
            raise CheckpointError(
                f"init_from {folder}: {name} is missing or has other bytes than {record} recorded. Give another copy."
            )


def initialise_from(
    init_from: str, with_optimizer: bool, model: TinyLMForCausalLM, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Copy the weights (and moments) of a checkpoint or model folder into a new run, and look whether they arrived.

    Returns:
        `init_weights_sha256`: hash of the weights that the run begins with, equal to that of the folder's; and
        `moments`: `kept` or `zero`.

    Raises:
        ConfigError: the folder holds no model.
        ContractError: its model has another shape.
        CheckpointError: the moments are asked for, and the folder is no whole checkpoint, or another optimizer's.
        TrainingError: the weights are not those of the folder, or the moments not zero.
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
    theirs, ours = (sha256_of_weights(each, model.vocabulary_weights, tokens) for each in (source, model))
    if theirs != ours:
        raise TrainingError(f"The weights are not those of {folder}: their hash is {ours[:12]}, not {theirs[:12]}.")
    if with_optimizer:
        fault = checkpoint_fault(folder)
        if fault:
            raise CheckpointError(f"init_optimizer needs a whole checkpoint, and {folder} is none: {fault}.")
        load_optimizer_tensors(optimizer, model, read_checkpoint(folder).optimizer)
    elif not moments_are_zero(optimizer):
        raise TrainingError("The optimizer has been used before this run began; its moments must be zero.")
    return {"init_weights_sha256": ours, "moments": "kept" if with_optimizer else "zero"}


def sha256_of_weights(model: torch.nn.Module, vocabulary_weights: Collection[str], tokens: int) -> str:
    """Hash of the names and bits of all weights, without rows that pad the vocabulary beyond `tokens`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        rows = tokens if name in vocabulary_weights else len(tensor)
        digest.update(name.encode() + b"\0")
        digest.update(tensor[:rows].detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
    parent = read_record(folder.parent / RUN_FILE, "identity")["identity"]
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
    old, step = recorded_schedule(parent["training"]), int(read_record(folder / "trainer_state.json", "step")["step"])
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
