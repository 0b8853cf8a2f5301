"""Is this folder the recorded run, on this machine, with these shards? Every hash, the text, and the loss again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..contract import (
    DONE_FILE,
    EVENTS,
    MANIFEST,
    RUN_FILE,
    difference,
    environment,
    list_checkpoints,
    step_of,
)
from ..data.pack import Pack, open_pack
from ..data.shards import Shards, load_shards
from ..errors import CheckpointError, ConfigError
from ..files import read_record, sha256_of_file, sha256_of_json
from ..locks import FileLock
from ..modeling.factory import load_model
from ..sections import DataSection, RunConfig, TokenizerSection, TrainingSection
from ..tokenization.load import load_tokenizer, tokenizer_sha256
from ..training.checkpoint import checkpoint_fault
from ..training.device import device_name
from ..training.finish import files_sha256
from ..training.folder import LOCK
from ..training.inputs import evaluated, hashed_windows
from ..training.metrics import Events
from ..training.validation import validate
from .checks import Check, Finding, rule, run_rules

# Nats per target that a validation may differ by where bits cannot be equal: another device, library or thread count.
TOLERANCE = 1e-5
ROUNDED_TOLERANCE = 5e-3  # with products of 8 (bf16) or 11 significant bits (fp16, tf32)
_SAME_BITS = ("device", "device_name", "torch", "attn_implementation", "tf32", "cpu_threads")


@dataclass(frozen=True)
class _OneProcess:
    """What `validate` asks of Accelerate."""

    device: torch.device
    num_processes: int = 1
    process_index: int = 0


class MovedRun:
    """A run's folder, and the shards and tokenizer that are said to be its own.

    Args:
        step: of the checkpoint whose validation is repeated; None: the newest that was evaluated.
        tokenizer: a folder; None: that of the final folder, or the recorded path.

    Raises:
        ConfigError: there is no run.json, or it is that of a run on conversations.
        CheckpointError: there is no checkpoint, or none of that step.
    """

    def __init__(self, folder: Path, shards: Path, step: int | None = None, tokenizer: str | None = None) -> None:
        self.folder, self.shards_path, self.step, self._tokenizer = folder, shards, step, tokenizer
        self.run: dict[str, Any] = read_record(folder / RUN_FILE, "identity")
        self.identity: dict[str, Any] = self.run["identity"]
        if "shards_sha256" not in self.identity["data"]:
            raise ConfigError(
                f"{folder} records no token shards: it is a run on conversations, or of a version that did not record "
                "them. Give the folder of a run of recipes/pretrain.py."
            )
        self.checkpoints = list_checkpoints(folder)
        steps = [step_of(path) for path in self.checkpoints]
        if not steps or (step is not None and step not in steps):
            there = (
                f"the checkpoints are of updates {', '.join(map(str, steps))}" if steps else "there is no checkpoint"
            )
            raise CheckpointError(f"{folder} has no checkpoint{f' of update {step}' if steps else ''}: {there}.")
        done = folder / DONE_FILE
        self.done: dict[str, Any] | None = read_record(done) if done.is_file() else None

    @cached_property
    def shards(self) -> Shards:
        """The pack, every byte of it verified against its manifest."""
        return load_shards(self.shards_path, verify=True)

    @cached_property
    def pack(self) -> Pack:
        """Windows as run.json describes them."""
        data, training = self.identity["data"], self.identity["training"]
        config = RunConfig(
            tokenizer=TokenizerSection(tokenizer_path=self.tokenizers[0]),
            data=DataSection(
                shards=str(self.shards_path),
                sequence_length=data["sequence_length"],
                window_order=data["window_order"],
                document_attention=data["document_attention"],
            ),
            training=TrainingSection(seed=training["seed"]),
        )
        return open_pack(config, verify=False)

    @property
    def tokenizers(self) -> list[str]:
        """The folders that hold the run's tokenizer: what was given, or its final folder and the recorded path."""
        if self._tokenizer is not None:
            return [self._tokenizer]
        recorded = ((self.run.get("config") or {}).get("tokenizer") or {}).get("tokenizer_path")
        found = [str(self.folder / "final")] if (self.folder / "final" / "tokenizer.json").is_file() else []
        found += [recorded] if recorded and (Path(recorded) / "tokenizer.json").is_file() else []
        if not found:
            raise ConfigError(f"the tokenizer of {self.folder} is not at {recorded}. Say where: --tokenizer DIR.")
        return found

    def state(self, checkpoint: Path) -> dict[str, Any]:
        """The trainer_state.json of a checkpoint."""
        state: dict[str, Any] = read_record(checkpoint / "trainer_state.json", "eval_loss")
        return state

    @cached_property
    def evaluated_checkpoint(self) -> Path | None:
        """The checkpoint that was asked for, or the newest one; only if its update was evaluated."""
        candidates = [path for path in self.checkpoints if self.step in (None, step_of(path))]
        return next((path for path in reversed(candidates) if self.state(path)["eval_loss"] is not None), None)


