"""Checkpoints that are whole or absent: safetensors and JSON, one manifest of SHA-256, one rename.

checkpoint-00000500/  config.json  model.safetensors  optimizer.safetensors  trainer_state.json
                      rng-00000.safetensors (one per process)  manifest.json (written last)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..contract import MANIFEST, is_checkpoint, list_checkpoints, step_of
from ..errors import CheckpointError, DataError
from ..files import TEMPORARY_PREFIX, atomic_folder, read_json, sha256_of_file, write_json


@dataclass
class Snapshot:
    """Everything that a resume needs, on the host. `random_states` has one entry per process, in rank order."""

    step: int
    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    random_states: list[dict[str, torch.Tensor]]
    trainer_state: dict[str, Any]


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    """`OUT/checkpoint-00000500`."""
    return output_dir / f"checkpoint-{step:08d}"


def write_checkpoint(output_dir: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint under a temporary name, force it to disk, and rename it into place.

    A checkpoint of the same step is replaced. On any failure the temporary folder is removed and older checkpoints
    are as they were.
    """
    target = checkpoint_folder(output_dir, snapshot.step)
    with atomic_folder(target, replace=True) as folder:
        (folder / "config.json").write_text(json.dumps(snapshot.config, indent=2) + "\n", encoding="utf-8")
        save_file(snapshot.weights, folder / "model.safetensors", metadata={"format": "pt"})
        save_file(snapshot.optimizer, folder / "optimizer.safetensors")
        for rank, state in enumerate(snapshot.random_states):
            save_file(state, folder / f"rng-{rank:05d}.safetensors")
        write_json(folder / "trainer_state.json", snapshot.trainer_state)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}
            for path in sorted(folder.iterdir())
        }
        write_json(folder / MANIFEST, {"step": snapshot.step, "files": files})
    return target


def checkpoint_fault(folder: Path) -> str | None:
    """Why `folder` is not a whole checkpoint, or None when every file has the manifest's size and SHA-256."""
    if not folder.is_dir():
        return "it does not exist"
    if not (folder / MANIFEST).is_file():
        return f"it has no {MANIFEST}, so its saving was not finished"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        step, files = int(manifest["step"]), manifest["files"]
        expected = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} is damaged ({error})"
    if is_checkpoint(folder) and step != step_of(folder):
        return f"its {MANIFEST} is of update {step:,}"
    for name, (size, digest) in expected.items():
        fault = _file_fault(folder / name, size, digest)
        if fault:
            return fault
    for needed in ("config.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json"):
        if needed not in expected:
            return f"{needed} is not in its manifest"
    return None


def _file_fault(path: Path, size: int, digest: str) -> str | None:
    """How a file differs from what the manifest says of it, or None."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size:,} bytes instead of {size:,}"
    try:
        found = sha256_of_file(path)
    except OSError as error:  # a disk that fails is one more way to be damaged
        return f"{path.name} cannot be read ({error})"
    return None if found == digest else f"the SHA-256 of {path.name} differs from the manifest"


def select_checkpoint(
    output_dir: Path, asked: str, nearby: Callable[[Path], Path] = Path
) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and a line on each that was passed over.

    Args:
        asked: `auto` (the newest whole one, or None when there is none) or a checkpoint folder.
        nearby: gives the copy of a checkpoint that is read, or raises `DataError` when its source is damaged.

    Raises:
        CheckpointError: a folder was named and is not a whole checkpoint.
    """
    if asked != "auto":
        fault = _fault_nearby(Path(asked), nearby)
        if fault:
            raise CheckpointError(
                f"{asked} cannot be resumed from: {fault}. "
                "Name another checkpoint, or use resume_from_checkpoint: auto."
            )
        return Path(asked), []
    passed_over: list[str] = []
    for folder in reversed(list_checkpoints(output_dir)):
        fault = _fault_nearby(folder, nearby)
        if fault is None:
            return folder, passed_over
        passed_over.append(f"{folder.name} was passed over: {fault}")
    return None, passed_over


def _fault_nearby(folder: Path, nearby: Callable[[Path], Path]) -> str | None:
    """`checkpoint_fault` of the copy that is read."""
    if not (folder / MANIFEST).is_file():
        return checkpoint_fault(folder)
    try:
        return checkpoint_fault(nearby(folder))
    except DataError as error:
        return str(error)


def last_good(output_dir: Path) -> str:
    """A sentence for the error of a write that failed: the newest whole checkpoint, every file of it verified."""
    folder, _ = select_checkpoint(output_dir, "auto")
    return f"{folder.name} is the last good checkpoint." if folder else "There is no good checkpoint yet."


def set_aside_newer(output_dir: Path, step: int) -> list[str]:
    """Rename the checkpoints beyond `step`, the one that a run goes on from; one line on each.

    They are damaged, or the user went back behind them. Left in place, rotation would count them among the newest and
    remove good ones, and the next start would leap to them over rows that this resume drops.
    """
    lines = []
    for folder in list_checkpoints(output_dir):
        if step_of(folder) <= step:
            continue
        number, target = 1, folder.with_name(f"set-aside-{folder.name}")
        while target.exists():
            number += 1
            target = folder.with_name(f"set-aside-{folder.name}-{number}")
        folder.rename(target)
        lines.append(f"{folder.name} lies beyond update {step:,}, where this run goes on; it is now {target.name}")
    return lines


def read_checkpoint(folder: Path) -> Snapshot:
    """Load a checkpoint that `checkpoint_fault` found whole.

    Raises:
        CheckpointError: a file cannot be read after all.
    """
    try:
        state = read_json(folder / "trainer_state.json")
        return Snapshot(
            step=int(state["step"]),
            config=read_json(folder / "config.json"),
            weights=load_file(folder / "model.safetensors"),
            optimizer=load_file(folder / "optimizer.safetensors"),
            random_states=[load_file(path) for path in sorted(folder.glob("rng-*.safetensors"))],
            trainer_state=state,
        )
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read ({error}).") from error


def rotate_checkpoints(output_dir: Path, keep: int | None, milestone_steps: int | None = None) -> list[Path]:
    """Remove checkpoints beyond the newest `keep` (None: all stay), and what broken saves left; the folders removed.

    Order is by integer step. Multiples of `milestone_steps` stay, and so does the one with the lowest validation loss
    among those whose update was evaluated.
    """
    for leftover in output_dir.glob(f"{TEMPORARY_PREFIX}checkpoint-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folders = list_checkpoints(output_dir)
    if keep is None:
        return []
    best = best_checkpoint(folders)
    removed = []
    for folder in folders[: max(0, len(folders) - keep)]:
        milestone = milestone_steps is not None and step_of(folder) % milestone_steps == 0
        if milestone or folder == best:
            continue
        (folder / MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed folder never looks whole
        shutil.rmtree(folder)
        removed.append(folder)
    return removed


def best_checkpoint(folders: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss at its own update; the earliest of equals."""
    losses = []
    for folder in folders:
        if not (folder / MANIFEST).is_file():
            continue
        try:
            loss = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["eval_loss"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged checkpoint cannot be the best one
        if loss is not None:
            losses.append((float(loss), step_of(folder), folder))
    return min(losses)[2] if losses else None
