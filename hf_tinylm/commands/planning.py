"""`hf-tinylm plan`, `find-batch` and `sweep`: what a run will take, and which settings to give it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from ..config import SECTION_OF_KEY, load_config, parse_overrides
from ..errors import ConfigError
from ..files import write_text
from ..planning.lines import plan_lines
from ..planning.proposal import RULES, propose
from ..planning.quantities import count, quantity
from ..planning.speed import Assumptions
from ..planning.whole import make_plan
from ..planning.writing import proposal_yaml, write_with_keys
from ..sections import RunConfig
from .options import add_command, print_result, takes_config, takes_json

_RATES = {
    "tokens_per_second": "a speed, of all devices together",
    "flops_per_second": "a speed in FLOP/s with attention, such as 50e12",
    "mfu": "a speed as a share of the peak of --device, such as 0.4",
    "hours": "hours of training",
    "cost": "money in total",
    "watts": "mean power of all devices together",
    "session_hours": "length of a session, as on a free machine: how many are needed (an estimate)",
    "save_seconds": "how long one save holds training up (default: 1 s per GB, assumed)",
    "startup_seconds": "from start to first update (default: 60, assumed)",
    "loss": "a loss in nats to show as perplexity",
}


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    _register_plan(commands)


def _register_plan(commands: Any) -> None:
    plan = add_command(
        commands,
        "plan",
        plan_run,
        "parameters, updates, FLOPs, memory, disk, time and money of a run, from its config alone",
        "hf-tinylm plan --config llama-100m --tokens_per_second 24000 --price_per_hour 1.10",
    )
    takes_config(plan, required=False)
    plan.add_argument("--size", help="propose a whole configuration of this many parameters, such as 50M")
    plan.add_argument("--tokens", help="the budget, such as 1B (default: of the config; with --size 20 per parameter)")
    plan.add_argument("--write", metavar="NAME.yaml", help="with --size: write the proposal, rules as comments")
    plan.add_argument("--device", help="cpu, or a GPU or TPU by name, such as H100 or 'RTX 5070 Ti'")
    plan.add_argument("--num_processes", default="1", help="devices that share an update (default 1)")
    for name, meaning in _RATES.items():
        plan.add_argument(f"--{name}", help=meaning)
    plan.add_argument(
        "--tokens-per-second-from", "--tokens_per_second_from", metavar="RUN_DIR", help="the median speed of a real run"
    )
    plan.add_argument("--scale", nargs="+", default=[], metavar="SIZE", help="other sizes, such as 300M 1B")
    takes_json(plan)


def plan_run(options: argparse.Namespace) -> int:
    """Print a plan; 1 when the run would be refused."""
    config, rules = _proposed(options) if options.size else (_configured(options), [])
    plan = make_plan(config, _assumptions(options))
    print_result(options, plan, lambda: [*rules, *plan_lines(plan)])
    return 1 if plan["problems"] else 0


def _configured(options: argparse.Namespace) -> RunConfig:
    if options.config is None:
        raise ConfigError("plan needs a configuration or a size. Give --config NAME or --size 50M.")
    if options.write:
        raise ConfigError("--write goes with --size: it writes a proposal. Leave it out, or give --size 50M.")
    return load_config(options.config, options.overrides)


def _proposed(options: argparse.Namespace) -> tuple[RunConfig, list[str]]:
    """The configuration of `--size`, written where asked, and lines on the rules it follows."""
    if options.config is not None:
        raise ConfigError(f"--size proposes a configuration, and --config {options.config} names one. Leave out one.")
    wanted = parse_overrides(options.overrides)
    checked = load_config(None, options.overrides)
    fixed = {key: getattr(getattr(checked, SECTION_OF_KEY[key]), key) for key in wanted}
    size = _named("size", count, options.size)
    tokens = None if options.tokens is None else _named("tokens", count, options.tokens)
    proposal = propose(size, tokens, fixed)
    name = Path(options.write).stem if options.write else f"size-{options.size.lower()}"
    with tempfile.TemporaryDirectory() as folder:
        draft, whole = Path(folder) / "draft.yaml", Path(options.write or Path(folder) / "whole.yaml")
        write_text(draft, proposal_yaml(proposal, size, name))
        if options.write and whole.exists():
            raise ConfigError(f"{whole} exists and would be replaced. Give another name, or remove it.")
        write_with_keys(draft, whole, {key: value for key, value in fixed.items() if key not in proposal})
        config = load_config(str(whole))
    lines = ["a starting proposal, not an optimum; give --key value for what should be another value:"]
    for key, value in proposal.items():
        lines.append(f"{key:<28} {_shown(value):>14}   {'given' if key in fixed else RULES[key]}")
    return config, [*lines, *([f"written to {options.write}"] if options.write else []), ""]


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _assumptions(options: argparse.Namespace) -> Assumptions:
    rates = {}
    for name in _RATES:
        text = getattr(options, name)
        rates[name] = None if text is None else _named(name, quantity, text)
    if rates["mfu"] is not None and rates["mfu"] > 1:
        raise ConfigError(f"mfu={rates['mfu']:g} is above the whole peak; give a share such as 0.4.")
    return Assumptions(
        tokens=None if options.tokens is None else _named("tokens", count, options.tokens),
        num_processes=_named("num_processes", count, options.num_processes),
        device=options.device,
        tokens_per_second_from=options.tokens_per_second_from,
        scale=tuple(_named("scale", count, text) for text in options.scale),
        **rates,
    )


def _named(name: str, parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"--{name}: {error}") from error