@rule("checkpoints", "a file was damaged on its way, or written by something else than the run")
def checkpoints(run: MovedRun) -> Finding:
    """Every checkpoint has the bytes that its manifest names, and the last one the manifest that DONE.json names."""
    faults = [f"{path.name}: {fault}" for path in run.checkpoints if (fault := checkpoint_fault(path))]
    if run.done is not None:
        last = run.folder / run.done["last_checkpoint"] / MANIFEST
        if not last.is_file() or sha256_of_file(last) != run.done["last_checkpoint_manifest_sha256"]:
            faults.append(f"{run.done['last_checkpoint']}: its {MANIFEST} is not the one that {DONE_FILE} names")
    return Finding(not faults, "; ".join(faults) or f"{len(run.checkpoints)} whole", "every file as its manifest says")


@rule("final", "the model was changed after the run, or is not its own")
def final(run: MovedRun) -> Finding:
    """The final folder has the files that DONE.json names."""
    if run.done is None:
        return Finding(True, "the run is not finished", "")
    recorded = run.done["final_files_sha256"]
    there = files_sha256(run.folder / "final") if (run.folder / "final").is_dir() else {}
    changed = [name for name in sorted(recorded.keys() | there.keys()) if recorded.get(name) != there.get(name)]
    value = f"final/{', final/'.join(changed)} differ" if changed else f"{len(recorded)} files equal"
    return Finding(not changed, value, f"as {DONE_FILE} says")


@rule("seed", "run.json was edited: another seed is another run", needs=("checkpoints",))
def seed(run: MovedRun) -> Finding:
    """The seed of run.json, in what the run is and in its configuration, is the one that the checkpoints carry."""
    carried = {run.state(path)["seed"] for path in run.checkpoints}
    said = {run.identity["training"]["seed"]}
    if run.run.get("config"):
        said.add(run.run["config"]["training"]["seed"])
    return Finding(said == carried and len(said) == 1, _listed(said), f"{_listed(carried)}, as the checkpoints say")


@rule("identity", "run.json was edited, or the checkpoints are of another run", needs=("checkpoints",))
def identity(run: MovedRun) -> Finding:
    """Every checkpoint was saved by the run that run.json describes."""
    own = sha256_of_json(run.identity)
    foreign = [path.name for path in run.checkpoints if run.state(path)["identity_sha256"] != own]
    return Finding(not foreign, f"not of this run.json: {', '.join(foreign)}" if foreign else own[:12], "one run")


@rule("tokenizer", "the text would become other ids than the model was trained on")
def tokenizer(run: MovedRun) -> Finding:
    """Vocabulary, merges, split and special tokens are the recorded ones."""
    recorded = run.identity["data"]["tokenizer_sha256"]
    found = {path: tokenizer_sha256(load_tokenizer(path)) for path in run.tokenizers}
    wrong = [f"{path} has {digest[:12]}" for path, digest in found.items() if digest != recorded]
    return Finding(not wrong, "; ".join(wrong) or recorded[:12], recorded[:12])


@rule("shards", "the text that the run reads is damaged or is not that of the run")
def shards(run: MovedRun) -> Finding:
    """Every shard has the recorded bytes; a pack that was prepared again may have another manifest only."""
    recorded, pack = run.identity["data"], run.shards
    again = "" if pack.manifest_sha256 == recorded["manifest_sha256"] else ", prepared again"
    same, count = pack.shards_sha256 == recorded["shards_sha256"], len(pack.train) + len(pack.validation)
    value = f"{count} files{again}, {pack.shards_sha256[:12]}"
    return Finding(same, value, recorded["shards_sha256"][:12])


@rule("documents", "a source has more or less text than when the run was started", needs=("shards",))
def documents(run: MovedRun) -> Finding:
    """As many documents of each split as were recorded."""
    recorded = run.identity["data"]["documents"]
    return Finding(run.shards.documents == recorded, _counts(run.shards.documents), _counts(recorded))


@rule("windows", "the order of windows is another one: another seed, length, pack or version", ("tokenizer", "shards"))
def windows(run: MovedRun) -> Finding:
    """The recorded windows of chosen updates hold the same ids and decode to the same bytes."""
    recorded = run.run["facts"]["inputs"]["updates"]
    wrong = []
    for entry in recorded:
        found = hashed_windows(run.pack.train, entry["windows"], run.pack.tokenizer)
        kinds = [kind for kind in ("ids", "text") if found[f"{kind}_sha256"] != entry[f"{kind}_sha256"]]
        wrong += [f"update {entry['update'] + 1:,}: other {' and '.join(kinds)}"] if kinds else []
    count = sum(len(entry["windows"]) for entry in recorded)
    numbers = ", ".join(f"{entry['update'] + 1:,}" for entry in recorded)
    return Finding(not wrong, "; ".join(wrong) or f"{count} windows equal", f"those of updates {numbers}")


@rule("evaluation input", "validation would be over another text", ("tokenizer", "shards"))
def evaluation_input(run: MovedRun) -> Finding:
    """The windows that every validation reads are the recorded ones."""
    recorded = run.run["facts"]["inputs"]["evaluation"]
    found = evaluated(run.pack.validation, run.identity["training"]["eval_tokens"])
    value, expected = (f"{each['windows']:,} windows, {each['ids_sha256'][:12]}" for each in (found, recorded))
    return Finding(found == recorded, value, expected)


