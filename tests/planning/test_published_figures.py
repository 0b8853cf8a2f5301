"""Published figures of presets and their arithmetic as numbers in this file, against `hf-tinylm plan --json`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

Plan = Callable[..., dict[str, Any]]

# name: parameters, decayed, tokens, tokens per update, updates, last update, checkpoint in GB, f16 GGUF in MB
PRESETS = {
    "llama-100m": (100_092_672, 100_073_472, 2_000_000_000, 262_144, 7_630, 103_424, 1.20, 200),
    "llama-126m": (125_854_464, 125_829_120, 5_000_000_000, 524_288, 9_537, 389_632, 1.51, 252),
    "llama-304m": (304_137_216, 304_087_040, 10_000_000_000, 524_288, 19_074, 254_976, 3.65, 608),
    "gpt2-30m": (30_357_504, 30_326_784, 600_000_000, 131_072, 4_578, 83_456, 0.36, 61),
    "gpt2-124m-fineweb-edu": (124_475_904, 124_354_560, 2_516_582_400, 524_288, 4_800, 524_288, 1.49, 249),
    "gpt2-124m-fineweb": (124_574_208, 124_452_864, 9_890_693_120, 524_288, 18_865, 524_288, 1.49, 249),
    "gpt2-124m-openwebtext": (124_439_808, 124_318_464, 9_030_000_000, 4_096, 2_204_590, 3_456, 1.49, 249),
    "tot-345m": (345_359_296, 345_292_800, 600_000_000, 524_288, 1_145, 214_528, 4.14, 691),
}

# A Llama shape with exactly as many parameters as GPT-2 124M with its vocabulary padded to 50,304.
GPT2_SIZED = (
    *("--config", "llama-100m", "--vocab_size", "51461", "--num_key_value_heads", "12"),
    *("--train_tokens", "2500000000"),
)


@pytest.mark.parametrize(("name", "row"), PRESETS.items(), ids=PRESETS)
def test_a_preset_is_planned_as_published(plan: Plan, name: str, row: tuple[Any, ...]) -> None:
    found = plan("--config", name)
    parameters, decayed, tokens, per_update, updates, last, gigabytes, megabytes = row
    assert (found["parameters"], found["decayed_parameters"]) == (parameters, decayed)
    assert found["undecayed_parameters"] == parameters - decayed
    assert sum(found["parameters_by_part"].values()) == parameters
    assert (found["train_tokens"], found["global_batch_tokens"]) == (tokens, per_update)
    assert (found["updates"], found["last_update_tokens"]) == (updates, last)
    assert found["tokens_per_parameter"] == tokens / parameters
    assert found["checkpoint_bytes"] == 12 * parameters
    assert round(found["checkpoint_bytes"] / 1e9, 2) == gigabytes
    assert found["gguf_f16_bytes"] == 2 * parameters
    assert round(found["gguf_f16_bytes"] / 1e6) == megabytes
    assert found["flops_per_token"] == 6 * parameters
    assert found["flops_per_token_with_recomputation"] == 8 * parameters
    assert found["total_flops"] == 6 * parameters * tokens
    assert found["reference_tokens"] == 20 * parameters
    assert found["problems"] == []


def test_qk_norm_is_worth_4096_gains(plan: Plan) -> None:
    without = plan("--config", "tot-345m", "--qk_norm", "false")
    assert without["parameters"] == 345_355_200
    assert plan("--config", "tot-345m")["parameters_by_part"]["qk_norms"] == 4_096 == 32 * 2 * 64


def test_decay_groups_of_the_100m_preset(plan: Plan) -> None:
    found = plan("--config", "llama-100m")
    assert (found["decayed_parameters"], found["undecayed_parameters"]) == (100_073_472, 19_200)


def test_the_pack_of_the_345m_preset_holds_one_epoch_of_its_budget(plan: Plan) -> None:
    found = plan("--config", "tot-345m", "--num_processes", "8")
    assert found["shard_ids"] == 626_642_944
    assert found["shard_bytes"] == 2 * 626_642_944
    assert found["available_tokens"] < 626_642_944
    assert 0.9 < found["epochs"] < 1
    assert found["gradient_accumulation_steps"] == 8


def test_neither_policy_for_the_remainder_of_the_budget_is_exact_and_ours_is(plan: Plan) -> None:
    found = plan("--config", "llama-100m")
    assert found["full_updates"] == 7_629
    assert found["train_tokens"] - 7_629 * 262_144 == 103_424 == found["last_update_tokens"]
    assert found["tokens_of_full_updates"] == 2_000_158_720


def test_palms_count_for_the_parameters_of_gpt2(plan: Plan) -> None:
    found = plan(*GPT2_SIZED)
    assert found["parameters"] == 124_475_904
    plain, with_attention = found["flops_per_token"], found["flops_per_token_with_attention"]
    assert [round(n / 1e6) for n in (plain, with_attention - plain, with_attention)] == [747, 113, 860]


@pytest.mark.parametrize(
    ("name", "plain", "palm", "causal"),
    [
        ("llama-126m", 755_126_784, 906_121_728, 830_624_256),
        ("llama-304m", 1_824_823_296, 2_428_803_072, 2_126_813_184),
    ],
)
def test_three_counts_of_flops_have_names(plan: Plan, name: str, plain: int, palm: int, causal: int) -> None:
    found = plan("--config", name)
    assert found["flops_per_token"] == plain
    assert found["flops_per_token_with_attention"] == palm
    assert found["flops_per_token_causal"] == causal


@pytest.mark.parametrize(("name", "rate", "teraflops"), [("llama-126m", 72_000, 60), ("llama-304m", 32_000, 68)])
def test_logged_speeds_give_the_logged_flops_in_the_causal_count(
    plan: Plan, name: str, rate: int, teraflops: int
) -> None:
    found = plan("--config", name, "--tokens_per_second", str(rate))
    assert round(found["flops_per_second_causal"] / 1e12) == teraflops


def test_recomputation_costs_2n_more(plan: Plan) -> None:
    plain, recomputed = plan("--config", "llama-100m"), plan("--config", "llama-100m", "--gradient_checkpointing")
    assert plain["hardware_flops_per_token"] == 6 * 100_092_672
    assert recomputed["hardware_flops_per_token"] == 8 * 100_092_672


def test_compute_grows_with_the_square_of_the_size(plan: Plan) -> None:
    rows = plan("--config", "llama-100m", "--scale", "100M", "300M", "1B")["scale"]
    assert [row["tokens"] for row in rows] == [2 * 10**9, 6 * 10**9, 20 * 10**9]
    assert [row["total_flops"] for row in rows] == [120 * n**2 for n in (10**8, 3 * 10**8, 10**9)]
    assert [row["total_flops"] / rows[0]["total_flops"] for row in rows] == [1, 9, 100]
    assert [row["updates"] for row in rows] == [7_630, 22_889, 76_294]


def test_hours_and_money_of_the_100m_preset(plan: Plan) -> None:
    found = plan("--config", "llama-100m", "--tokens_per_second", "24000", "--price_per_hour", "1.10")
    assert round(found["hours"], 3) == 23.148
    assert round(found["cost"], 2) == 25.46
    assert found["hours_end_to_end"] > found["hours"]


def test_hours_of_a_gpt2_sized_run_at_50_teraflops(plan: Plan) -> None:
    found = plan(*GPT2_SIZED, "--flops_per_second", "50e12")
    assert round(found["total_flops"] / 1e18, 1) == 1.9
    assert round(found["total_flops_with_attention"] / 1e18, 1) == 2.2
    assert round(found["hours_without_attention"]) == 10
    assert round(found["hours"]) == 12


@pytest.mark.parametrize(("vocab_size", "nats"), [(32_000, 10.3735), (50_257, 10.8249), (50_304, 10.8258)])
def test_the_loss_of_even_chances(plan: Plan, vocab_size: int, nats: float) -> None:
    assert round(plan("--config", "llama-100m", "--vocab_size", str(vocab_size))["uniform_loss"], 4) == nats


def test_a_loss_is_shown_as_perplexity(plan: Plan) -> None:
    assert round(plan("--config", "llama-100m", "--loss", "3.4")["perplexity"], 4) == 29.9641


def test_disk_is_for_the_kept_the_best_the_milestones_and_the_one_being_written(plan: Plan) -> None:
    one = 12 * 100_092_672
    assert plan("--config", "llama-100m")["rotation_bytes"] == (3 + 1 + 0 + 1) * one
    milestones = plan("--config", "llama-100m", "--milestone_steps", "2000", "--save_total_limit", "2")
    assert milestones["rotation_bytes"] == (2 + 1 + 3 + 1) * one
    assert plan("--config", "llama-100m", "--eval_steps", "null")["rotation_bytes"] == (3 + 0 + 0 + 1) * one


def test_where_the_time_of_the_345m_run_went(plan: Plan) -> None:
    """18,100 tokens/s while training and about 12,800 end to end: 99 saves of 4 GB at 90 s cost 2.5 of 8.6 hours."""
    found = plan(
        *("--config", "tot-345m", "--train_tokens", "396_000_000", "--global_batch_tokens", "16_384"),
        *("--per_device_train_batch_size", "2", "--num_processes", "8", "--save_steps", "245"),
        *("--eval_steps", "6000", "--save_minutes", "null"),
        *("--tokens_per_second", "18_100", "--save_seconds", "90"),
    )
    assert found["saves"] == 99
    assert round(found["checkpoint_bytes"] / 1e9) == 4
    assert round(found["seconds_by_part"]["saves"] / 3600, 1) == 2.5
    assert round(found["hours_end_to_end"], 1) == 8.6
    assert found["tokens_per_second_end_to_end"] == pytest.approx(12_800, rel=0.005)


def test_energy_of_a_run_of_49_hours_at_217_watts(plan: Plan) -> None:
    """10.70 kWh were metered in 49.2 hours at a mean of 217 W, which is known to half a watt."""
    quiet = ("--startup_seconds", "1e-9", "--save_seconds", "1e-9", "--eval_steps", "null")
    found = plan("--config", "llama-100m", "--hours", "49.2", "--watts", "217", "--price_per_hour", "0.130", *quiet)
    assert found["kilowatt_hours"] == pytest.approx(10.70, rel=0.005)
    assert round(found["cost"], 2) == 6.40


def test_the_304m_preset_fits_a_16_gib_card_as_it_was_reported_to(plan: Plan) -> None:
    """14.9 GiB at 4 x 2,048 without activation checkpointing."""
    found = plan("--config", "llama-304m", "--device", "RTX 5070 Ti", "--tokens_per_second", "32_000")
    assert 13 <= found["peak_memory_bytes"] / 2**30 <= 16
    assert found["fits_device"] is True
    assert found["peak_memory_bytes"] == sum(found["peak_memory_by_part"].values())
    assert found["peak_memory_without_checkpointing_bytes"] == found["peak_memory_bytes"]
    assert found["peak_memory_with_checkpointing_bytes"] < 0.6 * found["peak_memory_bytes"]
    assert math.isclose(found["mfu"], 32_000 * 2_428_803_072 / 87.9e12)
