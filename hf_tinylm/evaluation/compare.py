"""Two models on the same items: the difference, how sure it is, and what a reader may conclude."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ConfigError, ContractError
from .harness import PREFIX

RESAMPLES = 10_000
_SAME_TEXT = "Score both on the same raw text in bits per byte: hf-tinylm eval --compare A B --text FILE"

Report = dict[str, Any]
Records = list[dict[str, Any]]
Columns = tuple[np.ndarray, np.ndarray]  # (n,) numerators and denominators: a metric is sum over sum


def compare(
    a: tuple[Report, Records], b: tuple[Report, Records], metric: str | None = None, seed: int = 0
) -> dict[str, Any]:
    """Compare two reports with their records, item by item.

    Args:
        metric: one of the results that both have; None: all that can be compared.
        seed: of the bootstrap.

    Returns:
        `suite`, `items`, `a`, `b` (names), `notice` (what cannot be compared, or None), `results` {metric: {a, b,
        difference (b - a), interval (95%), better ("a", "b" or None), sentence}}.

    Raises:
        ContractError: other items, another rule (of lm-eval: release, task version, few-shot examples), or a loss per
            token under different tokenizers.
        ConfigError: a metric that they do not have, or fewer than two items.
    """
    (first, first_records), (second, second_records) = a, b
    same_ids = _check_comparable(first, second)
    available = {name: of for name, of in _metrics(first, first_records).items() if name in _metrics(*b)}
    notice = None
    if "loss" in available and not same_ids:
        notice = (
            "A and B cut the text into different tokens: their losses per token do not compare. Bits per byte does."
        )
        del available["loss"]
        if metric == "loss":
            raise ContractError(f"{notice} Ask for it: --metric bits_per_byte.")
    if not available:
        raise ConfigError(f"No metric of {first['model']} on {first['suite']} is a mean over items: nothing compares.")
    if metric is not None and metric not in available:
        raise ConfigError(f"--metric {metric} cannot be compared here; {', '.join(available) or 'nothing'} can.")
    if len(first_records) < 2 or len(first_records) != len(second_records):
        raise ConfigError(f"{len(first_records):,} and {len(second_records):,} items; two or more of each are needed.")
    results = {}
    for name in [metric] if metric else available:
        columns_a, columns_b = available[name](first_records), available[name](second_records)
        results[name] = _difference(name, columns_a, columns_b, seed, _higher_is_better(first, name))
    return {
        **{"suite": first["suite"], "items": len(first_records), "a": first["model"], "b": second["model"]},
        **{"notice": notice, "resamples": RESAMPLES, "seed": seed, "results": results},
    }


def paired_bootstrap(a: Columns, b: Columns, seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95% percentile interval of metric(b) - metric(a) when items are drawn again, the same ones for both.

    Source: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13.
    """
    generator, items = np.random.default_rng(seed), len(a[0])
    table = np.stack([*a, *b], axis=1).astype(np.float64)  # (n, 4)
    differences = np.empty(resamples)
    for number in range(resamples):
        counts = np.bincount(generator.integers(items, size=items), minlength=items)
        sums = counts @ table
        differences[number] = sums[2] / sums[3] - sums[0] / sums[1]
    low, high = np.quantile(differences, [0.025, 0.975])
    return float(low), float(high)


def _check_comparable(a: Report, b: Report) -> bool:
    """Whether both read the same ids.

    Raises:
        ContractError: other items or another rule.
    """
    if a["items_sha256"] != b["items_sha256"] or a["suite"] != b["suite"]:
        raise ContractError(
            f"{a['model']} was scored on {a['items']:,} items of {a['suite']} and {b['model']} on {b['items']:,} of "
            f"{b['suite']}: these are not the same items, so neither losses nor accuracies compare. {_SAME_TEXT}"
        )
    if a.get("rule") != b.get("rule"):
        raise ContractError(
            f"The two were scored under different rules ({a.get('rule')} and {b.get('rule')}). Score both with the "
            "same suite file, --window and --stride, or with the same release of lm-eval, task version and few-shot "
            "examples."
        )
    for report in (a, b):
        if _of_harness(report) and "higher_is_better" not in report:
            raise ContractError(
                f"The report of {report['model']} on {report['suite']} does not say which task version and how many "
                "few-shot examples it is of: an earlier version of hf-tinylm wrote it. Score that model again."
            )
    return bool(a["ids_sha256"] == b["ids_sha256"])


def _of_harness(report: Report) -> bool:
    return str(report["suite"]).startswith(PREFIX)


def _metrics(report: Report, records: Records) -> dict[str, Callable[[Records], Columns]]:
    """How each metric is made of the records."""
    if _of_harness(report):
        return {name: _columns_of(_value(name)) for name in report["results"] if _is_mean(report, records, name)}
    if records and "chosen" in records[0]:
        return {f"accuracy_{rule}": _columns_of(_is_right(rule)) for rule in records[0]["chosen"]}
    if records and "greedy" in records[0]:
        return {"exact_match": _columns_of(lambda record: record["greedy"][0])}
    found = {}
    if records and "nats" in records[0]:
        found["loss"] = _columns_of(lambda record: record["nats"], lambda record: record["tokens"])
        if "bits_per_byte" in report["results"]:
            found["bits_per_byte"] = _columns_of(
                lambda record: record["nats"] / math.log(2), lambda record: record["bytes"]
            )
    return found


def _is_mean(report: Report, records: Records, name: str) -> bool:
    """Whether a metric of lm-eval is the mean of what its items have, and it says which way is better.

    Perplexities, F1 over all items and the like are no such means; items cannot be drawn again for them.
    """
    values = [record.get(name) for record in records]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if not numbers or len(numbers) < len(values) or report["higher_is_better"].get(name) is None:
        return False
    return math.isclose(math.fsum(numbers) / len(numbers), report["results"][name]["value"], rel_tol=1e-6, abs_tol=1e-9)


def _value(name: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: float(record[name])


def _higher_is_better(report: Report, name: str) -> bool:
    if _of_harness(report):
        return bool(report["higher_is_better"][name])
    return name.startswith(("accuracy", "exact_match"))


def _is_right(rule: str) -> Callable[[dict[str, Any]], float]:
    return lambda record: float(record["chosen"][rule] == record["label"])


def _columns_of(
    numerator: Callable[[dict[str, Any]], float], denominator: Callable[[dict[str, Any]], float] = lambda record: 1.0
) -> Callable[[Records], Columns]:
    def columns(records: Records) -> Columns:
        return np.array([float(numerator(r)) for r in records]), np.array([float(denominator(r)) for r in records])

    return columns


def _difference(name: str, a: Columns, b: Columns, seed: int, higher_is_better: bool) -> dict[str, Any]:
    value_a, value_b = float(a[0].sum() / a[1].sum()), float(b[0].sum() / b[1].sum())
    low, high = paired_bootstrap(a, b, seed)
    better = None
    if low > 0 or high < 0:
        better = "b" if (low > 0) is higher_is_better else "a"
    return {
        **{"a": value_a, "b": value_b, "difference": value_b - value_a, "interval": [low, high], "better": better},
        "sentence": _sentence(name, value_b - value_a, (low, high), better, len(a[0])),
    }


def _sentence(name: str, difference: float, interval: tuple[float, float], better: str | None, items: int) -> str:
    found = f"{name} of B minus A is {difference:+.4f} (95% interval {interval[0]:+.4f} to {interval[1]:+.4f})"
    if better is None:
        return f"{found}: these {items:,} items do not tell A and B apart."
    return f"{found}: {better.upper()} is better on items like these {items:,}; another training seed may differ."
