"""Short branches that differ in a few settings, one after another, each a real run of the recipe in its own folder.

OUT/sweep/ learning_rate=3e-4/      a run's folder
           learning_rate=3e-4.log   what its process printed
           sweep.json  sweep.png    the table, and all curves on the same axes
"""

from __future__ import annotations

import itertools
import re
import signal
import statistics
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config import SECTION_OF_KEY, SECTIONS, load_config, parse_overrides
from ..contract import DONE_FILE, METRICS, RUN_FILE, SWEEP
from ..errors import ConfigError, RunStopped
from ..files import bundled, read_rows, write_json
from ..planning.speed import Assumptions
from ..planning.whole import make_plan
from ..values import accepts

_STOPPED = {3, 130, 143, -signal.SIGINT, -signal.SIGTERM}


@dataclass(frozen=True)
class Branch:
    """One combination of settings: its name, the swept values as typed, its arguments, and its folder."""

    name: str
    values: dict[str, str]
    arguments: list[str]
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """A row of the table. Losses are nats per token; `loss` is the mean over the last tenth of the updates."""

    name: str
    values: dict[str, str]
    status: str
    updates: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    error: str | None = None

    @property
    def score(self) -> float | None:
        """What branches are compared by: validation where there is one."""
        return self.loss if self.eval_loss is None else self.eval_loss


def branches_of(config: str, overrides: Sequence[str]) -> list[Branch]:
    """The branches that keys with several values span; keys with one value are the same in all of them.

    Raises:
        ConfigError: nothing is swept, a value is wrong, or a branch would be refused by the trainer.
    """
    swept, common = _split(overrides)
    if not swept:
        raise ConfigError("Nothing to compare: give one key several values, such as --learning_rate 3e-4 6e-4 1.2e-3.")
    base = load_config(config, common)
    if base.training.output_dir is None:
        raise ConfigError("output_dir is missing. Give the folder that the sweep is put in: --output_dir runs/NAME.")
    root = Path(base.training.output_dir) / SWEEP
    defaults = [] if "gguf" in parse_overrides(common) else ["--gguf", "[]", "--verify", "false"]
    if base.training.mirror_dir is not None:
        raise ConfigError("The branches of a sweep have no mirror. Leave mirror_dir out, or give --mirror_dir null.")
    branches = []
    for values in itertools.product(*swept.values()):
        named = dict(zip(swept, values, strict=True))
        name = ",".join(f"{key}={re.sub(r'[^A-Za-z0-9_.+-]', '_', value)}" for key, value in named.items())
        arguments = [*common, *(part for key, value in named.items() for part in (f"--{key}", value)), *defaults]
        branches.append(_checked(config, Branch(name, named, arguments, root / name)))
    names = [branch.name for branch in branches]
    if len(set(names)) < len(names):
        raise ConfigError(f"Two branches are the same: {', '.join(names)}. Give each value once.")
    return branches


