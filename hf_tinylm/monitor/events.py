"""The events of a run: their kinds, the fields of each, and how they are told in words."""

from __future__ import annotations

import time
from typing import Any

from .follow import number

STARTS = ("started", "resumed")
TROUBLE = ("warned", "nonfinite", "interrupted")

_THROWN_AWAY = {
    **{"dropped_rows": "integer", "thrown_away_updates": "integer", "thrown_away_flops": "integer"},
    "wall_seconds": "number",
}
# Every kind of event and the type of each of its fields, beside `time` (seconds since 1970), `event` and `step`.
# Not every event has all of them. docs/monitoring.md has the same table.
EVENT_FIELDS: dict[str, dict[str, str]] = {
    "started": {
        **{"updates": "integer", "train_tokens": "integer", "dropped_ids": "integer or null"},
        **{"branch_from": "text or null", "init_from": "text or null", "inherited_tokens": "integer or null"},
        **{"init_weights_sha256": "text", "moments": "text", "changed": "list of text", **_THROWN_AWAY},
    },
    "resumed": {"checkpoint": "text", "changed": "list of text", **_THROWN_AWAY},
    "saved": {
        **{"checkpoint": "text", "bytes": "integer", "bytes_per_parameter": "number", "stall_seconds": "number"},
        **{"write_seconds": "number", "removed": "list of text"},
    },
    "evaluated": {"eval_loss": "number", "wall_seconds": "number"},
    "sampled": {"samples": "list of objects"},
    "warned": {"reason": "text", "finding": "text", "meaning": "text", "next_step": "text"},
    "nonfinite": {
        **{"action": "text", "windows": "list of integers", "loss": "number or null", "grad_norm": "number or null"},
        **{"excerpt": "text or null", "places": "list or null"},
    },
    "interrupted": {"reason": "text", "wall_seconds": "number"},
    "finished": {"supervised_tokens": "integer", "wall_seconds": "number"},
    "verified": {"ok": "truth value", "checks": "object", "failures": "object", "shards": "text"},
}


def in_words(event: dict[str, Any]) -> str:
    """One line on an event, without its time; an event that is not known is told key by key."""
    kind = str(event.get("event", "event"))
    say = _WORDS.get(kind)
    if say is None:
        facts = ", ".join(f"{key}={value}" for key, value in event.items() if key not in ("time", "event", "step"))
        return f"{kind}{f': {facts}' if facts else ''}"
    return f"{say(event)}"


def clock(seconds: float | None) -> str:
    """A time since 1970 as a date and a time of day in UTC."""
    if seconds is None or not 0 <= seconds < 1e11:
        return "time unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float | None) -> str:
    """Seconds as days, hours and minutes: `2 d 3 h`, `1 h 04 min`, `3 min 20 s`, `12.3 s`."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1_440} d {minutes % 1_440 // 60} h"


def size(count: float | None) -> str:
    """Bytes in decimal units."""
    if count is None:
        return "size unknown"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} bytes"


def _count(event: dict[str, Any], key: str) -> str:
    value = number(event, key)
    return "an unknown number of" if value is None else f"{value:,.0f}"


def _started(event: dict[str, Any]) -> str:
    of = f"started: {_count(event, 'updates')} updates, {_count(event, 'train_tokens')} tokens{_dropped(event)}"
    if event.get("init_from") is None:
        return of
    tokens, digest = number(event, "inherited_tokens"), str(event.get("init_weights_sha256"))
    after = "" if tokens is None else f" after {tokens:,.0f} tokens"
    kept = f"weights kept ({digest[:12]}), moments {event.get('moments', 'unknown')}"
    return f"{of}; from {event['init_from']}{after}, {kept}{_changed(event)}"


def _changed(event: dict[str, Any]) -> str:
    changed = event.get("changed")
    return f"; changed: {'; '.join(map(str, changed))}" if isinstance(changed, list) and changed else ""


def _resumed(event: dict[str, Any]) -> str:
    return f"resumed from {event.get('checkpoint', 'a checkpoint')}{_dropped(event)}{_changed(event)}"


def _dropped(event: dict[str, Any]) -> str:
    updates = number(event, "thrown_away_updates")
    return f", {updates:,.0f} updates beyond it thrown away" if updates else ""


def _saved(event: dict[str, Any]) -> str:
    write = number(event, "write_seconds")
    write = number(event, "seconds") if write is None else write  # as the first version named it
    stall = number(event, "stall_seconds")
    held = "" if stall is None else f", training held up {stall:.2f} s"
    removed = event.get("removed")
    gone = f"; removed {', '.join(map(str, removed))}" if isinstance(removed, list) and removed else ""
    weight = number(event, "bytes")
    of = "" if weight is None else f", {size(weight)}"
    return f"saved {event.get('checkpoint', 'a checkpoint')}{of}, written in {duration(write)}{held}{gone}"


def _evaluated(event: dict[str, Any]) -> str:
    loss = number(event, "eval_loss")
    return "validation" if loss is None else f"validation loss {loss:.4f}"


def _sampled(event: dict[str, Any]) -> str:
    samples = event.get("samples")
    return f"samples of {len(samples):,} prompts" if isinstance(samples, list) else "samples"


def _interrupted(event: dict[str, Any]) -> str:
    return f"ended before its last update: {event.get('reason', 'no reason recorded')}; the state was saved"


def _warned(event: dict[str, Any]) -> str:
    return f"warning: {event.get('reason', 'no reason recorded')}"


def _nonfinite(event: dict[str, Any]) -> str:
    windows = event.get("windows")
    where = f"; windows {', '.join(map(str, windows[:8]))}" if isinstance(windows, list) and windows else ""
    done = "its batch was skipped" if event.get("action") == "skipped" else "the run stopped"
    step = number(event, "step")
    after = "" if step is None else f" of update {step + 1:,.0f}"
    return f"loss or gradient{after} not finite, nothing of it applied: {done}{where}"


def _finished(event: dict[str, Any]) -> str:
    return f"finished: {_count(event, 'supervised_tokens')} tokens"


def _verified(event: dict[str, Any]) -> str:
    failures = event.get("failures")
    failed = ", ".join(map(str, failures)) if isinstance(failures, dict) else ""
    return f"verify-run: {f'failed: {failed}' if failed else 'the folder, shards and loss are those of the run'}"


_WORDS = {
    "started": _started,
    "resumed": _resumed,
    "saved": _saved,
    "evaluated": _evaluated,
    "sampled": _sampled,
    "interrupted": _interrupted,
    "warned": _warned,
    "nonfinite": _nonfinite,
    "finished": _finished,
    "verified": _verified,
}
