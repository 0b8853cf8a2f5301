"""Each diagnosis on rows made by hand; tests/docs runs them on real runs with planted faults."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.cli import main
from hf_tinylm.monitor.diagnosis import NAMES, findings
from hf_tinylm.monitor.history import History, history_of
from hf_tinylm.monitor.run import Run

COUNT = 400
DOCS = Path(__file__).parents[2] / "docs"


def curve(count: int = COUNT) -> np.ndarray:
    """A healthy loss from ln 1,000 to about 4, with a little noise."""
    noise = np.random.default_rng(0).normal(0, 0.03, count)
    return 3.8 + 3.2 / (1 + np.arange(count) / 12) + noise


def history(**changed: Any) -> History:
    """A healthy finished run of 400 updates; keys of metrics.jsonl or fields of History are changed."""
    count = len(changed.get("loss", curve()))
    places = np.arange(count, dtype=np.float64)
    columns = {
        "step": places + 1,
        "supervised_tokens": 1_000 * (places + 1),
        "loss": curve(count),
        "learning_rate": 1e-3 * (1 - 0.9 * places / count),
        "grad_norm": 0.5 + np.random.default_rng(1).uniform(0, 0.2, count),
        "seconds": np.full(count, 0.9),
        "data_seconds": np.full(count, 0.05),
        "wall_seconds": places + 1,
        "tokens_per_second": np.full(count, 1_000.0),
        "mfu": np.full(count, 0.4),
        "gradient_signal": np.random.default_rng(6).normal(1, 0.5, count),
        "gradient_noise": np.random.default_rng(7).normal(2_000, 500, count),  # a noise scale of 2,000 tokens
        "noise_scale": np.full(count, np.nan),
    }
    columns |= {key: np.asarray(changed.pop(key), dtype=np.float64) for key in list(changed) if key in columns}
    scored = [{"step": s, "eval_loss": float(columns["loss"][s - 20 : s].mean())} for s in range(40, count + 1, 40)]
    facts: dict[str, Any] = {
        **{"evaluations": scored, "vocab_size": 1_000.0, "updates": float(count), "warmup": 10, "max_grad_norm": 1.0},
        **{"batch_tokens": 1_000.0, "epoch_tokens": 1e9, "finished": True},
    }
    return History(columns, **{**facts, **changed})


def names(found: History) -> set[str]:
    return {one.name for one in findings(found)}


def with_bump(size: float, start: int, end: int) -> np.ndarray:
    losses = curve()
    losses[start:end] += size
    return losses


def norms(*places: int) -> np.ndarray:
    found = np.full(COUNT, 0.5)
    found[list(places)] = 2.5
    return found


def replayed() -> np.ndarray:
    """Every 60 updates the same bumps."""
    return curve() + np.tile(np.random.default_rng(3).normal(0, 0.1, 60), 7)[:COUNT]


def evaluated(gap: Callable[[int], float]) -> list[dict[str, Any]]:
    losses = curve()
    return [{"step": s, "eval_loss": float(losses[s - 20 : s].mean()) + gap(s)} for s in range(40, COUNT + 1, 40)]


def by_source(*losses: float) -> list[dict[str, Any]]:
    scored = evaluated(lambda _: 0.0)
    return [{**row, "eval_loss_by_source": {"a": loss, "b": 4.0}} for row, loss in zip(scored, losses, strict=False)]


def saved(stall: float) -> list[dict[str, Any]]:
    return [{"event": "saved", "step": s, "stall_seconds": stall} for s in (100, 200, 300, 400)]


STRAIGHT = 7.0 - np.arange(COUNT) / COUNT + np.random.default_rng(4).normal(0, 0.01, COUNT)
CLIFFS = curve() - 0.4 * (np.arange(COUNT) // 100)
FLAT = np.concatenate((curve(100), np.full(300, curve(100)[-20:].mean()))) + np.random.default_rng(5).normal(
    0, 0.02, 400
)
UP_AGAIN = np.concatenate((curve(300), np.linspace(4, 6.5, 100)))

# (name, a history with the fault, one that comes near to it)
FAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "first_loss_far_from_uniform",
        {"loss": np.concatenate(([4.0], curve()[1:]))},
        {"loss": np.concatenate(([4.0], curve()[1:])), "branched": True},
    ),
    (
        "loss_too_good",
        {"evaluations": [{"step": 400, "eval_loss": 4.0, "bits_per_byte": 0.2}]},
        {"evaluations": [{"step": 400, "eval_loss": 4.0, "bits_per_byte": 0.6}]},
    ),
    ("loss_too_good", {"loss": curve() * 0.1}, {"loss": curve() * 0.1, "epoch_tokens": 1_000.0, "evaluations": []}),
    ("divergence", {"loss": UP_AGAIN}, {"loss": with_bump(0.3, 300, 400)}),
    (
        "divergence",
        {"events": [{"event": "nonfinite", "step": 400, "action": "stopped"}], "finished": False},
        {"events": [{"event": "nonfinite", "step": 400, "action": "skipped"}]},
    ),
    ("spike_that_recovered", {"loss": with_bump(1.0, 200, 205)}, {"loss": with_bump(0.1, 200, 205)}),
    ("spike_that_stayed", {"loss": with_bump(1.0, 300, 400)}, {"loss": with_bump(1.0, 390, 400)}),
    ("norm_spikes", {"grad_norm": norms(100, 150, 200)}, {"grad_norm": norms(100, 250)}),
    (
        "norm_spikes",
        {"grad_norm": norms(195), "loss": with_bump(1.0, 200, 205)},
        {"grad_norm": norms(100), "loss": with_bump(1.0, 200, 205)},
    ),
    (
        "training_loss_a_multiple",
        {"evaluations": [{"step": 400, "eval_loss": 1.5}]},
        {"evaluations": [{"step": 400, "eval_loss": 3.5}]},
    ),
    ("rate_too_low", {"loss": STRAIGHT}, {"loss": STRAIGHT, "updates": 1_000.0, "finished": False}),
    ("still_falling", {"loss": STRAIGHT}, {"loss": STRAIGHT, "updates": 500.0}),
    (
        "plateau_without_decay",
        {"loss": FLAT, "learning_rate": np.full(400, 1e-3)},
        {"loss": FLAT},
    ),
    (
        "batch_below_noise_scale",
        {"gradient_noise": np.full(400, 14_000.0)},
        {"gradient_noise": np.full(400, 12_000.0), "gradient_signal": np.random.default_rng(6).normal(1, 20, 400)},
    ),
    ("clipping_always", {"grad_norm": norms() * 3}, {"grad_norm": norms() * 3, "max_grad_norm": 0.0}),
    ("clipping_always", {"grad_norm": norms() * 3}, {"grad_norm": np.full(COUNT, 1.12)}),
    (
        "training_and_validation_part",
        {"evaluations": evaluated(lambda s: max(0, s - 200) / 200)},
        {"evaluations": evaluated(lambda s: max(0, s - 200) / 200), "conversations": True},
    ),
    (
        "training_and_validation_part",
        {"evaluations": evaluated(lambda s: max(0, s - 200) / 200)},
        {"evaluations": evaluated(lambda s: 0.6)},  # another text, the same distance throughout
    ),
    ("text_replayed", {"loss": replayed()}, {"loss": curve() + np.random.default_rng(3).normal(0, 0.1, COUNT)}),
    (
        "cliffs_at_epoch_borders",
        {"loss": CLIFFS, "epoch_tokens": 1e5},
        {"loss": CLIFFS, "epoch_tokens": 0.7e5},
    ),
    (
        "source_loss_rises",
        {"evaluations": by_source(5, 4.5, 4.2, 4.3, 4.4, 4.5, 4.6, 4.7, 4.8, 4.9)},
        {"evaluations": by_source(5, 4.5, 4.2, 4.1, 4.0, 3.9, 3.9, 3.9, 3.8, 3.85)},
    ),
    (
        "throughput_drop",
        {"tokens_per_second": np.where(np.arange(COUNT) < 300, 1_000, 450)},
        {"tokens_per_second": np.where(np.arange(COUNT) < 300, 1_000, 550)},
    ),
    ("input_starvation", {"data_seconds": np.full(COUNT, 0.5)}, {"data_seconds": np.full(COUNT, 0.2)}),
    ("checkpoints_cost", {"events": saved(20.0)}, {"events": saved(5.0)}),
    ("mfu_too_low", {"mfu": np.full(COUNT, 0.1)}, {"mfu": np.full(COUNT, np.nan)}),
    ("mfu_too_high", {"mfu": np.full(COUNT, 0.7)}, {"mfu": np.full(COUNT, 0.55)}),
]


def test_a_healthy_run_has_no_finding() -> None:
    assert findings(history()) == []


def test_every_diagnosis_has_its_fault_here() -> None:
    assert {name for name, _, _ in FAULTS} == set(NAMES)


@pytest.mark.parametrize(("name", "sick", "near"), FAULTS, ids=[f"{i}-{name}" for i, (name, _, _) in enumerate(FAULTS)])
def test_a_diagnosis_fires_on_its_fault_and_not_near_it(name: str, sick: dict[str, Any], near: dict[str, Any]) -> None:
    found = {one.name: one for one in findings(history(**dict(sick)))}
    assert name in found
    assert re.search(r"\d", found[name].evidence)
    assert found[name].meaning
    assert found[name].next_step
    assert name not in names(history(**dict(near)))


def test_a_plateau_is_explained_by_the_noise_scale_where_that_is_far_above_the_batch() -> None:
    """The numbers of the evidence follow from the columns: 14,000 of noise over 1 and its two standard errors."""
    flat = {"loss": FLAT, "learning_rate": np.full(400, 1e-3)}
    noisy = {**flat, "gradient_noise": np.full(400, 14_000.0), "noise_scale": np.full(400, 14_321.0)}
    plateau = {one.name: one for one in findings(history(**noisy))}["plateau_without_decay"]
    assert plateau.title == "The loss is flat because the batch is far below the noise scale"
    assert "a batch of 1,000 tokens is far below the noise scale of 14,321 tokens (at least " in plateau.evidence
    least = int(re.search(r"\(at least ([\d,]+)\)", plateau.evidence)[1].replace(",", ""))
    signals = history()["gradient_signal"][-200:]
    blocks = np.array([block.mean() for block in np.array_split(signals, 10)])
    assert least == pytest.approx(14_000 / (signals.mean() + 2 * blocks.std(ddof=1) / 10**0.5), abs=1)
    assert "--init_from CHECKPOINT --global_batch_tokens N" in plateau.next_step
    assert (DOCS / "adopt-a-run.md").is_file()
    plain = {one.name: one for one in findings(history(**flat))}["plateau_without_decay"]
    assert plain.title == "The loss is flat and the rate was never lowered"
    assert "noise scale" not in plain.evidence
    falling = {one.name for one in findings(history(gradient_noise=np.full(400, 14_000.0)))}
    assert "plateau_without_decay" not in falling
    assert "batch_below_noise_scale" in falling


@pytest.mark.parametrize("count", [0, 1, 2, 5, 19, 39, 99])
def test_a_run_that_has_just_begun_has_no_finding(count: int) -> None:
    healthy = history()
    columns = {key: values[:count] for key, values in healthy.columns.items()}
    assert findings(History(columns, vocab_size=1_000.0, updates=400.0, batch_tokens=1_000.0, epoch_tokens=1e9)) == []


def test_columns_that_an_older_version_lacks_are_no_finding() -> None:
    old = {key: history()[key] for key in ("step", "supervised_tokens", "loss", "learning_rate", "grad_norm")}
    assert findings(History(old)) == []
    assert findings(History({})) == []


def test_thirty_thousand_updates_are_judged_in_a_moment() -> None:
    """The searches are linear or limited: this would take minutes otherwise."""
    found = history(loss=curve(30_000))
    assert "first_loss_far_from_uniform" not in names(found)


def test_diagnose_tells_evidence_meaning_and_next_step(
    write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(updates=39)
    assert main(["diagnose", str(folder)]) == 0  # 33% of its updates are clipped, its vocabulary is not known
    assert capsys.readouterr().out == "Nothing was found in 39 updates.\n"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**row, "grad_norm": 3.0}) + "\n" for row in rows if "loss" in row)
    (folder / "metrics.jsonl").write_text(text)
    assert main(["diagnose", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["updates"], told["status"]) == (39, "running")
    assert [sorted(one) for one in told["findings"]] == [["evidence", "meaning", "name", "next_step", "title"]]
    assert told["findings"][0]["name"] == "clipping_always"
    assert told["findings"][0]["evidence"].startswith("100% of the last 39 updates had a norm above 1;")
    assert main(["diagnose", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "Nearly every update is clipped\n  seen     100%" in shown
    assert "  do       Raise max_grad_norm" in shown


def test_the_facts_of_a_run_reach_its_history(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    contract = json.loads((folder / "run.json").read_text())
    contract["identity"]["model"]["vocab_size"] = 512
    contract["identity"]["data"] |= {"windows_per_epoch": 7, "conversations_sha256": "ab"}
    contract["identity"]["training"] |= {"warmup_steps": 3, "init_from": {"x": 1}}
    (folder / "run.json").write_text(json.dumps(contract))
    found = history_of(Run(folder))
    assert (found.vocab_size, found.updates, found.warmup, found.max_grad_norm) == (512, 40, 3, 1.0)
    assert (found.batch_tokens, found.epoch_tokens, found.branched, found.finished) == (100, 70, True, False)
    assert (len(found), found.done_share, found.conversations) == (10, 0.25, True)
    assert math.isnan(found["mfu"][0])


def test_a_folder_without_rows_says_that_there_is_nothing_to_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "There is no update to judge yet." in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2
