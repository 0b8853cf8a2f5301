"""`hf-tinylm report`: everything that a run's folder says of it, as one page that needs nothing but itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..files import read_json, sha256_of_file
from .charts import Chart, Line, draw, points
from .events import TROUBLE, clock, duration, in_words, size
from .follow import column, number
from .html import Html, element, missing, page, section, table
from .run import Run


def report_page(run: Run) -> str:
    """The page of one run."""
    parts: tuple[Callable[[Run], Html], ...] = (
        *(_planned, _curves, _evaluations, _time, _checkpoints, _timeline, _contract, _data, _environment, _hashes),
    )
    notes = [element("p", note, name="bad") for note in run.missing]
    return page(f"{run.name}: {run.status()}", _subtitle(run), *notes, *(part(run) for part in parts))


def _subtitle(run: Run) -> Html:
    note, expect = run.fact("facts", "note"), run.fact("facts", "expect")
    lines = [f"{run.folder.resolve()}, read {clock(time.time())}"]
    lines += [f"note: {note}"] if note else []
    lines += [f"expected: {expect}"] if expect else []
    return Html("".join(element("p", line, name="soft") for line in lines))


def _planned(run: Run) -> Html:
    """Planned against measured."""
    price = number(run.fact("config", "training"), "price_per_hour")
    updates = run.planned_updates
    rows: list[tuple[Any, ...]] = [
        ("tokens (supervised)", _whole(run.planned_tokens), _whole(run.tokens), _share(run.tokens, run.planned_tokens)),
        ("updates", _whole(updates), _whole(run.step), _share(run.step, updates)),
        ("hours, all invocations", None, _form(run.wall_seconds and run.wall_seconds / 3600, ".3f"), None),
        ("money", None, _form(run.cost, ".2f"), None if price is None else f"{price:g} per hour"),
        ("tokens/s, last updates, saves and evaluations included", None, _form(run.tokens_per_second(), ",.0f"), None),
    ]
    left = run.seconds_left()
    if run.status() != "finished":
        rows.append(("time left at that rate", None, duration(left), None))
    unknown = "A run does not record planned hours and money: hf-tinylm plan gives them before it starts."
    return section("Planned and measured", table(("", "planned", "measured", ""), rows), missing(unknown))


def _curves(run: Run) -> Html:
    drawn = [picture for chart in run_charts(run) if (picture := draw(chart))]
    if not drawn:
        return section("Curves", missing("There are no two updates to draw."))
    known = [row["clipped"] for row in run.updates if isinstance(row.get("clipped"), bool)]
    words = f"{100 * sum(known) / len(known):.1f}% of the updates were clipped." if known else ""
    return section("Curves", element("div", *(Html(picture) for picture in drawn), name="charts"), missing(words))


def run_charts(run: Run) -> list[Chart]:
    """Loss with validation, rate, gradient norm with its limit, and tokens per second, over tokens."""
    rows = run.updates
    tokens = column(rows, "supervised_tokens")
    limit = number(run.fact("identity", "training"), "max_grad_norm")

    def line(label: str, key: str) -> Line:
        return Line(label, *points(tokens, column(rows, key)))

    norm = Chart("gradient norm before clipping", [line("norm", "grad_norm")], log=True)
    norm.limit = (limit, f"clipped above {limit:g}") if limit and norm.lines[0].ys else None
    return [
        Chart("loss, nats per token", [line("training", "loss"), validation(run)]),
        Chart("learning rate", [line("rate", "learning_rate")]),
        norm,
        Chart("tokens per second while training", [line("speed", "tokens_per_second")]),
    ]


def validation(run: Run, label: str = "validation", colour: int = 1) -> Line:
    """The validation losses at the tokens of their updates."""
    steps, tokens, scored = column(run.updates, "step"), column(run.updates, "supervised_tokens"), run.evaluations
    wanted = column(scored, "step")
    known = np.isin(steps, wanted)
    tokens_of = dict(zip(steps[known].tolist(), tokens[known].tolist(), strict=True))
    places = np.array([tokens_of.get(step, np.nan) for step in wanted.tolist()], dtype=np.float64)
    return Line(label, *points(places, column(scored, "eval_loss")), dots=True, colour=colour)


def _evaluations(run: Run) -> Html:
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
                value = _form(number(found, "value"), ".4f")
                rows.append((model, report["suite"], report.get("items"), name, value, between, found.get("rule")))
        except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
            faults.append(element("p", f"{path.name} is no report of hf-tinylm eval ({error!r}).", name="bad"))
    head = ("model", "suite", "items", "metric", "value", "95% interval", "rule")
    last = run.evaluations[-1] if run.evaluations else {}
    words = "No validation was recorded."
    if last:
        bits = number(last, "bits_per_byte")
        words = f"Last validation: {number(last, 'eval_loss'):.4f} nats per token at update {_whole(last.get('step'))}"
        words += f" over {_whole(last.get('eval_tokens'))} tokens" + (
            "." if bits is None else f", {bits:.4f} bits/byte."
        )
    by_source = last.get("eval_loss_by_source")
    sources = table(("source", "validation loss"), by_source.items()) if isinstance(by_source, dict) else Html()
    told = table(head, rows) if rows else missing("eval/ holds no report: hf-tinylm eval writes them.")
    return section("Evaluation", element("p", words), sources, told, *faults)


def _time(run: Run) -> Html:
    """Both clocks, where the time went, and the invocations."""
    clocks, origin = _clocks(run)
    seconds = clocks.get("seconds")
    if not isinstance(seconds, dict):
        names = ("training", "evaluation", "saving", "data", "startup")
        seconds = {name: clocks[f"{name}_seconds"] for name in names if f"{name}_seconds" in clocks}
    total = number(clocks, "wall_seconds")
    went = [(name, duration(number(seconds, name)), _share(number(seconds, name), total)) for name in seconds]
    where = table(("", "time", "share"), went) if went else missing("No clocks are recorded.")
    starts = [
        (i, clock(one["began"]), clock(one["last_seen"]), f"{one['from_step']:,}", f"{one['to_step']:,}", one["ended"])
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


def _checkpoints(run: Run) -> Html:
    saved = {str(event.get("checkpoint")): event for event in run.events if event.get("event") == "saved"}
    rows = []
    for one in run.checkpoints():
        event = saved.get(one["name"], {})
        state = "manifest there, hashes not checked" if one["whole"] else "not whole: no manifest"
        stall, write = number(event, "stall_seconds"), number(event, "write_seconds")
        rows.append((one["name"], size(one["bytes"]), _form(write, ".2f"), _form(stall, ".3f"), state))
    return section("Checkpoints", table(("on disk", "size", "seconds to write", "training held up, s", ""), rows))


def _timeline(run: Run) -> Html:
    rows = []
    for event in run.events:
        words = element("span", in_words(event), name="bad" if event.get("event") in TROUBLE else "")
        rows.append((clock(number(event, "time")), _whole(event.get("step")), words))
    return section("Timeline", table(("time", "update", "event"), rows))


def _contract(run: Run) -> Html:
    identity = {key: run.fact("identity", key) for key in ("model", "training")}
    rows = [*leaves(identity), *leaves({"execution": run.fact("execution")})]
    if not run.contract:
        return section("Contract", missing("run.json is missing."))
    whole = json.dumps(run.fact("config"), indent=1, ensure_ascii=False)
    more = element("details", element("summary", "the whole configuration"), element("pre", whole))
    return section("Contract", table((), rows), more)


def _data(run: Run) -> Html:
    rows = leaves(run.fact("identity", "data") or {})
    if not rows:
        return section("Data", missing("run.json does not say what the run was trained on."))
    sources = run.fact("config", "data", "sources") or run.fact("config", "data", "conversations")
    named = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    listed = [(one.get("name"), one.get("path"), one.get("licence")) for one in named]
    return section("Data", table((), rows), table(("source", "path", "licence"), listed), _pack(run))


def _pack(run: Run) -> Html:
    """The pack's own manifest, when it still lies where the run read it and is the one that it read."""
    shards = run.fact("config", "data", "shards")
    path = Path(str(shards)) / "manifest.json" if shards else None
    if path is None or not path.is_file():
        return missing("The pack's manifest is not where the run read it, so its counts are not shown.")
    if sha256_of_file(path) != run.fact("identity", "data", "manifest_sha256"):
        return missing(f"{path} is of another pack than the run read, so its counts are not shown.")
    manifest = read_json(path)
    parts = manifest.get("sources") or {}
    rows = [(name, _whole(one.get("ids")), _whole(one.get("documents"))) for name, one in parts.items()]
    words = f"{_whole(manifest.get('ids'))} ids in {_whole(manifest.get('documents'))} documents."
    return Html(element("p", words) + table(("source", "ids", "documents"), rows))


