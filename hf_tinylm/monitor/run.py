"""A run's folder as it is read: contract, rows, events, checkpoints, and what of it is missing. Nothing is written."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from ..contract import DONE_FILE, EVENTS, MANIFEST, METRICS, MIRROR, RUN_FILE, list_checkpoints, step_of
from ..errors import ConfigError
from ..files import read_json
from ..planning.updates import UpdatePlan, recorded_plan
from .events import STARTS, clock
from .follow import Follower, column, number
from .hardware import HARDWARE
from .rows import Updates, read_block

RATE_ROWS = 200  # updates that the present rate is measured over
_SILENT_SECONDS = 120.0


class Run:
    """One run, running or finished. `refresh` takes in what was written since the last time.

    `updates` are rows with the tokens so far (the last `keep` of them), `evaluations` rows with an eval_loss.

    Raises:
        ConfigError: the folder holds no file of a run.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; the folder of a run was expected. Check the path.")
        if not any((folder / name).is_file() for name in (RUN_FILE, METRICS, EVENTS)):
            inside = sorted(path.parent.name for path in folder.glob(f"*/{RUN_FILE}"))
            near = f" Did you mean {folder / inside[0]}?" if inside else ""
            raise ConfigError(
                f"{folder} is no run: it has no {RUN_FILE}, {METRICS} or {EVENTS}. Give the output_dir of a run.{near}"
            )
        self.updates = Updates(keep)
        self.evaluations: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.hardware: list[dict[str, Any]] = []  # samples with a time
        self._metrics, self._events = Follower(folder / METRICS), Follower(folder / EVENTS)
        self._sensors = Follower(folder / HARDWARE)
        self.refresh()

    def refresh(self) -> bool:
        """Read what was appended; whether rows were dropped, as a resume does.

        Raises:
            ConfigError: the folder is gone.
        """
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is gone: it was moved or removed while it was read. Give its new path.")
        self.missing: list[str] = []
        self.contract = self._json(RUN_FILE, "what the run is, its data and its environment are not known")
        self.mirror = self._json(MIRROR, None)
        self.finished = (self.folder / DONE_FILE).is_file()  # before the rows: after it none is written
        self.done = self._json(DONE_FILE, None)
        lines, replaced = self._metrics.read()
        block = read_block(lines)
        self._metrics.damaged += block.damaged
        if replaced:
            self.updates.clear()
            self.evaluations.clear()
        self.updates.add(block)
        self.evaluations += block.evaluations
        events, renewed = self._events.poll()
        self.events = events if renewed else self.events + events
        samples, renewed = self._sensors.poll()
        samples = [row for row in samples if number(row, "time") is not None]
        self.hardware = samples if renewed else self.hardware + samples
        for follower, what in ((self._metrics, "there are no curves"), (self._events, "there is no timeline")):
            if not follower.path.is_file():
                self.missing.append(f"{follower.path.name} is missing: {what}.")
            elif follower.damaged:
                self.missing.append(f"{follower.path.name}: {follower.damaged:,} damaged lines were passed over.")
        self._look_for_two_runs()
        return replaced

    def _look_for_two_runs(self) -> None:
        """A resume drops the rows beyond its checkpoint, so in a run's own file updates only go up."""
        steps = column(self.updates, "step")
        back = np.flatnonzero(np.diff(steps) <= 0)
        if len(back):
            before, after = steps[back[0]], steps[back[0] + 1]
            self.missing.append(
                f"{METRICS} holds the rows of two runs: update {after:,.0f} comes after update {before:,.0f}. Curves "
                "and clocks mix them; give each run an output_dir of its own."
            )

    def _json(self, name: str, loss: str | None) -> dict[str, Any]:
        """A JSON object of the folder, empty when it cannot be read; `loss` says what that means, None: nothing."""
        if not (self.folder / name).is_file():
            if loss:
                self.missing.append(f"{name} is missing: {loss}.")
            return {}
        try:
            found = read_json(self.folder / name)
        except ConfigError as error:
            self.missing.append(str(error))
            return {}
        return found if isinstance(found, dict) else {}

    def origin(self) -> list[str]:
        """Lines on where what is shown comes from: the folder, and of which run it is a mirror."""
        if not self.mirror:
            return [str(self.folder.resolve())]
        original = str(self.mirror.get("run", "unknown"))
        there = "is still there" if Path(original).is_dir() else "is gone, or on another machine"
        return [
            f"From the mirror {self.folder.resolve()} of the run {original}, which {there}; last copied "
            f"{clock(number(self.mirror, 'time'))}. A mirror has no checkpoints and no eval reports."
        ]

    # ---- what the run is ----------------------------------------------------------------------------------------

    def fact(self, *keys: str) -> Any:
        """A value of run.json, such as `fact("identity", "training", "seed")`; None when an older version lacks it."""
        found: Any = self.contract
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @property
    def name(self) -> str:
        """The run's own name, else its folder's."""
        return str(self.fact("config", "training", "run_name") or self.folder.resolve().name)

    @property
    def planned_tokens(self) -> float | None:
        """Supervised targets of the whole run."""
        return number(self.fact("identity", "training"), "train_tokens")

    @property
    def planned_updates(self) -> float | None:
        """Updates of the whole run."""
        told = [number(event, "updates") for event in self.events if event.get("event") == "started"]
        if told and told[-1] is not None:
            return told[-1]
        return None if self.plan is None else float(self.plan.updates)

    @property
    def plan(self) -> UpdatePlan | None:
        """How the budget is cut into updates; None when run.json does not say."""
        training = self.fact("identity", "training")
        known = self.planned_tokens and number(training, "global_batch_tokens")
        growth = training.get("batch_growth", []) if known else []
        whole = isinstance(growth, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in growth)
        return recorded_plan(training) if known and whole else None

    @property
    def tokens(self) -> float:
        """Supervised targets so far."""
        return number(self.updates[-1], "supervised_tokens") or 0.0 if self.updates else 0.0

    @property
    def step(self) -> int:
        """Updates so far."""
        return int(number(self.updates[-1], "step") or 0) if self.updates else 0

    # ---- time and money -----------------------------------------------------------------------------------------

    @property
    def wall_seconds(self) -> float | None:
        """Seconds of all invocations, as far as they left a record."""
        clocks = self.done.get("clocks")
        told = [number(row, "wall_seconds") for row in (*self.updates[-1:], *self.events, clocks or {})]
        return max((seconds for seconds in told if seconds is not None), default=None)

    @property
    def cost(self) -> float | None:
        """Money so far; None without a price."""
        price = number(self.fact("config", "training"), "price_per_hour")
        wall = self.wall_seconds
        return None if price is None or wall is None else wall / 3600 * price

    def tokens_per_second(self) -> float | None:
        """Over the last updates of the last invocation, with the saves and evaluations between them.

        The start-up of a resume lies between two updates as well, and does not come again with each of them.
        """
        starts = [number(event, "wall_seconds") for event in self.events if event.get("event") in STARTS]
        since = starts[-1] or 0.0 if starts else 0.0
        rows = [row for row in self.updates[-RATE_ROWS:] if (number(row, "wall_seconds") or 0.0) >= since]
        if len(rows) < 2:
            return number(rows[0], "tokens_per_second") if rows else None
        tokens = (number(rows[-1], "supervised_tokens") or 0) - (number(rows[0], "supervised_tokens") or 0)
        first, last = number(rows[0], "wall_seconds"), number(rows[-1], "wall_seconds")
        return None if first is None or last is None or last <= first else tokens / (last - first)

    def seconds_left(self) -> float | None:
        """At the present rate; None when the rate or the budget is not known, 0 at the end."""
        rate = self.tokens_per_second()
        if self.finished or self.planned_tokens is None or not rate:
            return 0.0 if self.finished else None
        return max(0.0, self.planned_tokens - self.tokens) / rate

    def status(self, now: float | None = None) -> str:
        """`finished`, `stopped`, `running`, or `silent`: nothing was written for long, the process may be gone."""
        if self.finished:
            return "finished"
        last: dict[str, Any] = next((e for e in reversed(self.events) if e.get("event") not in ("saved", "warned")), {})
        if last.get("event") == "interrupted" or last.get("action") == "stopped":
            return "stopped"
        return "silent" if self.silent_seconds(now) > self._patience() else "running"

    def silent_seconds(self, now: float | None = None) -> float:
        """Seconds since anything was written."""
        files = [self.folder / name for name in (RUN_FILE, METRICS, EVENTS)]
        newest = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
        return max(0.0, (time.time() if now is None else now) - newest)

    def _patience(self) -> float:
        """Seconds of silence that are normal: ten updates, and at least two minutes."""
        updates = [number(row, "seconds") or 0.0 for row in self.updates[-RATE_ROWS:]]
        return max(_SILENT_SECONDS, 10 * max(updates, default=0.0))

    def invocations(self) -> list[dict[str, Any]]:
        """Each start of the run: `began`, `last_seen` (its last event), `from_step`, `to_step`, `ended` in words."""
        found: list[dict[str, Any]] = []
        for event in self.events:
            kind, when = event.get("event"), number(event, "time")
            step = int(number(event, "step") or 0)
            if kind in STARTS or not found:
                found.append({"began": when, "from_step": step, "to_step": step, "last_seen": when, "ended": None})
            found[-1]["last_seen"], found[-1]["to_step"] = when, max(step, found[-1]["to_step"])
            if kind in ("interrupted", "finished"):
                found[-1]["ended"] = kind if kind == "finished" else str(event.get("reason", kind))
        for one in found[:-1]:
            one["ended"] = one["ended"] or "without a word"
        if found and found[-1]["ended"] is None:
            found[-1]["ended"] = self.status()
        return found

    def checkpoints(self) -> list[dict[str, Any]]:
        """Those on disk now: `name`, `step`, `bytes`, `whole` (its manifest is there; hashes are not checked)."""
        found = []
        for folder in list_checkpoints(self.folder):
            try:
                total = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
                whole = (folder / MANIFEST).is_file()
            except FileNotFoundError:
                continue  # rotated away while it was looked at
            found.append({"name": folder.name, "step": step_of(folder), "bytes": total, "whole": whole})
        return found
