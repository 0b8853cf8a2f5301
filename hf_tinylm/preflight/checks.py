"""What a check is, and how checks are run: one after another, timed, and agreed on by all processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RunStopped

Gather = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Finding:
    """What a check measured. `value` and `expected` are numbers or words, `detail` lines for people."""

    ok: bool
    value: Any
    expected: Any
    detail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A check before it is run.

    Attributes:
        run: measures something of the run that it is given.
        meaning: what a failure usually means.
        needs: checks without whose success this one would say nothing; it is then not run.
        on_resume: cheap and true of a run that is under way, so that a resume repeats it.
    """

    name: str
    run: Callable[[Any], Finding]
    meaning: str
    needs: tuple[str, ...] = ()
    on_resume: bool = False


@dataclass(frozen=True)
class Check:
    """A check that was run: `ok` is None when it was not, since one that it needs has failed or it does not apply."""

    name: str
    ok: bool | None
    value: Any
    expected: Any
    meaning: str
    seconds: float
    detail: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, `detail` as a list."""
        return {**asdict(self), "detail": list(self.detail)}


def rule(
    name: str, meaning: str, needs: tuple[str, ...] = (), on_resume: bool = False
) -> Callable[[Callable[[Any], Finding]], Rule]:
    """Make a `Rule` of the function below."""
    return lambda run: Rule(name, run, meaning, needs, on_resume)


def run_rules(
    rules: Iterable[Rule], subject: Any, before: Sequence[Check] = (), gather: Gather = lambda own: [own]
) -> list[Check]:
    """Run `rules` on `subject` in their order.

    Args:
        before: checks that were run already; rules may need them.
        gather: gives the list of what each process passes in, in rank order. A check passes if it does everywhere.

    Raises:
        RunStopped: a signal came.
    """
    passed = {check.name: check.ok for check in before}
    checks = []
    for each in rules:
        failed = [name for name in each.needs if passed.get(name, True) is not True]
        check = _not_run(each, failed[0]) if failed else _run(each, subject, gather)
        passed[each.name] = check.ok
        checks.append(check)
    return checks


def not_run(rules: Iterable[Rule], failed: str) -> list[Check]:
    """The checks of `rules` when `failed` leaves nothing to run them on."""
    return [_not_run(each, failed) for each in rules]


def none_failed(checks: Iterable[Check]) -> bool:
    """Whether every check that was run has passed."""
    return not any(check.ok is False for check in checks)


def _not_run(each: Rule, failed: str) -> Check:
    return Check(each.name, None, f"not run: {failed} failed", "", each.meaning, 0.0)


def _run(each: Rule, subject: Any, gather: Gather) -> Check:
    began = time.monotonic()
    try:
        own = each.run(subject)
    except RunStopped:
        raise
    except Exception as error:  # whatever breaks here would break the run: it is what the check has found
        own = Finding(False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "no error")
    found = gather(own)
    worst = next((rank for rank, finding in enumerate(found) if not finding.ok), 0)
    value = found[worst].value if len(found) == 1 or found[worst].ok else f"process {worst}: {found[worst].value}"
    seconds = round(time.monotonic() - began, 3)
    return Check(each.name, found[worst].ok, value, found[worst].expected, each.meaning, seconds, found[worst].detail)
