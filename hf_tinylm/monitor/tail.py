"""A run in the terminal: once, or followed until it is finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .events import TROUBLE, clock, duration, in_words, size
from .follow import number
from .hardware import hardware_lines, hardware_state
from .run import RATE_ROWS, Run

LAST_ROWS = 8
LAST_EVENTS = 6
_HEAD = f"{'update':>10}  {'tokens':>15}  {'loss':>8}  {'rate':>9}  {'norm':>8}  {'tokens/s':>9}"


def open_run(folder: Path) -> Run:
    """A run of which only the last rows are kept in memory."""
    return Run(folder, keep=RATE_ROWS)


def state_of(run: Run, now: float | None = None) -> dict[str, Any]:
    """What `tail` shows, as plain JSON values; what is not known is None."""
    now = time.time() if now is None else now
    planned, left = run.planned_tokens, run.seconds_left()
    status = run.status(now)
    last = run.evaluations[-1] if run.evaluations else None
    return {
        "run": run.name,
        "folder": str(run.folder),
        "status": status,
        "silent_seconds": round(run.silent_seconds(now), 1),
        "updates": run.step,
        "planned_updates": None if run.planned_updates is None else int(run.planned_updates),
        "supervised_tokens": int(run.tokens),
        "train_tokens": None if planned is None else int(planned),
        "percent": 100 * run.tokens / planned if planned else None,
        "tokens_per_second": run.tokens_per_second(),
        "seconds_left": left,
        "expected_end": clock(now + left) if status == "running" and left is not None else None,
        "wall_seconds": run.wall_seconds,
        "cost": run.cost,
        "invocations": len(run.invocations()),
        "last_rows": run.updates[-LAST_ROWS:],
        "last_evaluation": last,
        "hardware": hardware_state(run.hardware, number(run.fact("config", "training"), "price_per_kwh"), now),
        "checkpoints": run.checkpoints(),
        "events": [
            {"time": number(e, "time"), "step": e.get("step"), "words": in_words(e)} for e in run.events[-LAST_EVENTS:]
        ],
        "warnings": sum(event.get("event") in TROUBLE for event in run.events),
        "missing": run.missing,
    }


def state_lines(state: dict[str, Any]) -> list[str]:
    """`state_of` for people."""
    of = "" if state["planned_updates"] is None else f" of {state['planned_updates']:,}"
    of_tokens = "" if state["train_tokens"] is None else f" of {state['train_tokens']:,}"
    percent = "" if state["percent"] is None else f", {state['percent']:.1f}%"
    silent = f", nothing written for {duration(state['silent_seconds'])}" if state["status"] == "silent" else ""
    starts = f" in {state['invocations']:,} invocations" if state["invocations"] > 1 else ""
    cost = "" if state["cost"] is None else f", cost {state['cost']:.2f}"
    lines = [
        f"{state['run']}: {state['status']}{silent}",
        f"progress      update {state['updates']:,}{of}, {state['supervised_tokens']:,}{of_tokens} tokens{percent}",
        f"time          {duration(state['wall_seconds'])}{starts}{cost}; {_speed(state)}",
    ]
    if state["last_rows"]:
        lines += ["", _HEAD, *(row_line(row) for row in state["last_rows"]), ""]
    lines.append(f"validation    {_evaluation(state['last_evaluation'])}")
    lines += [f"hardware      {words}" for words in hardware_lines(state["hardware"])]
    lines += [
        f"checkpoint    {one['name']}, {size(one['bytes'])}{'' if one['whole'] else ', not whole: it has no manifest'}"
        for one in state["checkpoints"]
    ] or ["checkpoint    none yet"]
    lines += [f"{clock(event['time'])}  {_at(event)}{event['words']}" for event in state["events"]]
    lines += [f"notice        {words}" for words in state["missing"]]
    return [printable(line) for line in lines]


def row_line(row: dict[str, Any]) -> str:
    """An update as a line of the table."""
    shown = (
        ("step", 10, ",.0f"),
        ("supervised_tokens", 15, ",.0f"),
        ("loss", 8, ".4f"),
        ("learning_rate", 9, ".3g"),
        ("grad_norm", 8, ".3f"),
        ("tokens_per_second", 9, ",.0f"),
    )
    cells = [(number(row, key), width, form) for key, width, form in shown]
    line = "  ".join(f"{'-' if value is None else format(value, form):>{width}}" for value, width, form in cells)
    return line + ("  clipped" if row.get("clipped") is True else "")


def follow(run: Run, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep) -> None:
    """Say what is new every second until the run is finished: the newest update, validations, events, dropped rows."""
    for line in state_lines(state_of(run)):
        say(line)
    silent = run.status() == "silent"
    while not run.finished:
        pause(1.0)
        step, evaluations, events = run.step, len(run.evaluations), len(run.events)
        resumed = run.refresh()
        if resumed:
            say(f"the rows went back from update {step:,} to {run.step:,}: the run was resumed")
            evaluations = min(evaluations, len(run.evaluations))
        for event in run.events[events:] if events <= len(run.events) else run.events:
            say(printable(f"{clock(number(event, 'time'))}  {_at(event)}{in_words(event)}"))
        for row in run.evaluations[evaluations:]:
            say(f"validation    {_evaluation(row)}")
        if run.step != step and not resumed:
            say(f"{row_line(run.updates[-1])}  {_speed(state_of(run))}")
        if (run.status() == "silent") is not silent:
            silent = not silent
            say(f"nothing was written for {duration(run.silent_seconds())}" if silent else "the run writes again")


def printable(line: str) -> str:
    """`line` without characters that steer a terminal: text of a run may hold any."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _at(event: dict[str, Any]) -> str:
    step = number(event, "step")
    return "" if step is None else f"update {step:,.0f}: "


def _evaluation(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none yet"
    step, loss, bits = number(row, "step") or 0, number(row, "eval_loss"), number(row, "bits_per_byte")
    others = row.get("eval_sets")
    told = "".join(
        f"; {name} {value:.4f}"
        for name, one in (others.items() if isinstance(others, dict) else ())
        if (value := number(one, "eval_loss")) is not None
    )
    return f"{loss:.4f} at update {step:,.0f}" + ("" if bits is None else f", {bits:.4f} bits per byte") + told


def _speed(state: dict[str, Any]) -> str:
    rate, left = state["tokens_per_second"], state["seconds_left"]
    words = "tokens/s unknown" if rate is None else f"{rate:,.0f} tokens/s"
    if state["status"] == "finished":
        return words
    words += f", {duration(left)} left" if left is not None else ", time left unknown"
    return words + (f", until {state['expected_end']}" if state["expected_end"] else "")
