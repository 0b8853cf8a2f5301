"""What a run writes: checkpoints under rotation, the final model, exports, shards."""

from __future__ import annotations


def checkpoints_kept(
    updates: int, save_steps: int | None, save_minutes: float | None, limit: int | None, milestone_steps: int | None,
    evaluates: bool,
) -> int:  # fmt: skip
    """Checkpoints that stay: the newest `limit`, milestones, and the best one, but never more than are written.

    Args:
        save_steps: None: saves by the clock, or the last update's alone.
        save_minutes: with a limit, saves by the clock fill it whatever `save_steps` is.
        limit: None keeps all; then only those by `save_steps` can be counted beforehand.
        evaluates: the run evaluates, so that one checkpoint is the best.
    """
    saves = updates // save_steps + 1 if save_steps else 1
    if save_minutes is not None and limit is not None:
        saves = max(saves, limit)
    kept = saves if limit is None else min(limit, saves)
    kept += updates // milestone_steps if milestone_steps else 0
    return kept + (1 if evaluates and saves > kept else 0)


def id_bytes(vocab_size: int) -> int:
    """Bytes of one id in a shard: uint16 while every id fits, else uint32."""
    return 4 if vocab_size > 2**16 else 2


def targets_of(shard_ids: list[int], sequence_length: int) -> int:
    """Supervised targets of one epoch over shards of these many ids: whole windows that never cross a shard."""
    return sum(max(ids - 1, 0) // sequence_length for ids in shard_ids) * sequence_length
