"""A difference with its interval, the sentence it allows, and what is refused because it does not compare."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.errors import ConfigError, ContractError
from hf_tinylm.evaluation.compare import compare, paired_bootstrap
from hf_tinylm.evaluation.report import load_report

Saved = tuple[dict[str, Any], list[dict[str, Any]]]


def choices(model: str, right: list[bool], **changes: Any) -> Saved:
    report = {
        **{"model": model, "suite": "hellaswag", "items": len(right), "items_sha256": "i", "ids_sha256": "t"},
        **{"rule": {"cleanup": "none"}, "results": {"accuracy_sum": {}}},
    }
    return {**report, **changes}, [{"label": 1, "chosen": {"sum": int(hit)}} for hit in right]


def text(model: str, nats: list[float], tokens: list[int], ids: str = "t", **changes: Any) -> Saved:
    report = {
        **{"model": model, "suite": "text:a", "items": len(nats), "items_sha256": "i", "ids_sha256": ids},
        **{"rule": {"window": 8}, "results": {"loss": {}, "bits_per_byte": {}}},
    }
    rows = [{"nats": n, "tokens": t, "bytes": 10} for n, t in zip(nats, tokens, strict=True)]
    return {**report, **changes}, rows


def test_the_interval_of_a_paired_difference_is_that_of_the_normal_formula() -> None:
    generator = np.random.default_rng(0)
    a = (generator.random(2000) < 0.30).astype(float)
    b = np.where(generator.random(2000) < 0.9, a, 1 - a)  # mostly the same items right
    ones = np.ones(2000)
    low, high = paired_bootstrap((a, ones), (b, ones), seed=1, resamples=4000)
    difference = b - a
    half = 1.96 * difference.std(ddof=1) / math.sqrt(2000)
    assert low == pytest.approx(difference.mean() - half, abs=0.06 * half)
    assert high == pytest.approx(difference.mean() + half, abs=0.06 * half)
    unpaired = 1.96 * math.sqrt((a.var() + b.var()) / 2000)
    assert half < 0.6 * unpaired  # the same items are drawn for both
    assert paired_bootstrap((a, ones), (b, ones), seed=1, resamples=4000) == (low, high)
    assert paired_bootstrap((a, ones), (b, ones), seed=2, resamples=4000) != (low, high)


def test_a_ratio_is_resampled_as_a_ratio_of_sums() -> None:
    nats_a, nats_b, tokens = np.array([30.0, 2.0]), np.array([60.0, 2.0]), np.array([30.0, 1.0])
    low, high = paired_bootstrap((nats_a, tokens), (nats_b, tokens), seed=0)
    # drawing (first, first), both, or (second, second): 2 - 1, 62/31 - 32/31, and 2 - 2
    assert (low, high) == pytest.approx((0.0, 1.0))


def test_the_sentence_names_the_better_one_only_when_zero_is_outside() -> None:
    weak, strong = [True] * 20 + [False] * 80, [True] * 60 + [False] * 40
    found = compare(choices("a", weak), choices("b", strong))
    result = found["results"]["accuracy_sum"]
    assert (result["a"], result["b"], result["better"]) == (0.2, 0.6, "b")
    assert result["difference"] == pytest.approx(0.4)
    assert result["sentence"].startswith("accuracy_sum of B minus A is +0.4000 (95% interval +0.3")
    assert "B is better on items like these 100; another training seed may differ." in result["sentence"]
    assert compare(choices("a", strong), choices("b", weak))["results"]["accuracy_sum"]["better"] == "a"
    nearly = compare(choices("a", weak), choices("b", [True] * 21 + [False] * 79))["results"]["accuracy_sum"]
    assert nearly["better"] is None
    assert nearly["sentence"].endswith("these 100 items do not tell A and B apart.")


def test_a_lower_loss_is_better() -> None:
    a, b = text("a", [20.0, 22.0, 21.0], [10, 10, 10]), text("b", [10.0, 11.0, 10.0], [10, 10, 10])
    results = compare(a, b)["results"]
    assert set(results) == {"loss", "bits_per_byte"}
    assert results["loss"]["better"] == results["bits_per_byte"]["better"] == "b"
    assert results["loss"]["difference"] == pytest.approx(31 / 30 - 63 / 30)
    assert results["bits_per_byte"]["a"] == pytest.approx(63 / math.log(2) / 30)


def test_losses_under_different_tokenizers_are_refused_and_bits_per_byte_is_offered() -> None:
    a, b = text("a", [20.0, 22.0], [10, 10]), text("b", [19.0, 20.0], [5, 5], ids="other")
    found = compare(a, b)
    assert set(found["results"]) == {"bits_per_byte"}
    assert "losses per token do not compare" in found["notice"]
    with pytest.raises(ContractError, match=r"do not compare.*--metric bits_per_byte"):
        compare(a, b, "loss")
    assert compare(a, text("b", [19.0, 20.0], [10, 10]))["notice"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items_sha256": "other"}, r"not the same items.*--compare A B --text FILE"),
        ({"suite": "piqa"}, "not the same items"),
        ({"rule": {"cleanup": "wikihow_brackets"}}, "under different rules"),
    ],
)
def test_other_items_or_another_rule_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        compare(choices("a", [True, False]), choices("b", [True, False], **changes))


def test_an_unknown_metric_and_a_single_item_are_refused() -> None:
    with pytest.raises(ConfigError, match="--metric loss cannot be compared here; accuracy_sum can"):
        compare(choices("a", [True, False]), choices("b", [True, False]), "loss")
    with pytest.raises(ConfigError, match="two or more"):
        compare(choices("a", [True]), choices("b", [True]))


def harness(model: str, right: list[float], nats: list[float], **changes: Any) -> Saved:
    """As `eval --suite lm-eval:lambada_openai` writes it: accuracy is a mean over items, perplexity is none."""
    mean, perplexity = sum(right) / len(right), math.exp(sum(nats) / len(nats))
    report = {
        **{"model": model, "suite": "lm-eval:lambada_openai", "items": len(right), "items_sha256": "i"},
        **{"ids_sha256": None, "higher_is_better": {"acc": True, "perplexity": False, "cost": False, "odd": None}},
        "rule": {"task": "lambada_openai", "lm_eval": "0.4.13", "task_version": 1.0, "few_shot": 0},
        "results": {
            **{"acc": {"value": mean}, "perplexity": {"value": perplexity}},
            **{"cost": {"value": sum(nats) / len(nats)}, "odd": {"value": mean}},
        },
    }
    rows = [
        {"item": n, "acc": hit, "perplexity": -loss, "cost": loss, "odd": hit}
        for n, (hit, loss) in enumerate(zip(right, nats, strict=True))
    ]
    return {**report, **changes}, rows


def test_reports_of_lm_eval_compare_where_a_metric_is_a_mean_over_items() -> None:
    weak, strong = [1.0] * 20 + [0.0] * 80, [1.0] * 60 + [0.0] * 40
    found = compare(harness("a", weak, [5.0] * 50 + [6.0] * 50), harness("b", strong, [3.0] * 50 + [2.0] * 50))
    assert set(found["results"]) == {"acc", "cost"}  # no perplexity, and nothing whose direction lm-eval leaves open
    acc, cost = found["results"]["acc"], found["results"]["cost"]
    assert (acc["a"], acc["b"], acc["better"]) == (0.2, 0.6, "b")
    assert (cost["difference"], cost["better"]) == (-3.0, "b")
    ones = np.ones(100)
    assert tuple(acc["interval"]) == paired_bootstrap((np.array(weak), ones), (np.array(strong), ones), seed=0)
    with pytest.raises(ConfigError, match="--metric perplexity cannot be compared here; acc, cost can"):
        compare(harness("a", weak, [5.0] * 100), harness("b", strong, [3.0] * 100), "perplexity")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"items_sha256": "j", "items": 50}, "was scored on 4 items of .* and b on 50 of"),
        ({"suite": "lm-eval:piqa"}, "these are not the same items"),
        ({"rule": {"task": "lambada_openai", "lm_eval": "0.4.13", "task_version": 2.0, "few_shot": 0}}, "task version"),
        ({"rule": {"task": "lambada_openai", "lm_eval": "0.4.13", "task_version": 1.0, "few_shot": 5}}, "few-shot"),
        ({"rule": {"task": "lambada_openai", "lm_eval": "0.4.9", "task_version": 1.0, "few_shot": 0}}, "release"),
    ],
)
def test_reports_of_lm_eval_that_do_not_compare_are_refused(changes: dict[str, Any], told: str) -> None:
    right, nats = [1.0, 0.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ContractError, match=told):
        compare(harness("a", right, nats), harness("b", right, nats, **changes))


def test_reports_of_lm_eval_of_an_earlier_version_or_without_means_are_refused() -> None:
    right, nats = [1.0, 0.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]
    old = [harness(name, right, nats) for name in "ab"]
    for report, _ in old:
        del report["higher_is_better"]
    with pytest.raises(ContractError, match=r"does not say which task version.*Score that model again"):
        compare(*old)
    bare = [harness(name, right, nats, results={"perplexity": {"value": 12.0}}) for name in "ab"]
    with pytest.raises(ConfigError, match="No metric of a on lm-eval:lambada_openai is a mean over items"):
        compare(*bare)


def test_a_file_that_lm_eval_wrote_itself_is_refused_with_what_to_type(tmp_path: Path) -> None:
    file = tmp_path / "results_2026.json"
    file.write_text('{"results": {"piqa": {}}, "versions": {"piqa": 1.0}, "n-shot": {"piqa": 0}}')
    with pytest.raises(ConfigError, match=r"was written by lm-eval itself.*--suite lm-eval:TASK"):
        load_report(file)
