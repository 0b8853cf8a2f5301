"""`hf-tinylm plan` at its edges: any configuration, any input, one screen, no torch."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hf_tinylm.cli import main
from hf_tinylm.config import load_config
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import ConfigError
from hf_tinylm.planning.disk import targets_of
from hf_tinylm.planning.quantities import count, quantity

Plan = Callable[..., dict[str, Any]]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command prints."""
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("error: ")


def test_planning_needs_no_torch_and_no_pack() -> None:
    code = (
        "import sys; from hf_tinylm.cli import main\n"
        "assert main(['plan', '--config', 'llama-304m', '--device', 'H100']) == 0\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pyarrow', 'psutil'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_configuration_without_sources_or_shards_is_planned(plan: Plan, bare: str) -> None:
    found = plan("--config", bare)
    assert (found["updates"], found["last_update_tokens"]) == (13, 100_000 - 12 * 8_192)
    assert found["epochs"] is None
    assert found["hours"] is None


def test_an_epoch_of_a_pack_that_is_not_there_leaves_the_budget_open(plan: Plan, bare: str) -> None:
    found = plan("--config", bare, "--train_tokens", "epoch")
    assert found["train_tokens"] is found["updates"] is found["rotation_bytes"] is found["total_flops"] is None
    assert found["parameters"] > 0
    assert plan("--config", bare, "--train_tokens", "epoch", "--tokens", "1M")["updates"] == 123
    assert main(["plan", "--config", bare, "--train_tokens", "epoch"]) == 0


def test_the_budget_of_an_epoch_and_the_vocabulary_come_from_the_pack(plan: Plan, tiny_config: Path) -> None:
    config = load_config(str(tiny_config))
    manifest = json.loads((Path(str(config.data.shards)) / "manifest.json").read_text())
    found = plan("--config", str(tiny_config), "--train_tokens", "epoch", "--vocab_size", "999")
    available = sum((entry["ids"] - 1) // 32 * 32 for entry in manifest["splits"]["train"]["shards"])
    assert found["train_tokens"] == found["available_tokens"] == available
    assert found["epochs"] == 1.0
    assert found["shard_bytes"] == 2 * manifest["ids"]
    assert found["vocab_size"] == 512
    assert "512" in found["notices"][0]
    assert "999" in found["notices"][0]


@pytest.mark.parametrize("lengths", [[1], [33], [1_000, 31, 700, 32], [64, 65, 66]])
def test_targets_of_a_pack_are_those_that_the_windows_supervise(lengths: list[int]) -> None:
    streams = [np.zeros(length, dtype=np.uint16) for length in [*lengths, 100]]
    windows = TokenWindows(streams, 32, "permutation", 0)
    assert targets_of([*lengths, 100], 32) == windows.targets_per_epoch


@pytest.mark.parametrize("manifest", ["{", "[]", '{"splits": {}}', '{"splits": {"train": {"shards": [{"ids": "x"}]}}}'])
def test_a_damaged_manifest_is_a_problem_and_the_rest_is_planned(
    plan: Plan, bare: str, tmp_path: Path, manifest: str
) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    found = plan("--config", bare, "--shards", str(tmp_path), code=1)
    assert "manifest.json" in found["problems"][0]
    assert found["updates"] == 13


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("--per_device_train_batch_size", "5"), "is not a multiple of the 1,280 tokens of one micro-step"),
        (("--warmup_steps", "13"), "leaves no update of this run's 13. Use 12 or fewer"),
        (("--num_processes", "3"), "x 3 processes"),
    ],
)
def test_what_training_would_refuse_is_a_problem_and_exit_code_1(
    plan: Plan, bare: str, settings: tuple[str, ...], told: str
) -> None:
    found = plan("--config", bare, *settings, code=1)
    assert any(told in problem for problem in found["problems"])
    assert found["updates"] == 13


