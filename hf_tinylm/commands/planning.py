"""`hf-tinylm plan`, `find-batch` and `sweep`: what a run will take, and which settings to give it."""

from __future__ import annotations

import argparse
import sys
import tempfile
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import SECTION_OF_KEY, SECTIONS, load_config, parse_overrides
from ..config_files import find_config
from ..errors import ConfigError, TinyLMError
from ..files import write_text
from ..planning.lines import plan_lines
from ..planning.proposal import RULES, propose
from ..planning.quantities import count, quantity
from ..planning.speed import Assumptions
from ..planning.whole import make_plan
from ..planning.writing import proposal_yaml, write_with_overrides
from ..sections import RunConfig
from ..values import convert
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
    find = add_command(
        commands,
        "find-batch",
        find_batch_size,
        "measure the largest micro-batch that fits on this device and the fastest one, with real updates",
        "hf-tinylm find-batch --config llama-100m --write tuned.yaml",
    )
    takes_config(find)
    add_find_batch_options(find)
    takes_json(find)

    sweep = add_command(
        commands,
        "sweep",
        compare_settings,
        "compare settings in short branches with the same data and seed, one after another; go on where it stopped",
        "hf-tinylm sweep --config demo --train_tokens 400_000 --learning_rate 3e-3 6e-3 1.2e-2",
    )
    takes_config(sweep)
    takes_json(sweep)


def add_find_batch_options(parser: argparse.ArgumentParser) -> None:
    """What the batch-size finder takes besides a configuration."""
    parser.add_argument("--num_processes", default="1", help="processes that will share an update (default 1)")
    parser.add_argument("--seconds", default="10", help="how long each size is timed at least (default 10)")
    parser.add_argument("--max_rows", help="largest size to try (default: what an update holds)")
    parser.add_argument("--write", metavar="NAME.yaml", help="write a copy of the config with the fastest size")


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
    notices: list[str] = []
    problems: list[str] = []
    windows = _chat_windows(config, notices, problems)
    plan = make_plan(config, _assumptions(options), windows)
    plan["notices"] += notices
    plan["problems"] += problems
    print_result(options, plan, lambda: [*rules, *plan_lines(plan)])
    return 1 if plan["problems"] else 0


def _chat_windows(config: RunConfig, notices: list[str], problems: list[str]) -> Any:
    """The windows of a chat run's conversations, rendered; None where something of them is not on this machine yet."""
    data, base = config.data, Path(str(config.training.init_from)).expanduser()
    if not data.conversations or not (base / "config.json").is_file():
        return None
    from ..data.conversations import open_conversations
    from ..data.renderings import is_local
    from ..tokenization.chat import chat_tokenizer
    from ..tokenization.load import find_tokenizer

    try:
        away = [source.path for source in (*data.conversations, *data.test_conversations) if not is_local(source)]
        if away:
            notices.append(f"{', '.join(dict.fromkeys(away))} is no local file and is not counted; preflight does it")
            return None
        tokenizer = chat_tokenizer(config.tokenizer.tokenizer_path or find_tokenizer(base))
        return open_conversations(config, tokenizer, progress=True).train
    except TinyLMError as error:
        problems.append(str(error))
        return None


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
    refuse_existing(options.write)
    wanted = parse_overrides(options.overrides)
    fixed = {}
    for key, value in wanted.items():
        hint = typing.get_type_hints(SECTIONS[SECTION_OF_KEY[key]])[key]
        fixed[key] = convert(value, hint, key)
    size = _named("size", count, options.size)
    tokens = None if options.tokens is None else _named("tokens", count, options.tokens)
    proposal = propose(size, tokens, fixed)
    name = Path(options.write).stem if options.write else f"size-{options.size.lower()}"
    with tempfile.TemporaryDirectory() as folder:
        draft, whole = Path(folder) / "draft.yaml", Path(options.write or Path(folder) / "whole.yaml")
        write_text(draft, proposal_yaml(proposal, size, name))
        write_with_overrides(draft, whole, options.overrides)
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


def find_batch_size(options: argparse.Namespace) -> None:
    """Print the micro-batch sizes that were tried, and write the fastest where asked."""
    config = load_config(options.config, options.overrides)
    refuse_existing(options.write)
    from ..preflight.batch_size import find_batch

    found = find_batch(
        config,
        _named("num_processes", count, options.num_processes),
        _named("seconds", quantity, options.seconds),
        None if options.max_rows is None else _named("max_rows", count, options.max_rows),
        tell=_tell,
    )
    if options.write:
        overrides = [*options.overrides, "--per_device_train_batch_size", str(found.fastest)]
        comment = (
            f"per_device_train_batch_size was measured: fastest {found.fastest}, largest that fits {found.largest}"
        )
        write_with_overrides(find_config(options.config), Path(options.write), overrides, comment)
    written = [f"written to {options.write}"] if options.write else []
    print_result(options, found.to_json(), lambda: [*found.lines(), *written])


def compare_settings(options: argparse.Namespace) -> int:
    """Run a sweep; 1 when no branch finished."""
    from ..preflight.sweep import branches_of, plot_sweep, run_sweep, sweep_lines

    branches = branches_of(options.config, options.overrides)
    outcomes = run_sweep(branches, options.config, _tell)
    picture = branches[0].folder.with_name("sweep.png")
    plot_sweep(branches, picture)
    report = {"branches": [asdict(outcome) for outcome in outcomes], "picture": str(picture)}
    print_result(options, report, lambda: [*sweep_lines(outcomes), f"curves: {picture}"])
    return 0 if any(outcome.status == "finished" for outcome in outcomes) else 1


def refuse_existing(path: str | None) -> None:
    """Raise `ConfigError` when a file to be written is there already."""
    if path is not None and Path(path).exists():
        raise ConfigError(f"{path} exists and would be replaced. Give another name, or remove it.")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
