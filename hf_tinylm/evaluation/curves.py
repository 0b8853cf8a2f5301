"""Curves of several runs, and a published one, that may stand on the same axes: the first is the baseline."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..contract import METRICS, RUN_FILE
from ..errors import ConfigError, ContractError
from ..files import read_record, read_rows
from ..planning.optimizer import RunFlops
from ..planning.shape import ModelShape
from ..training.curves import Axis, Curve, Points, curve_of

_SPLIT_KEYS = ("manifest_sha256", "test_conversations_sha256")
_HASH_SHOWN = 12  # characters of a hash; a published curve names at least so many
_OF_OPTIMIZER = {"optim": "optim", "muon_ns_steps": "ns_steps"}
_BITS = "Compare bits per byte: --metric bits_per_byte."
UNITS = {"loss": "loss, nats per token", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class MeasuredRun:
    """A curve with what its values depend on.

    `tokenizer` and `split` are hashes of the run's identity, or what a published curve names; `windows` says how the
    validation text was cut, and is None for a published curve.
    """

    curve: Curve
    tokenizer: str
    split: str
    windows: dict[str, Any] | None


def load_run(folder: Path, metric: str = "loss") -> MeasuredRun:
    """The curves of a run's folder, finished or not.

    Raises:
        ConfigError: no folder of a run, or a run without rows or without values of this metric.
    """
    contract_file = folder / RUN_FILE
    if not contract_file.is_file():
        raise ConfigError(f"{folder} has no {RUN_FILE}, so it is no run. Give the output_dir of a run.")
    identity = read_record(contract_file).get("identity", {})
    data, model, training = (identity.get(name, {}) for name in ("data", "model", "training"))
    settings = {name: training[key] for key, name in _OF_OPTIMIZER.items() if key in training}
    run = RunFlops.of(ModelShape.from_model_config(model), int(data["sequence_length"]), **settings)
    curve = curve_of(str(folder), read_rows(folder / METRICS), run, metric)
    if not len(curve.training) and not len(curve.validation):
        wanted = "update" if metric == "loss" else f"validation with {metric}"
        raise ConfigError(f"{folder / METRICS} holds no {wanted} yet. Give a run that has one (eval_steps).")
    split = next((str(data[key]) for key in _SPLIT_KEYS if data.get(key)), "none")
    windows = {
        "sequence_length": data["sequence_length"],
        "eval_tokens": training.get("eval_tokens"),
        "document_attention": bool(data.get("document_attention")),
    }
    return MeasuredRun(curve, str(data.get("tokenizer_sha256")), split, windows)


def load_published(path: Path, metric: str = "loss") -> MeasuredRun:
    """A published curve: a CSV with the columns `tokens` and `validation` (nats per token), or `bits_per_byte`.

    Its tokenizer and split stand in columns of these names or in comments at its head: `# tokenizer: NAME`.

    Raises:
        ConfigError: the file cannot be read, a column or a name is missing, a cell is no number, tokens do not grow.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    facts: dict[str, str] = {}
    numbered = []
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            key, _, value = line.lstrip("# ").partition(":")
            facts[key.strip().lower()] = value.strip()
        elif line.strip():
            numbered.append((number, line))
    rows = list(csv.DictReader([line for _, line in numbered], skipinitialspace=True))
    column = "validation" if metric == "loss" else metric
    for needed in ("tokens", column):
        if not rows or needed not in rows[0]:
            raise ConfigError(f"{path} has no column {needed}. Its first line names the columns: tokens,{column}.")
    places = [f"{path}, line {number}" for number, _ in numbered[1:]]
    tokens = [_number(row["tokens"], "tokens", place) for row, place in zip(rows, places, strict=True)]
    values = [_number(row[column], column, place) for row, place in zip(rows, places, strict=True)]
    if any(later <= earlier for earlier, later in itertools.pairwise(tokens)):
        raise ConfigError(f"{path}: tokens must grow from line to line. Sort the file, a line for each count.")
    named = {key: _only_value(path, key, rows, facts) for key in ("tokenizer", "split")}
    unknown = np.full(len(rows), np.nan)
    none = Points(*(np.empty(0) for _ in range(4)))
    points = Points(np.array(tokens), unknown, unknown, np.array(values))
    return MeasuredRun(Curve(path.name, none, points), named["tokenizer"], named["split"], None)


def _number(text: str | None, column: str, place: str) -> float:
    try:
        value = float((text or "").replace("_", ""))
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{place}: {column} is {text!r}; a number of 0 or more is needed.")
    return value


def _only_value(path: Path, key: str, rows: list[dict[str, str]], facts: dict[str, str]) -> str:
    """The tokenizer or split that a published curve names."""
    values = {row[key].strip() for row in rows if row.get(key)} or {facts.get(key, "")}
    if len(values) > 1 or "" in values:
        found = f"names {len(values)} of them" if len(values) > 1 else "does not say"
        raise ConfigError(f"{path} {found}: which {key}? Give a column {key}, or a first line: # {key}: NAME.")
    return values.pop()