@rule("validation loss", "the model computes something else here", ("checkpoints", "identity", "evaluation input"))
def validation_loss(run: MovedRun) -> Finding:
    """The validation loss of a checkpoint, computed again: the same bits where nothing that decides them differs."""
    checkpoint = run.evaluated_checkpoint
    if checkpoint is None:
        value = (
            f"{f'update {run.step:,}' if run.step else 'no checkpoint'} was not evaluated: there is no loss to repeat"
        )
        return Finding(False, value, "a checkpoint of an evaluated update (eval_steps, --checkpoint N)")
    execution, training = run.run["execution"], run.identity["training"]
    kind = execution["device"]
    gone = kind == "xla" or (kind == "cuda" and not torch.cuda.is_available())
    device = torch.device("cpu" if gone else kind)
    threads = torch.get_num_threads()
    torch.set_num_threads(execution["cpu_threads"] or threads)
    try:
        reasons = differences_in_bits(run, device)
        model = load_model(checkpoint, execution["attn_implementation"]).to(device)  # type: ignore[arg-type]
        dtype = torch.bfloat16 if training["bf16"] else torch.float16
        rounded = training["bf16"] or (training["fp16"] and device.type == "cuda")
        with torch.autocast(device.type, dtype, enabled=bool(rounded)):
            found = validate(
                _OneProcess(device), model, run.pack.validation, training["eval_tokens"],
                execution["per_device_eval_batch_size"],
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert found is not None, "nothing asks this evaluation to stop"
    recorded = run.state(checkpoint)["eval_loss"]
    few_bits = training["bf16"] or training["fp16"] or execution["tf32"]
    tolerance = (ROUNDED_TOLERANCE if few_bits else TOLERANCE) if reasons else 0.0
    expected = f"{recorded!r}, {f'within {tolerance:g}' if reasons else 'exactly'}"
    value = f"{found['loss']!r} ({checkpoint.name})"
    return Finding(abs(found["loss"] - recorded) <= tolerance, value, expected, tuple(reasons))


def differences_in_bits(run: MovedRun, device: torch.device) -> list[str]:
    """What decides the last bits of a loss and differs from the recorded run; empty when it must be equal."""
    execution = run.run["execution"]
    here = {
        **execution,
        "device": device.type,
        "device_name": device_name(device),
        "torch": torch.__version__,
        "cpu_threads": torch.get_num_threads() if device.type == "cpu" else None,
    }
    found = difference({name: execution[name] for name in _SAME_BITS}, {name: here[name] for name in _SAME_BITS})
    if execution["processes"] > 1:
        found.append(f"processes: {execution['processes']} -> 1")
    if execution["torch_compile"]:
        found.append("torch_compile: True -> False")
    return found


@rule("packages", "other versions may compute other bits, or read a file in another way")
def packages(run: MovedRun) -> Finding:
    """What is installed here beside what the run was started with; a difference is told, and is no failure."""
    git = ("git_commit", "git_dirty", "git_diff")
    recorded, here = (
        {name: value for name, value in each.items() if name not in git}
        for each in (run.run["environment"], environment())
    )
    changed = difference(recorded, here)
    return Finding(True, f"{len(changed)} differ" if changed else "all equal", "", tuple(changed))


RULES = (
    *(checkpoints, final, seed, identity, tokenizer, shards, documents, windows, evaluation_input, validation_loss),
    packages,
)


def verify_run(run: MovedRun) -> list[Check]:
    """Run every check and append the outcome to the run's events.jsonl, unless its folder may not be written to.

    Raises:
        ContractError: the run is being written.
    """
    if not may_be_written(run.folder):  # an archive: nothing to lock, and the outcome cannot be kept
        return run_rules(RULES, run)
    lock = FileLock(run.folder / LOCK, run.folder, "a copy of it")
    trace = lock.acquire()
    try:
        checks = run_rules(RULES, run)
        _record(run, checks)
    finally:
        lock.release(trace)
    return checks


def may_be_written(folder: Path) -> bool:
    """Whether this user may write to a folder: not on a read-only disk."""
    return os.access(folder, os.W_OK)


def _record(run: MovedRun, checks: Sequence[Check]) -> None:
    checkpoint = run.checkpoints[-1] if run.step is None else run.folder / f"checkpoint-{run.step:08d}"
    events = Events(run.folder / EVENTS)
    events.add(
        "verified",
        step_of(checkpoint),
        ok=_passed(checks),
        checks={check.name: check.ok if check.ok is None else bool(check.ok) for check in checks},
        failures={check.name: check.value for check in checks if check.ok is False},
        shards=str(run.shards_path.resolve()),
    )


def _passed(checks: Sequence[Check]) -> bool:
    return all(check.ok for check in checks)


def _listed(values: set[Any]) -> str:
    return " and ".join(map(str, sorted(values)))


def _counts(documents: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in documents.items())
