"""The metrics of this package: local `evaluate` modules under eval/, which hold the only copy of the arithmetic."""

from __future__ import annotations

import functools
from typing import Any

from ..files import bundled


@functools.cache
def metric(name: str) -> Any:
    """The `evaluate` module eval/NAME, opened without a network.

    Its `compute` keeps what it is given in memory.
    """
    import evaluate

    return evaluate.load(str(bundled("eval", name)), keep_in_memory=True)


def compute(name: str, **inputs: Any) -> dict[str, Any]:
    """What the module `name` computes of `inputs`."""
    return dict(metric(name).compute(**inputs))


def result(found: dict[str, Any], name: str, rule: str) -> dict[str, Any]:
    """`value`, `stderr`, `interval` (95%) and `rule` of one number that a module computed."""
    return {
        "value": found[name],
        "stderr": found.get(f"{name}_stderr"),
        "interval": found.get(f"{name}_interval"),
        "rule": rule,
    }
