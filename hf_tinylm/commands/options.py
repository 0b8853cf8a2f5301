"""What commands share: their parsers, the configuration they name, and how they print."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from ..config import load_config
from ..errors import ConfigError
from ..sections import RunConfig


def add_command(
    commands: Any, name: str, run: Callable[..., Any], help_line: str, example: str
) -> argparse.ArgumentParser:
    """A command with a help line and an example; `run(options)` gives its exit code, or None."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,
        help=help_line,
        description=help_line[0].upper() + help_line[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(run=run)
    return parser


def takes_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """`--config` and `--key value` for any of its keys."""
    reads_config(parser, required)
    parser.set_defaults(takes_overrides=True)
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').strip()} [--key value ...]"


def reads_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """`--config` alone."""
    parser.add_argument("--config", required=required, help="a YAML file, or the name of a bundled one such as demo")


def takes_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def recipe_config(description: str | None, arguments: Sequence[str] | None) -> RunConfig:
    """The configuration on the command line of a recipe: --config NAME, and any key of it as --key value.

    Args:
        description: what `--help` prints.
        arguments: None: those of this process.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    reads_config(parser)
    known, overrides = parser.parse_known_args(arguments)
    return load_config(known.config, overrides)


def config_of(options: argparse.Namespace) -> RunConfig:
    """The configuration that a command names, with its overrides; it must have sources."""
    config = load_config(options.config, options.overrides)
    if not config.data.sources:
        raise ConfigError(f"{options.config} has no data.sources. Name at least one source of text.")
    return config


def print_result(options: argparse.Namespace, value: Any, lines: Callable[[], Sequence[str]]) -> None:
    """One JSON object with `--json`, else lines for people."""
    print(json.dumps(value, ensure_ascii=False) if options.json else "\n".join(lines()))
