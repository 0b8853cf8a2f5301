"""The size dial: from a number of parameters to a configuration."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.planning.proposal import RULES, propose
from hf_tinylm.planning.writing import write_with_overrides

Plan = Callable[..., dict[str, Any]]


def parameters_of(proposal: dict[str, Any]) -> int:
    """Counted by hand: tied embedding, four projections, three feed-forward matrices, norms."""
    width, layers = proposal["hidden_size"], proposal["num_hidden_layers"]
    head = width // proposal["num_attention_heads"]
    attention = 2 * width * width + 2 * width * head * proposal["num_key_value_heads"]
    layer = attention + 3 * width * proposal["intermediate_size"] + 2 * width
    return int(proposal["vocab_size"] * width + layers * layer + width)


def test_sizes_from_5_to_400_million_are_met_within_a_few_percent_by_shapes_that_quantize() -> None:
    draw = random.Random(3)
    sizes = [5_000_000, 400_000_000, *(round(10 ** draw.uniform(6.7, 8.602)) for _ in range(60))]
    for size in sizes:
        found = propose(size, None, {})
        assert abs(parameters_of(found) / size - 1) < 0.06, size
        assert found["hidden_size"] % 256 == found["intermediate_size"] % 256 == 0
        assert found["hidden_size"] // found["num_attention_heads"] == 64
        assert found["num_attention_heads"] % found["num_key_value_heads"] == 0
        assert 2.0 <= found["intermediate_size"] / found["hidden_size"] <= 3.5
        assert 20 <= found["hidden_size"] / found["num_hidden_layers"] <= 130
        assert found["vocab_size"] * found["hidden_size"] <= max(size / 4, 2_048 * 256)
        assert found["train_tokens"] == 20 * parameters_of(found)
        assert found["global_batch_tokens"] % (found["per_device_train_batch_size"] * found["sequence_length"]) == 0
        assert 1e-4 < found["learning_rate"] <= 2e-3
        assert found["warmup_steps"] < found["train_tokens"] / found["global_batch_tokens"]
        assert list(found) == list(RULES)


def test_rules_come_near_the_presets_that_were_published() -> None:
    """llama-100m: 6e-4 and 262,144 tokens per update for 2 billion; llama-304m: 5e-4 and 524,288 for 10 billion."""
    small, large = propose(100_000_000, 2 * 10**9, {}), propose(304_000_000, 10**10, {})
    assert small["learning_rate"] == 6e-4
    assert small["global_batch_tokens"] == 262_144
    assert 3e-4 <= large["learning_rate"] <= 6e-4
    assert large["global_batch_tokens"] == 524_288


def test_muons_rate_is_four_times_adamws_as_in_speedrun_10m(tmp_path: Path) -> None:
    assert propose(100_000_000, 2 * 10**9, {"optim": "muon"})["learning_rate"] == pytest.approx(2.4e-3)
    assert load_config("speedrun-10m").training.learning_rate == pytest.approx(4 * 6e-4 * (100 / 10.2) ** 0.4, rel=0.02)
    written = tmp_path / "mine.yaml"
    assert main(["plan", "--size", "100M", "--optim", "muon", "--gain_lr_ratio", "3", "--write", str(written)]) == 0
    training = load_config(str(written)).training
    assert (training.optim, training.gain_lr_ratio) == ("muon", 3.0)
    assert training.learning_rate == pytest.approx(2.4e-3)


def test_a_given_key_is_kept_and_the_others_follow_it() -> None:
    found = propose(50_000_000, 10**9, {"hidden_size": 384, "vocab_size": 10_000, "learning_rate": 1e-4})
    assert (found["hidden_size"], found["vocab_size"], found["learning_rate"]) == (384, 10_000, 1e-4)
    assert found["num_attention_heads"] == 6
    assert abs(parameters_of(found) / 50e6 - 1) < 0.04


@pytest.mark.parametrize("size", ["5M", "50M", "400M"])
def test_a_written_proposal_loads_plans_and_is_commented(plan: Plan, tmp_path: Path, size: str) -> None:
    path = tmp_path / "mine.yaml"
    proposed = plan("--size", size, "--tokens", "1B", "--write", str(path), "--seed", "5", "--qk_norm", "true")
    text = path.read_text()
    assert "starting proposal" in text.splitlines()[0]
    assert all(rule in text for rule in RULES.values() if "together" not in rule)
    config = load_config(str(path))
    assert (config.training.seed, config.model.qk_norm, config.training.train_tokens) == (5, True, 10**9)
    assert config.data.sources[0].licence
    assert config.training.output_dir == "runs/mine/pretrain"
    again = plan("--config", str(path))
    assert again["parameters"] == proposed["parameters"]
    assert again["problems"] == []


def test_rules_are_printed_and_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("keep me")
    assert main(["plan", "--size", "50M", "--write", str(path)]) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert path.read_text() == "keep me"
    assert main(["plan", "--size", "50M", "--learning_rate", "1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "a starting proposal, not an optimum" in shown
    assert all(rule in shown for key, rule in RULES.items() if key != "learning_rate")
    assert "given" in next(line for line in shown.splitlines() if line.startswith("learning_rate"))


@pytest.mark.parametrize(
    "text",
    [
        "training:\n  seed: 1  # why\n  per_device_train_batch_size: 2 # rows\n",
        "training: {per_device_train_batch_size: 2, seed: 1}  # flow\n",
        "training:\n  seed: 1\n",
        "# per_device_train_batch_size: 9 in a comment\ntraining:\n  per_device_train_batch_size: 2\n",
        "model: {hidden_size: 512}\n",
        "",
    ],
    ids=["block", "flow", "absent", "comment", "no section", "empty"],
)
def test_a_key_is_changed_in_a_copy_whatever_the_layout(tmp_path: Path, text: str) -> None:
    source, target = tmp_path / "source.yaml", tmp_path / "target.yaml"
    source.write_text(text or "{}")
    write_with_overrides(source, target, ["--per_device_train_batch_size", "4", "--note", "a: b"], "measured")
    before, after = load_config(str(source)), load_config(str(target))
    before.training.per_device_train_batch_size, before.training.note = 4, "a: b"
    assert after == before
    if "why" in text:
        assert "# why" in target.read_text()
        assert target.read_text().startswith("# measured\n")
