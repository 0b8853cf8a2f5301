"""A batch that grows: updates, windows and targets against a reference that walks the run update by update."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hf_tinylm.cli import main
from hf_tinylm.errors import ConfigError
from hf_tinylm.planning.updates import UpdatePlan, plan_updates

Plan = Callable[..., dict[str, Any]]
GROWTH = ["--batch_growth", "[20_000, 16_384]", "[60_000, 32_768]"]


def walked(tokens: int, batch: int, growth: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(full size, targets) of each update: its size is that of the last pair whose tokens are spent when it begins."""
    found, spent = [], 0
    while spent < tokens:
        size = [batch, *(larger for point, larger in growth if point <= spent)][-1]
        found.append((size, min(size, tokens - spent)))
        spent += size
    return found


def drawn(seed: int) -> tuple[UpdatePlan, list[tuple[int, int]]]:
    """A plan of up to four sizes, points so close now and then that a size has no update, and what it was made of."""
    draw = random.Random(seed)
    length, rows, world = draw.choice([1, 3, 16]), draw.choice([1, 2, 5]), draw.choice([1, 2, 3])
    micro = length * rows * world
    batch, point, growth = micro * draw.randint(1, 3), 0, []
    size = batch
    for _ in range(draw.randint(0, 3)):
        point, size = point + draw.randint(1, draw.choice([5, 40]) * micro), size + micro * draw.randint(1, 4)
        growth.append((point, size))
    return plan_updates(draw.randint(1, 90 * micro), batch, length, rows, world, growth), growth


@pytest.mark.parametrize("seed", range(100))
def test_every_update_of_a_growing_batch_is_that_of_a_walk_through_the_run(seed: int) -> None:
    plan, growth = drawn(seed)
    expected = walked(plan.train_tokens, plan.global_batch_tokens, growth)
    assert plan.updates == len(expected)
    updates = range(plan.updates)
    assert [plan.batch_of(update) for update in updates] == [size for size, _ in expected]
    assert [plan.tokens_of_update(update) for update in updates] == [targets for _, targets in expected]
    assert plan.last_update_tokens == expected[-1][1]
    assert plan.full_tokens == sum(size for size, _ in expected)
    before = [0, *np.cumsum([targets for _, targets in expected]).tolist()]
    assert [plan.tokens_before(update) for update in range(plan.updates + 1)] == before


@pytest.mark.parametrize("seed", range(100))
def test_processes_and_micro_batches_take_every_window_once_across_the_growth(seed: int) -> None:
    plan, _ = drawn(seed)
    taken: list[int] = []
    for update in range(plan.updates):
        shares = []
        for process in range(plan.world_size):
            first = plan.windows_before(update) + process * plan.windows_of_process(update)
            for micro in range(plan.accumulation_of(update)):
                rows = plan.per_device_train_batch_size
                taken += range(first + micro * rows, first + (micro + 1) * rows)
            shares.append(plan.tokens_of_process(update, process))
        assert sum(shares) == plan.tokens_of_update(update)
    assert taken == list(range(-(-plan.full_tokens // plan.sequence_length)))


def test_a_point_that_one_update_passes_with_the_next_has_no_update_of_its_size() -> None:
    plan = plan_updates(1_000, 64, 1, 1, 1, [(10, 100), (20, 200)])
    assert [plan.batch_of(update) for update in range(3)] == [64, 200, 200]
    assert [stage.batch_tokens for stage in plan.stages] == [64, 200]


def test_growth_beyond_the_end_of_the_run_changes_nothing_of_it() -> None:
    plain, grown = plan_updates(1_000, 64, 1, 1, 1), plan_updates(1_000, 64, 1, 1, 1, [(1_000, 128)])
    assert grown.stages == plain.stages
    assert (grown.updates, grown.last_update_tokens) == (plain.updates, plain.last_update_tokens) == (16, 40)


def test_a_budget_of_10_to_the_18_is_planned_without_walking_it() -> None:
    plan = plan_updates(10**18, 1_024, 1_024, 1, 1, [(10**17, 2_048)])
    first = -(-(10**17) // 1_024)
    assert plan.stages[1].first_update == first
    assert plan.updates == first + -(-(10**18 - first * 1_024) // 2_048)


@pytest.mark.parametrize(
    ("growth", "told"),
    [
        (
            [(100, 5_000)],
            "batch_growth from 100 tokens on: 5,000 is not a multiple of the 1,024 tokens of one",
        ),
        ([(100, 5_000)], "Use 4,096 or 5,120, or change per_device_train_batch_size."),
        ([(100, 2_100)], "Use 3,072, or change"),  # 2,048 would be no growth
        ([(100, 4_096), (50, 8_192)], "both must rise"),
    ],
)
def test_growth_that_the_micro_batches_do_not_divide_is_refused_with_what_they_do(
    growth: list[tuple[int, int]], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_updates(10**6, 2_048, 128, 4, 2, growth)
    assert told in str(caught.value)


def test_plan_tells_each_size_and_counts_updates_flops_and_time_by_it(
    plan: Plan, bare: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """100,000 tokens: 3 updates of 8,192 (24,576), 3 of 16,384 (73,728), 1 of 32,768 cut to 26,272."""
    ours = ("--config", bare, "--per_device_train_batch_size", "8", "--optim", "muon", *GROWTH)
    found = plan(*ours, "--tokens_per_second", "1000")
    assert (found["updates"], found["last_update_tokens"], found["full_updates"]) == (7, 26_272, 6)
    assert found["tokens_of_full_updates"] == 73_728 + 32_768
    each = [(s["from_tokens"], s["from_update"], s["updates"], s["global_batch_tokens"]) for s in found["stages"]]
    assert each == [(0, 1, 3, 8_192), (24_576, 4, 3, 16_384), (73_728, 7, 1, 32_768)]
    assert [stage["gradient_accumulation_steps"] for stage in found["stages"]] == [4, 8, 16]
    assert found["optimizer_flops"] == 7 * found["optimizer_flops_per_update"]
    assert found["hours"] == pytest.approx(100 / 3_600)
    per_token = found["flops_per_token_with_attention"] + 7 * found["optimizer_flops_per_update"] // 106_496
    assert found["flops_per_second"] == pytest.approx(1_000 * per_token)
    assert main(["plan", *ours]) == 0
    assert "from update 4 on of 16,384 tokens: 3 updates, 8 micro-batches each" in capsys.readouterr().out
    assert main(["plan", *ours, "--num_processes", "3"]) == 1


def test_a_plan_without_growth_has_one_size(plan: Plan, bare: str) -> None:
    found = plan("--config", bare)
    assert [stage["updates"] for stage in found["stages"]] == [found["updates"]]
