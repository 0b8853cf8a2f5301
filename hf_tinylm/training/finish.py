"""The last words of a run: what a card says of it, and `DONE.json`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from ..contract import DONE_FILE
from ..files import sha256_of_file, write_json
from .checkpoint import MANIFEST, checkpoint_folder
from .trainer import LMTrainer


def run_summary(trainer: LMTrainer) -> dict[str, str]:
    """What a model card says of the run: size, tokens, updates, and the last validation."""
    shape = trainer.model.config.shape
    found = {
        "parameters": f"{shape.parameters:,}",
        "context": f"{trainer.model.config.max_position_embeddings:,} tokens",
        "training tokens (supervised)": f"{trainer.supervised_tokens:,}",
        "updates": f"{trainer.state.global_step:,} of {_sizes(trainer)} tokens",
        "passes over the training windows": f"{trainer.state.epoch or 0:.3f}",
        **_cost(trainer),
    }
    last = last_evaluation(trainer)
    if last is not None:
        found["evaluated"] = "validation split of the training data only, unless a table below says more"
        found["validation loss"] = f"{last['eval_loss']:.4f} nats per token over {last['eval_tokens']:,} tokens"
        if "bits_per_byte" in last:
            found["validation bits per byte"] = f"{last['bits_per_byte']:.4f}"
        for name, one in last.get("eval_sets", {}).items():
            found[f"validation loss on {name}"] = f"{one['eval_loss']:.4f} over {one['eval_tokens']:,.0f} tokens"
    return found


def _sizes(trainer: LMTrainer) -> str:
    first, last = trainer.plan.stages[0], trainer.plan.stages[-1]
    sizes = dict.fromkeys((first.batch_tokens, last.batch_tokens))
    return " to ".join(f"{size:,}" for size in sizes)


def last_evaluation(trainer: LMTrainer) -> dict[str, Any] | None:
    """The last row of metrics.jsonl that is an evaluation; None when there was none."""
    return next((row for row in reversed(trainer.record.metrics.rows()) if "eval_loss" in row), None)


def _cost(trainer: LMTrainer) -> dict[str, str]:
    """Hardware, time and arithmetic of all invocations."""
    clocks = trainer.record.clocks.report(trainer.supervised_tokens, trainer.args.price_per_hour)
    device = trainer.args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    return {
        "hardware": f"{trainer.args.world_size} x {name}, {'bf16' if trainer.args.bf16 else 'fp32'} matrix products",
        "time": f"{clocks['wall_seconds'] / 3600:.2f} hours in {clocks['invocations']:,} invocations",
        "training FLOPs (with attention)": f"{clocks['flops']:.3e}",
    }


def files_sha256(final: Path) -> dict[str, str]:
    """SHA-256 of each file of a final folder but its card, which evaluations add to."""
    return {path.name: sha256_of_file(path) for path in sorted(final.iterdir()) if path.name != "README.md"}


def write_done(trainer: LMTrainer, final: Path) -> dict[str, Any]:
    """Write `DONE.json`, the last file of a run: what was trained, and hashes of its weights and last checkpoint."""
    manifest = checkpoint_folder(trainer.output_dir, trainer.state.global_step) / MANIFEST
    done = {
        "updates": trainer.state.global_step,
        "supervised_tokens": trainer.supervised_tokens,
        "final_weights_sha256": {path.name: sha256_of_file(path) for path in sorted(final.glob("*.safetensors"))},
        "final_files_sha256": files_sha256(final),
        "last_evaluation": last_evaluation(trainer),
        "last_checkpoint": manifest.parent.name,
        "last_checkpoint_manifest_sha256": sha256_of_file(manifest),
        "clocks": trainer.record.clocks.report(trainer.supervised_tokens, trainer.args.price_per_hour),
    }
    wall = round(trainer.record.clocks.wall_seconds, 6)
    trainer.record.events.add(
        "finished", trainer.state.global_step, supervised_tokens=trainer.supervised_tokens, wall_seconds=wall
    )
    write_json(trainer.output_dir / DONE_FILE, done)
    trainer.record.mirror.finish()
    return done
