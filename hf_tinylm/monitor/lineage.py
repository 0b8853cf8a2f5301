"""A run and those that it descends from as one history: what each began with, and one curve over the tokens of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..contract import MANIFEST, RUN_FILE, beginning, difference, inherited_tokens
from ..errors import ConfigError
from ..files import sha256_of_file
from .charts import Chart, Line, points
from .curves import drawn, eval_sets, plain, run_charts, validation_points
from .follow import column, number
from .html import Html, element, leaves, missing, section, table
from .parts import whole
from .run import Run

_MOST = 64  # generations


@dataclass(frozen=True)
class Generation:
    """One run of a lineage.

    Attributes:
        identity: as its own run.json, or that of the run after it, records it.
        run: its folder; None where that is gone or holds another run by now, of which `note` tells.
        last_step: the update that the next run left it at; None: the newest run, to its end.
    """

    name: str
    identity: Any
    run: Run | None
    last_step: float | None = None
    note: str = ""

    @property
    def start(self) -> dict[str, Any] | None:
        """What it began with, as `init_from` is recorded; None: new weights."""
        return beginning(self.identity)

    @property
    def before(self) -> float | None:
        """Tokens of all runs before it."""
        return number({"tokens": inherited_tokens(self.identity)}, "tokens")

    def setting(self, part: str, key: str) -> Any:
        """A value of its identity."""
        values = self.identity.get(part) if isinstance(self.identity, dict) else None
        return values.get(key) if isinstance(values, dict) else None


def lineage_of(run: Run) -> list[Generation]:
    """The run and its ancestors, the oldest first. Every generation is recorded in the run itself; its rows are not."""
    found = [Generation(run.name, run.fact("identity"), run)]
    nearest = run.folder
    while (start := found[0].start) is not None and len(found) < _MOST:
        folder = Path(str(start.get("path"))).parent
        parent, note = _parent(start, folder, nearest)
        nearest = parent.folder if parent is not None else nearest
        identity = start.get("parent_identity")
        found.insert(0, Generation(folder.name or "unknown", identity, parent, number(start, "step"), note))
    return found


def _parent(start: dict[str, Any], recorded: Path, child: Path) -> tuple[Run | None, str]:
    """The run that a branch came from: where it was, or beside the branch if both were moved."""
    note = f"{recorded} is gone, so its curve is not shown."
    for folder in (recorded, child.resolve().parent / recorded.name):
        if not (folder / RUN_FILE).is_file():
            continue
        try:
            run = Run(folder)
        except ConfigError as error:
            note = str(error)
            continue
        if run.fact("identity") == start.get("parent_identity"):
            return run, ""
        note = f"{folder} holds another run by now, so its curve is not shown."
    return None, note


def lineage_section(run: Run) -> Html:
    """The lineage of a branch with its curves; nothing for a run that began with new weights."""
    generations = lineage_of(run)
    if len(generations) < 2:
        return Html()
    tables = [table((), _facts(place, generations)) for place in range(len(generations))]
    parts = [Html(element("h3", one.name) + facts) for one, facts in zip(generations, tables, strict=True)]
    notes = [missing(one.note) for one in generations if one.note]
    return section("Lineage: one history", drawn(_charts(generations)), *notes, *parts)


def curves_of(run: Run) -> list[Chart]:
    """The charts of a picture: of a branch its whole history in place of its own loss, rate and norm."""
    generations = lineage_of(run)
    own = run_charts(run)
    return [*_charts(generations), *own[3:]] if len(generations) > 1 else own


def _charts(generations: list[Generation]) -> list[Chart]:
    """Loss with every validation set, rate and gradient norm over the tokens of all generations."""
    shown = [one for one in generations if one.run is not None and one.before is not None]
    marks = [one.before for one in generations if one.start is not None and one.before is not None]
    loss = Chart("loss over all tokens, nats per token", _lines(shown, "loss", "training") + _validations(generations))
    rate = Chart("learning rate over all tokens", _lines(shown, "learning_rate", "rate"))
    norm = Chart("gradient norm over all tokens", _lines(shown, "grad_norm", "norm"), log=True)
    for chart in (loss, rate, norm):
        chart.marks, chart.mark = marks, "branch"
    return [loss, rate, norm]


def _lines(shown: list[Generation], key: str, label: str) -> list[Line]:
    """A line for each generation, so that one whose rows are gone leaves a gap; they share one colour and one label."""
    found: list[Line] = []
    for one in shown:
        assert one.run is not None
        steps, tokens = column(one.run.updates, "step"), column(one.run.updates, "supervised_tokens")
        own = steps <= (np.inf if one.last_step is None else one.last_step)
        xs, ys = points((one.before or 0.0) + tokens[own], column(one.run.updates, key)[own])
        found.append(Line("" if found else label, xs, ys))
    return found


def _validations(generations: list[Generation]) -> list[Line]:
    """Validation losses by the pack that they are of: what a branch calls one of its sets is its parent's own."""
    names: dict[str, str] = {}  # of packs, by hash
    series: dict[str, tuple[list[float], list[float]]] = {}
    for one in generations:
        sets = one.setting("data", "eval_sets")
        names |= {str(digest): str(name) for name, digest in sets.items()} if isinstance(sets, dict) else {}
    for one in generations:
        if one.run is None or one.before is None:
            continue
        sets = one.setting("data", "eval_sets")
        digests = {name: str(sets.get(name)) for name in eval_sets(one.run)} if isinstance(sets, dict) else {}
        own = str(one.setting("data", "shards_sha256"))
        folder = Path(str(one.run.fact("config", "data", "shards"))).name
        names.setdefault(own, folder)
        last = np.inf if one.last_step is None else one.last_step
        kept = column(one.run.evaluations, "step") <= last
        for name, digest in ((None, own), *digests.items()):
            places, losses = validation_points(one.run, of=name)
            xs, ys = points(places[kept] + one.before, losses[kept])
            held = series.setdefault(digest, ([], []))
            held[0].extend(xs)
            held[1].extend(ys)
    labels = {digest: plain(f"validation: {names.get(digest, 'another set')}") for digest in series}
    return [Line(labels[d], *series[d], dots=True, colour=1 + i) for i, d in enumerate(series)]


