"""`hf-tinylm monitor`: the page of a run as it goes on, in parts that are sent again when they have changed."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..training.curves import AXES, Axis
from .curves import clipped_share, drawn, run_charts
from .diagnosis import diagnose
from .events import duration
from .follow import column, number
from .html import Html, element, live_page, missing, section
from .parts import checkpoints, evaluations, findings, form, hardware, samples, share, timeline, times
from .run import RATE_ROWS, Run
from .tail import state_of

PARTS = ("summary", "findings", "curves", "samples", "time", "hardware", "checkpoints", "evaluation", "timeline")
_REFRESH_SECONDS = 0.5  # several tabs share one look at the files
_DRAWING_SHARE = 0.05  # of one core's time, at most, goes into curves
_EVENTS = 200
_MOMENTS = 3  # of samples


class LivePage:
    """What the page of a run's folder shows now. Files are read when someone asks, and each byte of a log once.

    The folder may appear later, go, and come again: until then the page says what it waits for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: Run | None = None
        self._lock = threading.Lock()
        self._token = secrets.token_hex(8)  # another one after a restart of the server: every part is new then
        self._version = 0
        self._parts: dict[str, tuple[int, Html]] = {}
        self._looked = 0.0
        self._curves: dict[Axis, tuple[Any, float, float]] = {}  # what was drawn, when, and how long it took

    def shell(self) -> str:
        """The page without its content."""
        return live_page(self.folder.resolve().name, PARTS, AXES_SHOWN)

    def news(self, token: str, since: int, over: Axis) -> dict[str, Any]:
        """The parts that changed after version `since` of the server that gave `token`; all of them for another one."""
        with self._lock:
            if time.monotonic() - self._looked >= _REFRESH_SECONDS:
                self._look()
                self._looked = time.monotonic()
            if self.run is not None:
                self._draw(self.run, over)
            since = since if token == self._token else -1
            names = [name if name != "curves" else f"curves over {over}" for name in PARTS]
            held = {name.split(" ")[0]: self._parts[name] for name in names if name in self._parts}
            changed = {name: html for name, (version, html) in held.items() if version > since}
            return {"server": self._token, "version": self._version, "title": self._title(), "parts": changed}

    def _look(self) -> None:
        """Read what was appended, and make all parts but the curves anew."""
        try:
            if self.run is None:
                self.run = Run(self.folder)
            else:
                self.run.refresh()
        except ConfigError as error:
            self.run = None
            self._curves.clear()
            for name in list(self._parts):
                self._set(name, Html())
            self._set("summary", Html(element("p", "Waiting for the files of a run.") + missing(str(error))))
            return
        run = self.run
        made = {
            "summary": summary(run),
            "samples": samples(run, _MOMENTS),
            "time": times(run),
            "hardware": hardware(run),
            "checkpoints": checkpoints(run),
            "evaluation": evaluations(run),
            "timeline": timeline(run, _EVENTS, newest_first=True),
        }
        for name, html in made.items():
            self._set(name, html)

    def _draw(self, run: Run, over: Axis) -> None:
        """Draw and diagnose when there is something new, as often as the cost allows; at the run's end at once."""
        there = (len(run.updates), len(run.evaluations), run.step, run.finished)
        before, when, took = self._curves.get(over, (None, 0.0, 0.0))
        if there == before or (before and not run.finished and time.monotonic() - when < took / _DRAWING_SHARE):
            return
        began = time.process_time()
        charts = Html(drawn(run_charts(run, over)) + clipped_share(run))
        self._set(f"curves over {over}", section("Curves", charts))
        self._set("findings", findings(diagnose(run)))
        self._curves[over] = (there, time.monotonic(), time.process_time() - began)

    def _set(self, name: str, html: Html) -> None:
        if self._parts.get(name, (0, None))[1] != html:
            self._version += 1
            self._parts[name] = (self._version, html)

    def _title(self) -> str:
        return f"{self.run.name}: {self.run.status()}" if self.run is not None else f"{self.folder.name}: waiting"


AXES_SHOWN: tuple[Axis, ...] = tuple(axis for axis in AXES if axis != "flops")


def summary(run: Run) -> Html:
    """Where the run is, in figures."""
    state = state_of(run)
    row = run.updates[-1] if run.updates else {}
    scored = state["last_evaluation"] or {}
    rates = column(run.updates, "tokens_per_second")[-RATE_ROWS:]
    speed = float(np.nanmedian(rates)) if np.isfinite(rates).any() else None
    price, left = number(run.fact("config", "training"), "price_per_hour"), state["seconds_left"]
    whole_cost = None if run.cost is None or left is None or not price else run.cost + left / 3600 * price
    wall = run.wall_seconds
    facts = (
        ("update", _of(state["updates"], state["planned_updates"])),
        ("tokens", _of(state["supervised_tokens"], state["train_tokens"])),
        ("loss", form(number(row, "loss"), ".4f")),
        ("validation loss", _at(form(number(scored, "eval_loss"), ".4f"), number(scored, "step"))),
        ("bits per byte", form(number(scored, "bits_per_byte"), ".4f")),
        ("learning rate", form(number(row, "learning_rate"), ".3g")),
        ("gradient norm", form(number(row, "grad_norm"), ".3f")),
        ("tokens/s while training", form(speed, ",.0f")),
        ("tokens/s end to end", form(run.tokens / wall if wall else None, ",.0f")),
        ("MFU", share(number(row, "mfu"), 1.0)),
        ("wall time", duration(wall) + f" in {max(1, state['invocations']):,} invocations"),
        ("time left", duration(left)),
        ("expected end", state["expected_end"]),
        (
            "money so far",
            _at(form(run.cost, ".2f"), None) if whole_cost is None else f"{run.cost:.2f} of {whole_cost:.2f}",
        ),
    )
    silent = f", nothing written for {duration(state['silent_seconds'])}" if state["status"] == "silent" else ""
    cells = [element("div", element("dt", name), element("dd", value)) for name, value in facts]
    notes = [element("p", note, name="bad") for note in run.missing]
    return Html(
        element("h1", run.name, element("small", f" {state['status']}{silent}"))
        + "".join(missing(line) for line in run.origin())
        + _progress(state["percent"])
        + element("dl", *cells, name="facts")
        + "".join(notes)
    )


def _progress(percent: float | None) -> Html:
    if percent is None:
        return Html()
    shown = min(100.0, max(0.0, percent))
    return Html(
        f'<progress max="100" value="{shown:.2f}">{shown:.1f}%</progress>{missing(f"{percent:.1f}% of the tokens")}'
    )


def _of(done: int, planned: int | None) -> str:
    return f"{done:,}" + ("" if planned is None else f" of {planned:,}")


def _at(value: str | None, step: float | None) -> str | None:
    return value if value is None or step is None else f"{value} at update {step:,.0f}"
