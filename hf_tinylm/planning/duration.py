"""Time, money and energy of a run from a throughput, however it is given; inputs that disagree are an error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError

# A forward pass is a third of a training step's arithmetic: 2N of 6N.
_EVALUATION_SPEEDUP = 3
# Where nothing better is known: a save holds training up for the copy of its checkpoint at this rate.
ASSUMED_SAVE_BYTES_PER_SECOND = 1e9
ASSUMED_STARTUP_SECONDS = 60.0
# What a well-run small model reaches on one device by PaLM's count, when only the device is named.
ASSUMED_MFU = 0.4
_TOLERANCE = 0.01


@dataclass(frozen=True)
class Claims:
    """What was said about speed, time and money; None: nothing. `mfu` needs `peak_flops` (of all devices together)."""

    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    peak_flops: float | None = None
    hours: float | None = None
    cost: float | None = None
    price_per_hour: float | None = None


def training_hours(claims: Claims, tokens: int, flops_per_token: float) -> float | None:
    """The hours of training that every claim gives alike; None when there is no claim.

    Args:
        tokens: supervised targets of the run.
        flops_per_token: with attention, PaLM's count, which `mfu` and `flops_per_second` use; for each target.

    Raises:
        ConfigError: two claims differ by more than one per cent; every sum is shown.
    """
    sums = _sums(claims, tokens, flops_per_token)
    if not sums:
        return None
    hours = [found for found, _ in sums]
    if max(hours) > min(hours) * (1 + _TOLERANCE):
        told = "; ".join(sum_ for _, sum_ in sums)
        raise ConfigError(f"These inputs do not agree: {told}. Leave out or correct one of them.")
    return hours[0]


def _sums(claims: Claims, tokens: int, flops_per_token: float) -> list[tuple[float, str]]:
    """(hours, how they come about) of each claim, the most direct first."""
    flops = tokens * flops_per_token
    sums = []
    if claims.tokens_per_second is not None:
        rate = claims.tokens_per_second
        hours = tokens / rate / 3600
        sums.append((hours, f"{tokens:,} tokens / {rate:,.6g} tokens/s / 3,600 = {hours:.3f} hours"))
    if claims.flops_per_second is not None:
        hours = flops / claims.flops_per_second / 3600
        sums.append((hours, f"{flops:.4g} FLOPs / {claims.flops_per_second:.4g} FLOP/s / 3,600 = {hours:.3f} hours"))
    if claims.mfu is not None and claims.peak_flops is not None:
        hours = flops / (claims.mfu * claims.peak_flops) / 3600
        rate_shown = f"{claims.mfu:g} of {claims.peak_flops:.4g} FLOP/s"
        sums.append((hours, f"{flops:.4g} FLOPs / {rate_shown} / 3,600 = {hours:.3f} hours"))
    if claims.hours is not None:
        sums.append((claims.hours, f"hours={claims.hours:g}"))
    if claims.cost is not None and claims.price_per_hour is not None:
        hours = claims.cost / claims.price_per_hour
        sums.append((hours, f"cost {claims.cost:g} / {claims.price_per_hour:g} per hour = {hours:.3f} hours"))
    return sums


@dataclass(frozen=True)
class Timeline:
    """Seconds of a run by what they go into."""

    training: float
    saves: int
    save_seconds: float
    evaluations: int
    evaluation_seconds: float
    startup_seconds: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return (
            self.training
            + self.saves * self.save_seconds
            + self.evaluations * self.evaluation_seconds
            + self.startup_seconds
        )

    def tokens_per_second(self, tokens: int) -> float:
        """End to end."""
        return tokens / self.seconds

    def sessions(self, session_hours: float, tokens: int) -> tuple[int, int]:
        """Tokens of one session of limited length, and sessions that the run needs: an estimate.

        Each session starts up and ends with a save; in between training, saves and evaluations share the time as they
        do over the whole run.

        Raises:
            ConfigError: a session is over before it has trained.
        """
        usable = 3600 * session_hours - self.startup_seconds - self.save_seconds
        running = self.seconds - self.startup_seconds
        each = int(usable * tokens / running) if usable > 0 else 0
        if each < 1:
            raise ConfigError(
                f"session_hours={session_hours:g} are {3600 * session_hours:,.0f} seconds; start-up takes "
                f"{self.startup_seconds:g} and the save at the end {self.save_seconds:g}, so nothing is trained. "
                "Give longer sessions."
            )
        return min(each, tokens), math.ceil(tokens / each)


def timeline(
    hours: float, updates: int, save_steps: int | None, save_minutes: float | None, save_seconds: float,
    eval_steps: int | None, eval_tokens: int, tokens_per_second: float, startup_seconds: float,
) -> Timeline:  # fmt: skip
    """Where the time of a run of `hours` of training goes, from its intervals of saving and evaluating."""
    training = 3600 * hours
    return Timeline(
        training=training,
        saves=saves_of(updates, training / updates, save_steps, save_minutes),
        save_seconds=save_seconds,
        evaluations=updates // eval_steps if eval_steps else 0,
        evaluation_seconds=eval_tokens / (_EVALUATION_SPEEDUP * tokens_per_second),
        startup_seconds=startup_seconds,
    )


def saves_of(updates: int, seconds_per_update: float, save_steps: int | None, save_minutes: float | None) -> int:
    """Saves of a run: by updates, by the clock when the last one is `save_minutes` ago, and after the last update."""
    by_steps = -(-updates // save_steps) if save_steps else 1
    if save_minutes is None:
        return by_steps
    between = min(save_steps or updates, updates) * seconds_per_update
    return by_steps * max(1, math.ceil(between / (60 * save_minutes)))
