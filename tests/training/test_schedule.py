from __future__ import annotations

import pytest

from hf_tinylm.errors import ConfigError
from hf_tinylm.sections import DecayShape
from hf_tinylm.training.schedule import Schedule, momentum_at


def test_warmup_peak_middle_and_floor_are_where_they_should_be() -> None:
    rate = Schedule(learning_rate=1.0, min_lr_ratio=0.1, warmup_steps=10, updates=111)
    assert [rate(0), rate(4), rate(9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.55)  # half of the cosine: the mean of peak and floor
    assert rate(35) == pytest.approx(0.1 + 0.45 * (1 + 2**-0.5))  # a quarter: cos(pi / 4)
    assert rate(110) == 0.1  # exactly


def test_the_rate_rises_then_never_rises_again() -> None:
    rate = Schedule(6e-4, 0.1, 500, 7_630)
    rates = [rate(update) for update in range(7_630)]
    assert rates[:500] == sorted(rates[:500])
    assert rates[500:] == sorted(rates[500:], reverse=True)
    assert max(rates) == 6e-4
    assert rates[-1] == 6e-4 * 0.1


def test_no_warmup_starts_at_the_peak_and_one_update_is_possible() -> None:
    assert Schedule(1e-3, 0.0, 0, 5)(0) == 1e-3
    assert Schedule(1e-3, 0.0, 0, 5)(4) == 0.0
    assert Schedule(1e-3, 0.5, 0, 1)(0) == 5e-4


@pytest.mark.parametrize(("warmup", "updates"), [(10, 10), (10, 3), (1, 1)])
def test_a_run_too_short_for_its_warmup_is_refused(warmup: int, updates: int) -> None:
    with pytest.raises(ConfigError, match=f"warmup_steps={warmup} leaves no update"):
        Schedule(1e-3, 0.1, warmup, updates)


def test_linear_and_constant_rates() -> None:
    linear = Schedule(2.0, 0.1, 4, 25, "linear")
    assert [linear(3), linear(4), linear(14), linear(24)] == pytest.approx([2.0, 2.0, 1.1, 0.2])
    assert linear(24) == 0.2  # exactly
    constant = Schedule(2.0, 0.1, 4, 25, "constant")
    assert constant(0) == 0.5
    assert {constant(update) for update in range(4, 25)} == {2.0}


@pytest.mark.parametrize(("shape", "half"), [("linear", 0.55), ("cosine", 0.55), ("sqrt", 0.1 + 0.9 * (1 - 0.5**0.5))])
def test_a_wsd_rate_stays_high_until_its_last_updates(shape: DecayShape, half: float) -> None:
    """Of 50 updates the last 10 go down in tenths: the first of them is the first below the peak."""
    rate = Schedule(1.0, 0.1, 5, 50, "wsd", 0.2, shape)
    assert rate.stable_updates == 40
    assert {rate(update) for update in range(4, 40)} == {1.0}
    decay = [rate(update) for update in range(40, 50)]
    assert 1.0 > decay[0] > decay[1]
    assert decay == sorted(decay, reverse=True)
    assert decay[4] == pytest.approx(half)
    assert decay[9] == 0.1  # exactly


def test_the_stable_part_does_not_know_the_budget() -> None:
    short, long = Schedule(1e-3, 0.0, 5, 50, "wsd", 0.2), Schedule(1e-3, 0.0, 5, 500, "wsd", 0.5, "sqrt")
    assert [short(update) for update in range(40)] == [long(update) for update in range(40)]


def test_a_decay_that_begins_inside_the_warmup_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decay_fraction=0\.9 of 50 updates begins after update 5, before the end"):
        Schedule(1e-3, 0.0, 6, 50, "wsd", 0.9)
    assert Schedule(1e-3, 0.0, 5, 50, "wsd", 0.9)(5) < 1e-3


def test_momentum_rises_to_its_value_over_the_warmup() -> None:
    assert [momentum_at(update, 0.95, 4) for update in (0, 2, 4, 100)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert momentum_at(0, 0.95, 0) == 0.95
    assert momentum_at(1, 0.5, 10) == 0.5  # below where it would begin
