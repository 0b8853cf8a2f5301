"""What preflight found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .checks import Check, none_failed

MARKS = {True: "ok", False: "FAIL", None: "--"}


def report_json(checks: Sequence[Check]) -> dict[str, Any]:
    """`{ok, seconds, checks: [{name, ok, value, expected, meaning, seconds, detail}]}`."""
    return {
        "ok": none_failed(checks),
        "seconds": round(sum(check.seconds for check in checks), 3),
        "checks": [check.to_json() for check in checks],
    }


def report_lines(checks: Sequence[Check], title: str = "preflight") -> list[str]:
    """A table, under each failure what it usually means, and the details of what passed."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        expected = f"   (expected: {check.expected})" if check.expected != "" else ""
        lines.append(f"{MARKS[check.ok]:<5} {check.name:<{width}}  {check.value}{expected}")
        if check.ok is False:
            lines.append(f"      {'':<{width}}  usually: {check.meaning}")
    for check in checks:
        if check.detail:
            lines += ["", f"{check.name}:", *(f"  {line}" for line in check.detail)]
    return [*lines, "", summary(checks, title)]


def summary(checks: Sequence[Check], title: str = "preflight") -> str:
    """One line: how many passed, and which did not."""
    failed = [check.name for check in checks if check.ok is False]
    skipped = sum(check.ok is None for check in checks)
    seconds = sum(check.seconds for check in checks)
    if not failed:
        others = f"; {skipped} do not apply" if skipped else ""
        return f"{title}: all {len(checks) - skipped} checks passed in {seconds:.1f} s{others}"
    rest = f"; {skipped} were not run" if skipped else ""
    return f"{title}: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}{rest}"


def plot(values: Sequence[float], title: str, width: int = 60, height: int = 8) -> tuple[str, ...]:
    """A curve in text, from the first value on the left to the last on the right, from 0 to the highest."""
    top = max(values) or 1.0
    columns = [values[round(place * (len(values) - 1) / (width - 1))] for place in range(width)]
    levels = [min(height - 1, int(value / top * height)) for value in columns]
    rows = ["".join("*" if level == row else " " for level in levels) for row in reversed(range(height))]
    scale = [f"{top:9.3g} |", *([" " * 9 + " |"] * (height - 2)), f"{0:9d} |"]
    return (title, *(f"{left}{row}" for left, row in zip(scale, rows, strict=True)))