def _split(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Keys with several values, as typed, and the arguments of the others. A key that holds a list is never swept."""
    groups: list[list[str]] = []
    for argument in overrides:
        if argument.startswith("--") or not groups:
            groups.append([argument])
        else:
            groups[-1].append(argument)
    swept: dict[str, list[str]] = {}
    common: list[str] = []
    for option, *values in groups:
        if len(values) < 2:
            common += [option, *values]
            continue
        key = next(iter(parse_overrides([option, values[0]])))
        if accepts(typing.get_type_hints(SECTIONS[SECTION_OF_KEY[key]])[key], list):
            common += [option, *values]
        else:
            swept[key] = values
    return swept, common


def _checked(config: str, branch: Branch) -> Branch:
    """The branch, evaluated after its last update too; every branch is checked before the first one starts."""
    found = load_config(config, [*branch.arguments, "--output_dir", str(branch.folder)])
    plan = make_plan(found, Assumptions())
    if plan["problems"]:
        raise ConfigError(f"{branch.name}: {plan['problems'][0]}")
    updates, every = plan["updates"], found.training.eval_steps
    if updates and (not every or updates % every):
        branch.arguments.extend(["--eval_steps", str(updates)])
    return branch


def run_sweep(branches: Sequence[Branch], config: str, tell: Callable[[str], None]) -> list[Outcome]:
    """Run every branch that is not finished, going on where one was interrupted; a row for each.

    A branch that fails is a row with its error, and the others go on.

    Raises:
        RunStopped: a signal or a budget ended a branch; the same command goes on from there.
    """
    root = branches[0].folder.parent
    root.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for number, branch in enumerate(branches, start=1):
        place = f"branch {number} of {len(branches)}: {branch.name}"
        if (branch.folder / DONE_FILE).is_file():
            tell(f"{place}: finished before")
            outcomes.append(_outcome(branch, "finished", None))
            continue
        resumed = (branch.folder / RUN_FILE).is_file()
        tell(f"{place}: {'goes on' if resumed else 'starts'}, log in {_log(branch)}")
        outcomes.append(_run(branch, config, resumed))
        tell(f"{place}: {outcomes[-1].status}{f' ({outcomes[-1].error})' if outcomes[-1].error else ''}")
        write_json(root / "sweep.json", [asdict(outcome) for outcome in outcomes])
    write_json(root / "sweep.json", [asdict(outcome) for outcome in outcomes])
    return outcomes


def _run(branch: Branch, config: str, resumed: bool) -> Outcome:
    command = [sys.executable, str(bundled("recipes", "pretrain.py")), "--config", config]
    command += ["--preflight", "false", *branch.arguments]  # a rate that does not learn is a result here
    command += ["--output_dir", str(branch.folder)]
    command += ["--resume_from_checkpoint", "auto"] if resumed else []
    with _log(branch).open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, bufsize=0)
        assert process.stderr is not None
        with _passing_signals_on(process):
            for chunk in iter(lambda: process.stderr.read(8192), b""):  # type: ignore[union-attr]
                log.write(chunk)
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
            code = process.wait()
    if code in _STOPPED:
        raise RunStopped(
            f"The sweep was ended in branch {branch.name}. The same command goes on from there.",
            128 - code if code < 0 else code,
        )
    if code:
        told = re.findall(r"error: (.+)", _log(branch).read_text(errors="replace"))  # may stand behind a progress bar
        return _outcome(branch, "failed", told[-1] if told else f"exit code {code}")
    return _outcome(branch, "finished", None)


@contextmanager
def _passing_signals_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A signal is the running branch's affair: it saves and ends with the signal's exit code, and so does the sweep."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, frame: process.send_signal(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log(branch: Branch) -> Path:
    return branch.folder.with_name(f"{branch.name}.log")


def _outcome(branch: Branch, status: str, error: str | None) -> Outcome:
    rows = read_rows(branch.folder / METRICS)
    updates = [row for row in rows if "loss" in row]
    evaluations = [row["eval_loss"] for row in rows if "eval_loss" in row]
    last = updates[-max(1, len(updates) // 10) :]
    return Outcome(
        branch.name,
        branch.values,
        status,
        updates=updates[-1]["step"] if updates else 0,
        loss=statistics.fmean(row["loss"] for row in last) if last else None,
        eval_loss=evaluations[-1] if evaluations and status == "finished" else None,
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in updates) if updates else None,
        error=error,
    )


def sweep_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The table, and which branch was best."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"{'branch':<{width}}  {'updates':>8}  {'loss':>8}  {'validation':>10}  {'tokens/s':>9}  status"]
    for row in outcomes:
        lines.append(
            f"{row.name:<{width}}  {row.updates:>8,}  {_number(row.loss):>8}  {_number(row.eval_loss):>10}  "
            f"{row.tokens_per_second or 0:>9,.0f}  {row.status}{f': {row.error}' if row.error else ''}"
        )
    return [*lines, *_verdict(outcomes)]


def _verdict(outcomes: Sequence[Outcome]) -> list[str]:
    ranked = sorted((row for row in outcomes if row.status == "finished" and row.score is not None), key=_score_of)
    if not ranked:
        return ["no branch finished"]
    ahead = "" if len(ranked) < 2 else f", {_score_of(ranked[1]) - _score_of(ranked[0]):.4f} ahead of the next"
    return [
        f"lowest: {ranked[0].name} at {_score_of(ranked[0]):.4f} nats per token{ahead}",
        "One seed each is no proof: repeat with another --seed before you rely on a small difference, and remember "
        "that a short branch favours higher rates than a long run.",
    ]


def _score_of(outcome: Outcome) -> float:
    assert outcome.score is not None
    return outcome.score


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def plot_sweep(branches: Sequence[Branch], picture: Path) -> None:
    """All training losses against tokens on the same axes, validations as marks, as a PNG."""
    from ..training.curves import curve_of, draw_losses

    curves = [curve_of(branch.name, read_rows(branch.folder / METRICS)) for branch in branches]
    draw_losses(curves, picture)
