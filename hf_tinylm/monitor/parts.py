"""Parts that the report of a run and its live page share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..files import read_json
from .diagnosis import Finding
from .events import TROUBLE, clock, duration, in_words, size
from .follow import column, number
from .hardware import hardware_lines, hardware_state
from .html import Html, element, missing, section, table
from .run import Run


def evaluations(run: Run) -> Html:
    """The last validation, by source where there are several, and the reports of `hf-tinylm eval`."""
    rows: list[tuple[Any, ...]] = []
    faults = []
    for path in sorted((run.folder / "eval").rglob("*.json")):
        of = path.parent.relative_to(run.folder / "eval")
        try:
            report = read_json(path)
            for name, found in report["results"].items():
                low, high = found.get("interval") or (None, None)
                between = None if low is None else f"{low:.4f} to {high:.4f}"
                model = "final" if str(of) == "." else str(of)
                value = form(number(found, "value"), ".4f")
                rows.append((model, report["suite"], report.get("items"), name, value, between, found.get("rule")))
        except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
            faults.append(element("p", f"{path.name} is no report of hf-tinylm eval ({error!r}).", name="bad"))
    head = ("model", "suite", "items", "metric", "value", "95% interval", "rule")
    last = run.evaluations[-1] if run.evaluations else {}
    words = "No validation was recorded."
    if last:
        bits = number(last, "bits_per_byte")
        words = f"Last validation: {number(last, 'eval_loss'):.4f} nats per token at update {whole(last.get('step'))}"
        words += f" over {whole(last.get('eval_tokens'))} tokens" + (
            "." if bits is None else f", {bits:.4f} bits/byte."
        )
    by_source = last.get("eval_loss_by_source")
    parts = [(name, form(number(by_source, name), ".4f")) for name in by_source] if isinstance(by_source, dict) else []
    sources = table(("source", "validation loss"), parts) if parts else Html()
    others = last.get("eval_sets") if isinstance(last.get("eval_sets"), dict) else {}
    if others:
        keys = (("eval_loss", ".4f"), ("bits_per_byte", ".4f"), ("eval_tokens", ",.0f"))
        cells = [(name, *(form(number(one, key), spec) for key, spec in keys)) for name, one in others.items()]
        sources = Html(sources + table(("other set", "validation loss", "bits per byte", "tokens"), cells))
    told = table(head, rows) if rows else missing("eval/ holds no report: hf-tinylm eval writes them.")
    return section("Evaluation", element("p", words), sources, told, *faults)


def times(run: Run) -> Html:
    """Both clocks, where the time went, and the invocations."""
    clocks, origin = _clocks(run)
    seconds = clocks.get("seconds")
    if not isinstance(seconds, dict):
        names = ("training", "evaluation", "saving", "data", "startup")
        seconds = {name: clocks[f"{name}_seconds"] for name in names if f"{name}_seconds" in clocks}
    total = number(clocks, "wall_seconds")
    went = [(name, duration(number(seconds, name)), share(number(seconds, name), total)) for name in seconds]
    where = table(("", "time", "share"), went) if went else missing("No clocks are recorded.")
    starts = [
        (
            i,
            moment(one["began"]),
            moment(one["last_seen"]),
            f"{one['from_step']:,}",
            f"{one['to_step']:,}",
            one["ended"],
        )
        for i, one in enumerate(run.invocations(), 1)
    ]
    rates = column(run.updates, "tokens_per_second")
    rates = rates[~np.isnan(rates)]
    speed = f"{np.median(rates):,.0f} tokens/s while training (median)" if len(rates) else "no speed recorded"
    wall = run.wall_seconds
    ends = f"{run.tokens / wall:,.0f} tokens/s end to end" if wall else "no wall clock recorded"
    words = f"{duration(wall)} of wall time in {len(starts):,} invocations; {speed}, {ends}."
    head = ("", "began", "last event", "from update", "to update", "ended")
    return section("Time", element("p", words), where, missing(origin), table(head, starts))


def _clocks(run: Run) -> tuple[dict[str, Any], str]:
    """Seconds by what they went into, and where that is recorded: the end of the run, or the newest checkpoint."""
    if isinstance(run.done.get("clocks"), dict):
        return run.done["clocks"], "From DONE.json, over the whole run."
    for one in reversed(run.checkpoints()):
        path = run.folder / one["name"] / "trainer_state.json"
        try:
            state = read_json(path)
        except ConfigError:
            continue  # not whole: an older one is asked
        if isinstance(state, dict) and isinstance(state.get("clocks"), dict):
            return state["clocks"], f"As of {one['name']}; what came after it is in no clock yet."
    return {}, ""


def checkpoints(run: Run) -> Html:
    """Those on disk, what their writing took, and how long all saves held training up."""
    saves = [event for event in run.events if event.get("event") == "saved"]
    saved = {str(event.get("checkpoint")): event for event in saves}
    rows = []
    for one in run.checkpoints():
        event = saved.get(one["name"], {})
        state = "manifest there, hashes not checked" if one["whole"] else "not whole: no manifest"
        stall, write = number(event, "stall_seconds"), number(event, "write_seconds")
        rows.append((one["name"], size(one["bytes"]), form(write, ".2f"), form(stall, ".3f"), state))
    stalls = sum(number(event, "stall_seconds") or 0.0 for event in saves)
    part = share(stalls, run.wall_seconds)
    words = f"{len(saves):,} saves held training up {duration(stalls)}{f', {part} of the wall time' if part else ''}."
    head = ("on disk", "size", "seconds to write", "training held up, s", "")
    return section("Checkpoints", table(head, rows), missing(words if saves else ""))


def timeline(run: Run, most: int, newest_first: bool = False) -> Html:
    """The last `most` events in words."""
    events = run.events[-most:]
    left_out = len(run.events) - len(events)
    note = f"{left_out:,} earlier events are in events.jsonl." if left_out else ""
    return section("Timeline", _told(events[::-1] if newest_first else events), missing(note))


def incidents(run: Run) -> Html:
    """Every warning, stop and restart."""
    events = [event for event in run.events if event.get("event") in (*TROUBLE, "resumed")]
    return section("Incidents", _told(events))


def _told(events: Sequence[dict[str, Any]]) -> Html:
    rows = []
    for event in events:
        words = element("span", in_words(event), name="bad" if event.get("event") in TROUBLE else "")
        rows.append((moment(number(event, "time")), whole(event.get("step")), words))
    return table(("time", "update", "event"), rows)


def samples(run: Run, most: int) -> Html:
    """What the model made of each prompt at up to `most` moments: the first, the last, and some between them."""
    events = [e for e in run.events if e.get("event") == "sampled" and isinstance(e.get("samples"), list)]
    if not events:
        return section("Samples", missing("None was written: training.sample_steps asks for them."))
    chosen = sorted({round(place) for place in np.linspace(0, len(events) - 1, min(most, len(events)))})
    texts: dict[str, list[tuple[Any, ...]]] = {}
    for event in (events[place] for place in chosen):
        for one in event["samples"]:
            if isinstance(one, dict):
                shown = element("span", one.get("text"), name="sample")
                texts.setdefault(str(one.get("prompt")), []).append((whole(event.get("step")), shown))
    parts = [Html(element("h3", prompt) + table(("update", "text"), rows)) for prompt, rows in texts.items()]
    note = f"{len(chosen)} of {len(events):,} moments are shown." if len(chosen) < len(events) else ""
    return section("Samples", *parts, missing(note))


def findings(found: Sequence[Finding]) -> Html:
    """What the diagnosis of a run says, with what was seen, what it means and what to do."""
    if not found:
        return section("Diagnosis", missing("Nothing was found."))
    parts = []
    for one in found:
        told = (("seen", one.evidence), ("means", one.meaning), ("do", one.next_step))
        parts += [element("h3", one.title, name="bad"), table((), told)]
    return section("Diagnosis", *parts)


def hardware(run: Run) -> Html:
    """The newest sample of the machine's sensors with its age, and the energy."""
    state = hardware_state(run.hardware, number(run.fact("config", "training"), "price_per_kwh"))
    if state is None:
        return section("Hardware", missing("No sample was recorded."))
    stale = state["stale"] and not run.finished
    lines = [element("p", line, name="bad" if stale else "") for line in hardware_lines(state)]
    return section("Hardware", missing(f"At {clock(number(state, 'time'))}:"), *lines)


def moment(seconds: float | None) -> Html:
    """A date and a time of day, which a narrow screen shows in two lines, never in more."""
    date, _, rest = clock(seconds).partition(" ")
    return Html(element("span", date, name="when") + " " + element("span", rest, name="when"))


def whole(value: Any) -> str | None:
    """A number without its decimals, None for anything else."""
    return form(number({"value": value}, "value"), ",.0f")


def form(value: float | None, spec: str) -> str | None:
    """`value` formatted, None as None."""
    return None if value is None else format(value, spec)


def share(part: float | None, of: float | None) -> str | None:
    """A share in percent; None when either is not known."""
    return None if part is None or not of else f"{100 * part / of:.1f}%"