def _environment(run: Run) -> Html:
    rows = [row for row in leaves(run.fact("environment") or {}) if row[0] != "git_diff"]
    diff = run.fact("environment", "git_diff")
    more = element("details", element("summary", "uncommitted changes"), element("pre", diff)) if diff else Html()
    return section("Environment", table((), rows), more)


def _hashes(run: Run) -> Html:
    found = {"tokenizer": run.fact("identity", "data", "tokenizer_sha256")}
    found["pack manifest"] = run.fact("identity", "data", "manifest_sha256")
    weights = run.done.get("final_weights_sha256")
    found |= weights if isinstance(weights, dict) else {}
    found["manifest of the last checkpoint"] = run.done.get("last_checkpoint_manifest_sha256")
    rows = [(name, element("span", digest, name="hash")) for name, digest in found.items() if digest]
    return section("Hashes (SHA-256)", table((), rows))


def leaves(value: Any, where: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every value inside nested objects."""
    if not isinstance(value, dict):
        return [(where, value)]
    return [pair for key in value for pair in leaves(value[key], f"{where}.{key}" if where else str(key))]


def _whole(value: Any) -> str | None:
    found = number({"value": value}, "value")
    return None if found is None else f"{found:,.0f}"


def _form(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def _share(part: float | None, whole: float | None) -> str | None:
    return None if part is None or not whole else f"{100 * part / whole:.1f}%"