def check_curves(runs: Sequence[MeasuredRun], metric: str, over: Sequence[Axis]) -> list[str]:
    """Notices on what limits the comparison with the first run.

    Raises:
        ContractError: losses per token under different tokenizers, on different splits or windows.
        ConfigError: a published curve over anything but tokens.
    """
    if set(over) != {"tokens"} and any(run.windows is None for run in runs):
        raise ConfigError(f"A published curve has tokens only, no {over[0]}. Compare at equal tokens: --over tokens.")
    notices = []
    base = runs[0]
    for run in runs[1:]:
        pair = f"{base.curve.name} and {run.curve.name}"
        differing = [
            f"their {what}s are {_short(mine)} and {_short(theirs)}"
            for what, mine, theirs in (
                ("tokenizer", base.tokenizer, run.tokenizer),
                ("validation split", base.split, run.split),
            )
            if not _same(mine, theirs)
        ]
        if run.windows is not None and run.windows != base.windows:
            differing.append(f"their validation windows are {_words(base.windows)} and {_words(run.windows)}")
        if not differing:
            continue
        if metric == "loss":
            raise ContractError(f"{pair} cannot be compared in nats per token: {'; '.join(differing)}. {_BITS}")
        notices.append(f"{pair}: {'; '.join(differing)}. Bits per byte compares them as far as their texts are alike.")
    return notices


def _same(mine: str, theirs: str) -> bool:
    """Equal, or a hash that a published curve abbreviates."""
    return mine == theirs or (len(theirs) >= _HASH_SHOWN and mine.startswith(theirs))


def _short(name: str) -> str:
    is_hash = len(name) == 64 and set(name) <= set("0123456789abcdef")
    return name[:_HASH_SHOWN] if is_hash else repr(name)


def _words(windows: dict[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (windows or {}).items())


def curve_report(runs: Sequence[MeasuredRun], metric: str, notices: Sequence[str]) -> dict[str, Any]:
    """What the curves end in, and where each reaches the last value of the first.

    Returns:
        `metric`, `baseline` (name), `notices`, `curves` [{name, published, tokens, flops, hours, training (mean over
        the last tenth of the updates), validation, reached, at_equal_tokens}]. `reached` {of, value, tokens, flops,
        hours, baseline_tokens} is the first evaluation (update, where there are none) at or below the baseline's last
        value, or None; `at_equal_tokens` {tokens, baseline, value} is where the shorter of the two ends.
    """
    base = runs[0]
    found = []
    for run in runs:
        curve = run.curve
        longest = curve.training if len(curve.training) else curve.validation
        row = {"name": curve.name, "published": run.windows is None, **_place(longest, -1)}
        last = curve.training.values[-max(1, len(curve.training) // 10) :]
        row["training"] = float(last.mean()) if len(last) else None
        row["validation"] = float(curve.validation.values[-1]) if len(curve.validation) else None
        if run is not base:
            row["reached"] = _reached(base.curve, curve)
            row["at_equal_tokens"] = _at_equal_tokens(base.curve.validation, curve.validation)
        found.append(row)
    return {"metric": metric, "baseline": base.curve.name, "notices": list(notices), "curves": found}


def _place(points: Points, index: int) -> dict[str, Any]:
    flops, hours = (float(places[index]) for places in (points.flops, points.hours))
    return {
        "tokens": int(points.tokens[index]),
        "flops": None if np.isnan(flops) else flops,
        "hours": None if np.isnan(hours) else hours,
    }


def _reached(base: Curve, curve: Curve) -> dict[str, Any] | None:
    kind = "validation" if len(base.validation) and len(curve.validation) else "training"
    mine, theirs = getattr(base, kind), getattr(curve, kind)
    if not len(mine) or not len(theirs):
        return None
    value = float(mine.values[-1])
    below = np.flatnonzero(theirs.values <= value)
    if not len(below):
        return None
    reached = _place(theirs, int(below[0]))
    return {"of": kind, "value": value, **reached, "baseline_tokens": int(mine.tokens[-1])}


def _at_equal_tokens(base: Points, points: Points) -> dict[str, Any] | None:
    """Both at the last tokens that both have; between two evaluations, on the straight line from one to the next."""
    if not len(base) or not len(points):
        return None
    tokens = min(base.tokens[-1], points.tokens[-1])
    if tokens < max(base.tokens[0], points.tokens[0]):
        return None
    at = [float(np.interp(tokens, one.tokens, one.values)) for one in (base, points)]
    return {"tokens": int(tokens), "baseline": at[0], "value": at[1]}


def curve_lines(report: dict[str, Any]) -> list[str]:
    """The table, and what it says of each run beside the baseline."""
    curves = report["curves"]
    width = max(4, *(len(row["name"]) for row in curves))
    unit = UNITS[report["metric"]]
    lines = [*report["notices"], f"last values, {unit}"]
    lines.append(f"{'run':<{width}}  {'tokens':>15}  {'FLOPs':>9}  {'hours':>8}  {'training':>8}  {'validation':>10}")
    for row in curves:
        lines.append(
            f"{row['name']:<{width}}  {row['tokens']:>15,}  {_cell(row['flops'], '.2e'):>9}  "
            f"{_cell(row['hours'], '.3f'):>8}  {_cell(row['training'], '.4f'):>8}  "
            f"{_cell(row['validation'], '.4f'):>10}"
        )
    for row in curves[1:]:
        lines += _sentences(row, report["baseline"])
    return lines


def _sentences(row: dict[str, Any], baseline: str) -> list[str]:
    lines = []
    if (found := row["reached"]) is None:
        lines.append(f"{row['name']} does not reach the last value of {baseline} in its {row['tokens']:,} tokens.")
    else:
        lines.append(
            f"{row['name']} reaches the last {found['of']} value of {baseline}, {found['value']:.4f}, at "
            f"{found['tokens']:,} tokens; {baseline} took {found['baseline_tokens']:,}."
        )
    if (equal := row["at_equal_tokens"]) is not None:
        lines.append(
            f"at {equal['tokens']:,} tokens: {row['name']} {equal['value']:.4f}, {baseline} {equal['baseline']:.4f}"
        )
    return lines


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
