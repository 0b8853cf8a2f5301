"""Planned against measured: what `hf-tinylm plan` says of the run's own configuration, beside what it took."""

from __future__ import annotations

from typing import Any

from ..config import load_config
from ..contract import RUN_FILE
from ..errors import ConfigError
from ..planning.speed import Assumptions
from ..planning.whole import make_plan
from .events import duration, size
from .follow import number
from .hardware import cards_of
from .html import Html, missing, section, table
from .parts import form, share, whole
from .run import Run


def planned_and_measured(run: Run) -> Html:
    """Tokens, updates, hours, money, memory and disk."""
    plan, words = _plan(run)
    price = number(run.fact("config", "training"), "price_per_hour")
    hours = None if run.wall_seconds is None else run.wall_seconds / 3600
    updates = run.planned_updates
    memory = "peak_memory_on_cpu_bytes" if run.fact("execution", "device") == "cpu" else "peak_memory_on_gpu_bytes"
    expected, cost = number(plan, "hours_end_to_end"), number(plan, "cost_end_to_end")
    rate = number(plan, "tokens_per_second_end_to_end")
    kept = sum(one["bytes"] for one in run.checkpoints())
    rows: list[tuple[Any, ...]] = [
        ("tokens (supervised)", whole(run.planned_tokens), whole(run.tokens), share(run.tokens, run.planned_tokens)),
        ("updates", whole(updates), whole(run.step), share(run.step, updates)),
        ("hours, all invocations", form(expected, ".3f"), form(hours, ".3f"), share(hours, expected)),
        ("money", form(cost, ".2f"), form(run.cost, ".2f"), None if price is None else f"{price:g} per hour"),
        ("tokens/s, saves and evaluations included", form(rate, ",.0f"), form(run.tokens_per_second(), ",.0f"), None),
        ("memory at the peak, a process", _bytes(plan, memory), _peak(run), None),
        ("checkpoints on disk", _bytes(plan, "rotation_bytes"), size(kept), "planned with one being written"),
    ]
    if run.status() != "finished":
        rows.append(("time left at the present rate", None, duration(run.seconds_left()), None))
    return section("Planned and measured", table(("", "planned", "measured", ""), rows), missing(words))


def _plan(run: Run) -> tuple[dict[str, Any], str]:
    """The plan of the configuration that run.json keeps, and where it comes from."""
    if not isinstance(run.fact("config"), dict):
        return {}, "run.json keeps no configuration, so hours, money and memory have no plan."
    rate = number(run.fact("facts"), "expected_tokens_per_second")
    asked = Assumptions(
        tokens=None if run.planned_tokens is None else int(run.planned_tokens),
        num_processes=int(number(run.fact("execution"), "processes") or 1),
        tokens_per_second=rate,
    )
    try:
        plan = make_plan(load_config(str(run.folder / RUN_FILE)), asked)
    except ConfigError as error:  # of a version with other keys
        return {}, f"The configuration in run.json cannot be planned by this version: {error}"
    if rate is None:
        return plan, "Hours and money have no plan: no speed was measured before the run (preflight does it)."
    return plan, f"Planned hours follow from the {rate:,.0f} tokens/s that preflight measured before the first update."


def _bytes(plan: dict[str, Any], key: str) -> str | None:
    found = number(plan, key)
    return None if found is None else size(found)


def _peak(run: Run) -> str | None:
    """The highest memory of a GPU that a sample tells."""
    cards = [card for row in run.hardware for card in cards_of(row)]
    told = [used for card in cards if (used := number(card, "memory_used_bytes")) is not None]
    return size(max(told)) if told else None
