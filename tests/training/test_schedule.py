from __future__ import annotations

import pytest

from hf_tinylm.errors import ConfigError
from hf_tinylm.training.schedule import Schedule


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