def _facts(place: int, generations: list[Generation]) -> list[tuple[Any, Any]]:
    """What is said of a generation: where its weights come from, what was kept and changed, and how far it went."""
    one = generations[place]
    following = generations[place + 1].start if place + 1 < len(generations) else None
    own = number(following, "parent_tokens") if following is not None else one.run.tokens if one.run else None
    rate, course = one.setting("training", "learning_rate"), one.setting("training", "lr_schedule") or "cosine"
    if one.setting("training", "min_lr_ratio") == 1:
        course = "constant"
    rows: list[tuple[Any, Any]] = [
        ("own tokens" if following is None else "own tokens, up to the branch", whole(own)),
        ("tokens before", whole(one.before)),
        ("tokens an update", whole(one.setting("training", "global_batch_tokens"))),
        ("highest rate", f"{rate}, {course}"),
    ]
    start = one.start
    if start is None:
        return [("began with", "new weights"), *rows]
    step = number(start, "step")
    hashes = leaves(start.get("weights_sha256"))
    weights = [element("p", f"{name} {digest}", name="hash") for name, digest in hashes]
    parent = generations[place - 1].identity
    before, now = ({key: _settings(each, key) for key in ("training", "data")} for each in (parent, one.identity))
    changed = difference(before, now) if parent is not None else ["unknown: the parent had no run.json"]
    return [
        ("began with", f"{start.get('path')}{'' if step is None else f', update {step:,.0f}'}"),
        ("kept", "weights and the optimizer's moments" if start.get("with_optimizer") else "weights; moments zero"),
        ("weights (SHA-256)", Html("".join(weights))),
        ("checkpoint's manifest (SHA-256)", _manifest(start)),
        *rows,
        ("changed", Html("".join(element("p", line) for line in changed))),
    ]


def _settings(identity: Any, part: str) -> Any:
    values = identity.get(part) if isinstance(identity, dict) else None
    if not isinstance(values, dict):
        return values
    return {key: value for key, value in values.items() if key not in ("init_from", "branch_from")}


def _manifest(start: dict[str, Any]) -> Html | None:
    """The hash that the branch recorded, and whether the checkpoint still has it."""
    recorded, path = start.get("manifest_sha256"), Path(str(start.get("path"))) / MANIFEST
    if recorded is None:
        return None
    state = "the checkpoint is gone"
    if path.is_file():
        state = "still the checkpoint's" if sha256_of_file(path) == recorded else "the checkpoint is another one now"
    return Html(element("span", recorded, name="hash") + element("p", state))