def test_every_configuration_that_loads_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random ones, odd and huge values included: an object every time, and every number in it finite."""
    draw = random.Random(7)
    planned = 0
    for number in range(120):
        heads = draw.choice([1, 2, 3, 7, 12])
        length = draw.choice([1, 32, 1_000, 10**6])
        values = {
            "model": {
                "num_attention_heads": heads,
                "num_key_value_heads": draw.choice([None, 1, heads]),
                "hidden_size": heads * draw.choice([2, 64, 10**6, 31]),
                "num_hidden_layers": draw.choice([1, 5, 10**9]),
                "intermediate_size": draw.choice([1, 77, 10**12]),
                "qk_norm": draw.random() < 0.5,
                "tie_word_embeddings": draw.random() < 0.5,
                "attn_implementation": draw.choice(["sdpa", "eager"]),
                "pad_vocab_to_multiple_of": draw.choice([1, 64]),
            },
            "tokenizer": {"vocab_size": draw.choice([1, 257, 70_000, 2**40])},
            "data": {"sequence_length": length, "validation_fraction": draw.choice([0.0, 0.5])},
            "training": {
                "train_tokens": draw.choice(["epoch", 1, 999, 2**62]),
                "global_batch_tokens": length * draw.choice([1, 6, 4_096]),
                "per_device_train_batch_size": draw.choice([1, 8, 10**9]),
                "bf16": draw.choice([True, False, "auto"]),
                "use_cpu": draw.random() < 0.5,
                "gradient_checkpointing": draw.random() < 0.5,
                "eval_steps": draw.choice([None, 1, 10**9]),
                "save_steps": draw.choice([None, 1, 10**9]),
                "save_minutes": draw.choice([None, 0.001, 1e9]),
                "save_total_limit": draw.choice([None, 1, 10**9]),
                "milestone_steps": draw.choice([None, 1]),
                "warmup_steps": draw.choice([0, 10**6]),
            },
        }
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(values))
        try:
            load_config(str(path))
        except ConfigError:
            continue
        planned += 1
        speed = draw.choice([(), ("--tokens_per_second", "1e-3"), ("--device", "L4"), ("--hours", "1e6")])
        code = main(["plan", "--config", str(path), *speed, "--json"])
        assert code in (0, 1), values
        found = json.loads(capsys.readouterr().out)
        assert bool(found["problems"]) == (code == 1)
        numbers = [value for value in found.values() if isinstance(value, int | float)]
        assert all(math.isfinite(value) for value in numbers)
    assert planned > 60


@pytest.mark.parametrize("name", ["demo", "tinystories-10m", "llama-100m", "llama-126m", "llama-304m", "tot-345m"])
def test_the_table_is_one_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    speed = ("--device", "H100", "--price_per_hour", "2", "--watts", "500", "--session_hours", "9")
    assert main(["plan", "--config", name, *speed, "--scale", "300M", "1B"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 180
    for topic in ("model", "FLOPs/token", "budget", "updates", "compute", "checkpoint", "disk", "GGUF", "shards"):
        assert any(line.startswith(topic) for line in lines), topic
    for topic in ("memory", "speed", "time", "energy", "sessions", "scale"):
        assert any(line.startswith(topic) for line in lines), topic
    assert "an estimate" in next(line for line in lines if line.startswith("sessions"))


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        (
            ("--tokens_per_second", "24_000", "--hours", "20"),
            ("2,000,000,000 tokens / 24,000 tokens/s / 3,600 = 23.148 hours", "hours=20"),
        ),
        (
            ("--hours", "20", "--price_per_hour", "1.1", "--cost", "25.46"),
            ("hours=20", "cost 25.46 / 1.1 per hour = 23.145 hours"),
        ),
        (
            ("--tokens_per_second", "24_000", "--price_per_hour", "1.1", "--cost", "50"),
            ("23.148 hours", "= 45.455 hours"),
        ),
        (
            ("--tokens_per_second", "24_000", "--device", "H100", "--mfu", "0.5"),
            ("23.148 hours", "1.428e+18 FLOPs / 0.5 of 9.89e+14 FLOP/s"),
        ),
        (("--flops_per_second", "50e12", "--hours", "9"), ("1.428e+18 FLOPs / 5e+13 FLOP/s", "hours=9")),
    ],
)
def test_inputs_that_disagree_are_refused_with_the_sum(
    capsys: pytest.CaptureFixture[str], claims: tuple[str, ...], told: tuple[str, ...]
) -> None:
    line = refused(capsys, "--config", "llama-100m", *claims)
    assert line.startswith("These inputs do not agree: ")
    assert all(part in line for part in told), line


def test_inputs_that_agree_are_taken_together(plan: Plan) -> None:
    found = plan(
        *("--config", "llama-100m", "--tokens_per_second", "24_000", "--hours", "23.15"),
        *("--price_per_hour", "1.10", "--cost", "25.46"),
    )
    assert found["tokens_per_second"] == pytest.approx(24_000)


def test_a_price_follows_from_money_and_time(plan: Plan) -> None:
    found = plan("--config", "llama-100m", "--hours", "20", "--cost", "30")
    assert found["price_per_hour"] == 1.5
    assert found["tokens_per_second"] == pytest.approx(2e9 / 72_000)


def test_a_device_alone_gives_an_assumed_speed_that_says_so(plan: Plan) -> None:
    found = plan("--config", "llama-100m", "--device", "NVIDIA A100-SXM4-80GB", "--num_processes", "2")
    assert found["mfu"] == pytest.approx(0.4)
    assert found["peak_flops"] == 624e12
    assert "assumed" in found["speed_from"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "Give --config NAME or --size 50M"),
        (("--config", "demo", "--size", "50M"), "Leave out one"),
        (("--config", "demo", "--write", "x.yaml"), "--write goes with --size"),
        (("--config", "demo", "--tokens_per_second", "fast"), "--tokens_per_second: 'fast' is not a number above 0"),
        (("--config", "demo", "--tokens_per_second", "-5"), "is not a number above 0"),
        (("--config", "demo", "--tokens_per_second", "0"), "is not a number above 0"),
        (("--config", "demo", "--tokens_per_second", "nan"), "is not a number above 0"),
        (("--config", "demo", "--hours", "1e999"), "is not a number above 0"),
        (("--config", "demo", "--tokens", "1.5"), "is not a whole number"),
        (("--config", "demo", "--scale", "300M", "big"), "--scale: 'big'"),
        (("--config", "demo", "--mfu", "0.4"), "Name the device"),
        (("--config", "demo", "--mfu", "40", "--device", "H100"), "above the whole peak"),
        (("--config", "demo", "--device", "Abacus"), "'Abacus' are not known"),
        (("--config", "demo", "--device", "RTX 4090 D"), "'RTX 4090 D' are not known"),
        (("--config", "demo", "--tokens-per-second-from", "nowhere"), "has no updates to measure by"),
        (
            ("--config", "demo", "--hours", "1", "--session_hours", "0.01", "--save_seconds", "90"),
            "nothing is trained",
        ),
        (("--config", "demo", "--learning_rat", "1"), "Did you mean learning_rate?"),
        (("--size", "1k"), "out of range"),
        (("--size", "50M", "--hidden_size", "64", "--num_hidden_layers", "2"), "No shape with the given keys"),
        (("--size", "50M", "--num_attention_heads", "0"), "out of range for a proposal"),
        (("--size", "50M", "--hidden_size", "1_000_000_000_000"), "hidden_size=1,000,000,000,000 is out of range"),
        (("--size", "50M", "--num_key_value_heads", "5"), "is not a multiple of num_key_value_heads=5"),
        (("--size", "50M", "--train_tokens", "epoch"), "Give a number: --tokens 1B"),
    ],
)
def test_a_wrong_input_is_one_line_that_says_what_to_type(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert told in refused(capsys, *arguments)


def test_the_speed_of_a_real_run_is_its_median(plan: Plan, bare: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": i, "loss": 1.0, "tokens_per_second": s} for i, s in enumerate((1, 80, 100))]
    rows.insert(1, {"step": 1, "eval_loss": 2.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn')
    found = plan("--config", bare, "--tokens-per-second-from", str(tmp_path))
    assert found["tokens_per_second"] == pytest.approx(80)
    assert str(tmp_path) in found["speed_from"]
    assert found["notices"] == []
    (tmp_path / "run.json").write_text(json.dumps({"identity": {"model": {"hidden_size": 64, "num_hidden_layers": 6}}}))
    other = plan("--config", bare, "--tokens_per_second_from", str(tmp_path))
    assert "hidden_size 64 there, 256 here" in other["notices"][0]


def test_sessions_pay_for_their_start_and_last_save(plan: Plan) -> None:
    """10 hours of training at 1,000 tokens/s in sessions of 1 hour that lose 60 s + 540 s each: 12 sessions."""
    found = plan(
        *("--config", "llama-100m", "--train_tokens", "36_000_000", "--tokens_per_second", "1000"),
        *("--session_hours", "1", "--save_seconds", "540", "--startup_seconds", "60"),
        *("--eval_steps", "null", "--save_steps", "null", "--save_minutes", "null", "--warmup_steps", "1"),
    )
    running = 36_000 + 540  # one save, after the last update
    assert found["tokens_per_session"] == int(3_000 * 36_000_000 / running)
    assert found["sessions"] == math.ceil(36_000_000 / found["tokens_per_session"]) == 13


@pytest.mark.parametrize(
    ("text", "value"),
    [("300M", 3e8), ("1B", 1e9), ("2.5e9", 2.5e9), ("262_144", 262_144), ("1.5k", 1_500), (".5", 0.5), ("2T", 2e12)],
)
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert quantity(text) == value
    if value >= 1:
        assert count(text) == value


def test_a_count_of_many_digits_is_exact() -> None:
    assert count("9007199254740993") == 9_007_199_254_740_993
    for text in ("0", "1.5", "2.5", "-1", "1e30", "M", "1MM", "", "1 0"):
        with pytest.raises(ConfigError):
            count(text)


def test_export_sizes_are_those_of_files_that_were_measured(plan: Plan) -> None:
    sizes = plan("--config", "tot-345m")["export_bytes"]
    for kind, megabytes in {"f16": 692.0, "q8_0": 368.0, "q4_k_m": 252.5, "q4_k_s": 241.8, "q4_0": 211.0}.items():
        assert sizes[kind] / 1e6 == pytest.approx(megabytes, rel=0.002)


def test_a_chat_stage_has_the_shape_of_the_model_it_starts_from(plan: Plan, tmp_path: Path) -> None:
    """SmolLM2-135M's published shape: 134,515,008 parameters, tied."""
    values = {"model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "num_hidden_layers": 30}
    values |= {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1_536}
    (tmp_path / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": True}))
    found = plan("--config", "sft-persona", "--init_from", str(tmp_path))
    assert found["parameters"] == 134_515_008
    assert found["notices"] == ["HuggingFaceTB/smol-smoltalk is no local file and is not counted; preflight does it"]
    without = plan("--config", "sft-persona", "--init_from", str(tmp_path / "nothing"))
    assert "a chat stage has the shape of the model it starts from" in without["notices"][0]
    (tmp_path / "config.json").write_text("{}")
    assert main(["plan", "--config", "sft-persona", "--init_from", str(tmp_path)]) == 2


def test_muon_and_a_wsd_course_are_planned(plan: Plan, bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hidden 256, 6 layers, 8 heads of 32, feed-forward 768: 4 squares of 256 and 3 matrices of 256 x 768 a layer."""
    ours = ("--config", bare, "--optim", "muon", "--lr_schedule", "wsd", "--decay_fraction", "0.5")
    found, plain = plan(*ours), plan("--config", bare)
    steps = 6 * (4 * 6 * 256**3 + 3 * (4 * 256**2 * 768 + 2 * 256**3))
    assert (found["optimizer_flops_per_update"], plain["optimizer_flops_per_update"]) == (5 * steps, 0)
    assert found["optimizer_flops"] == 13 * 5 * steps
    hidden = 6 * (4 * 256**2 + 3 * 256 * 768)
    assert found["checkpoint_bytes"] == plain["checkpoint_bytes"] - 4 * hidden == 12 * found["parameters"] - 4 * hidden
    assert found["peak_memory_bytes"] < plain["peak_memory_bytes"]
    assert found["total_flops"] == plain["total_flops"]
    assert (found["stable_updates"], plain["stable_updates"]) == (13 - 6, None)
    assert main(["plan", *ours]) == 0
    printed = capsys.readouterr().out
    assert "muon, wsd: stable for 7 updates, then down" in printed
    assert main(["plan", *ours, "--warmup_steps", "8"]) == 1
    assert "decay_fraction=0.5 of 13 updates begins before the end of warmup_steps=8" in capsys.readouterr().out
