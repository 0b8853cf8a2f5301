"""The part of a plan that depends on speed: time, money, energy and sessions, from what is claimed or measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contract import METRICS, RUN_FILE
from ..errors import ConfigError
from ..files import read_record, read_rows
from ..sections import RunConfig
from .devices import Device, find_device
from .duration import (
    ASSUMED_MFU,
    ASSUMED_SAVE_BYTES_PER_SECOND,
    ASSUMED_STARTUP_SECONDS,
    Claims,
    Timeline,
    timeline,
    training_hours,
)
from .optimizer import RunFlops, checkpoint_bytes
from .shape import ModelShape
from .updates import UpdatePlan


@dataclass(frozen=True)
class Assumptions:
    """What a plan is asked with besides the configuration; None: not given. Rates are of all devices together."""

    tokens: int | None = None
    num_processes: int = 1
    device: str | None = None
    tokens_per_second: float | None = None
    tokens_per_second_from: str | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    hours: float | None = None
    cost: float | None = None
    watts: float | None = None
    session_hours: float | None = None
    save_seconds: float | None = None
    startup_seconds: float | None = None
    loss: float | None = None
    scale: tuple[int, ...] = ()


def named_device(name: str | None) -> Device | None:
    return None if name is None or name.lower() == "cpu" else find_device(name)


def speed(
    shape: ModelShape, config: RunConfig, updates: UpdatePlan | None, asked: Assumptions, notices: list[str]
) -> dict[str, Any]:
    length = config.data.sequence_length
    flops = RunFlops.of(shape, length, config.training.optim, config.training.muon_ns_steps)
    flops_per_token = flops.per_token + (
        flops.per_update // config.training.global_batch_tokens
        if updates is None
        else flops.per_update * updates.updates // updates.full_tokens
    )
    tokens, share = (0, 1.0) if updates is None else (updates.supervised_tokens, updates.positions_per_token)
    claims, origin, peak = _claims(config, asked, shape, notices)
    hours = None if updates is None else training_hours(claims, tokens, share * flops_per_token)
    price = claims.price_per_hour
    if price is None and hours is not None and asked.cost is not None:
        price = asked.cost / hours
    found: dict[str, Any] = {
        "device": asked.device,
        "num_processes": asked.num_processes,
        "peak_flops": peak,
        "speed_from": origin,
        "price_per_hour": price,
        **dict.fromkeys(_TIMES),
    }
    if updates is None or hours is None:
        return found
    rate = tokens / hours / 3600
    computed = rate * share  # positions a second
    time = _timeline(shape, config, updates, asked, hours, computed)
    each, sessions = (None, None) if asked.session_hours is None else time.sessions(asked.session_hours, tokens)
    return found | {
        "tokens_per_second": rate,
        "flops_per_second": computed * flops_per_token,
        "flops_per_second_without_attention": computed * shape.flops_per_token(),
        "flops_per_second_causal": computed * shape.flops_per_token_causal(length),
        "mfu": None if peak is None else computed * flops_per_token / peak,
        "hours": hours,
        "hours_without_attention": hours * shape.flops_per_token() / flops_per_token,
        "cost": None if price is None else hours * price,
        **_end_to_end(time, tokens, price, asked.watts),
        "tokens_per_session": each,
        "sessions": sessions,
    }


_TIMES = (
    *("tokens_per_second", "flops_per_second", "flops_per_second_without_attention", "flops_per_second_causal", "mfu"),
    *("hours", "hours_without_attention", "cost", "hours_end_to_end", "cost_end_to_end", "saves", "save_seconds"),
    *("evaluations", "seconds_by_part", "tokens_per_second_end_to_end", "kilowatt_hours"),
    *("tokens_per_session", "sessions"),
)


def _claims(
    config: RunConfig, asked: Assumptions, shape: ModelShape, notices: list[str]
) -> tuple[Claims, str | None, float | None]:
    """What is claimed about speed, where it comes from, and the peak of all devices in FLOP/s."""
    device = named_device(asked.device)
    peak = device.peak_flops * asked.num_processes if device else None
    if asked.mfu is not None and peak is None:
        raise ConfigError(f"mfu={asked.mfu:g} is a share of a device's peak. Name the device: --device H100.")
    rate, mfu, origin = asked.tokens_per_second, asked.mfu, None
    if asked.tokens_per_second_from is not None:
        measured = _measured_rate(Path(asked.tokens_per_second_from), shape, notices)
        if rate is not None and abs(rate / measured - 1) > 0.01:
            raise ConfigError(
                f"tokens_per_second={rate:g} and the {measured:g} of {asked.tokens_per_second_from} do not agree. "
                "Leave out one of them."
            )
        rate, origin = measured, f"median of {asked.tokens_per_second_from}"
    given = (rate, asked.flops_per_second, mfu, asked.hours)
    if all(value is None for value in given):
        price = config.training.price_per_hour
        if asked.cost is not None and price is not None:
            origin = "cost and price"
        elif peak is not None:
            mfu, origin = ASSUMED_MFU, f"assumed: an mfu of {ASSUMED_MFU:g} on {asked.device}"
    claims = Claims(
        rate, asked.flops_per_second, mfu, peak, asked.hours, asked.cost, config.training.price_per_hour
    )  # fmt: skip
    return claims, origin or ("given" if any(value is not None for value in given) else None), peak


def _measured_rate(run: Path, shape: ModelShape, notices: list[str]) -> float:
    """Median tokens per second of a run's updates.

    Raises:
        ConfigError: the folder has no such rows.
    """
    rates = [row["tokens_per_second"] for row in read_rows(run / METRICS) if row.get("tokens_per_second")]
    if not rates:
        raise ConfigError(f"{run}/{METRICS} has no updates to measure by. Give the folder of a run that has trained.")
    if (run / RUN_FILE).is_file():
        model = read_record(run / RUN_FILE, "identity")["identity"]["model"]
        same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        differing = [name for name in same if model.get(name) != getattr(shape, name)]
        if differing:
            told = ", ".join(f"{name} {model.get(name)} there, {getattr(shape, name)} here" for name in differing)
            notices.append(f"{run} trained another shape ({told}): its speed says little about this one")
    return float(statistics.median(rates))


def _timeline(
    shape: ModelShape, config: RunConfig, updates: UpdatePlan, asked: Assumptions, hours: float, rate: float
) -> Timeline:
    training = config.training
    save = asked.save_seconds
    startup = asked.startup_seconds
    return timeline(
        hours, updates.updates, training.save_steps, training.save_minutes,
        checkpoint_bytes(shape, training.optim) / ASSUMED_SAVE_BYTES_PER_SECOND if save is None else save,
        training.eval_steps, config.evaluation.eval_tokens * (1 + len(config.evaluation.eval_sets)), rate,
        ASSUMED_STARTUP_SECONDS if startup is None else startup,
    )  # fmt: skip


def _end_to_end(time: Timeline, tokens: int, price: float | None, watts: float | None) -> dict[str, Any]:
    hours = time.seconds / 3600
    return {
        "hours_end_to_end": hours,
        "cost_end_to_end": None if price is None else hours * price,
        "saves": time.saves,
        "save_seconds": time.save_seconds,
        "evaluations": time.evaluations,
        "seconds_by_part": {
            "training": time.training,
            "saves": time.saves * time.save_seconds,
            "evaluation": time.evaluations * time.evaluation_seconds,
            "start-up": time.startup_seconds,
        },
        "tokens_per_second_end_to_end": time.tokens_per_second(tokens),
        "kilowatt_hours": None if watts is None else watts * hours / 1000,
    }
