"""`hf-tinylm`: every command of the package. Heavy imports are inside the commands, so `--help` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import chat, data, evaluation, export, hub, monitor, planning, preflight
from .commands.options import add_command
from .errors import exit_with_error_line
from .files import bundled


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit code."""
    parser = build_parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and not getattr(known, "takes_overrides", False):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    known.overrides = rest
    return exit_with_error_line(lambda: known.run(known))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="hf-tinylm",
        allow_abbrev=False,
        description="Train a small language model from raw text to a GGUF file that llama.cpp runs.",
        epilog="example: hf-tinylm tokenizer train --config demo && hf-tinylm prepare --config demo",
    )
    parser.add_argument("--version", action="version", version=f"hf-tinylm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = add_command(
        commands,
        "demo",
        run_the_demo,
        "the whole road on bundled prose in minutes: text to tokenizer, shards, model and llama.cpp, in runs/demo",
        "hf-tinylm demo --train_tokens 1_000_000",
    )
    demo.set_defaults(takes_overrides=True)

    for module in (data, planning, preflight, evaluation, export, chat, hub, monitor):
        module.register(commands)

    where = add_command(
        commands,
        "where",
        print_where,
        "print the folder of the bundled recipes, configs, tokenizer or eval files",
        'accelerate launch "$(hf-tinylm where recipes)/pretrain.py" --config demo',
    )
    where.add_argument("what", choices=("recipes", "tokenizer", "eval"))
    return parser


def run_the_demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    from .demo import run_demo

    return run_demo(options.overrides)


def print_where(options: argparse.Namespace) -> None:
    """Print a bundled folder."""
    print(bundled(options.what))


if __name__ == "__main__":
    sys.exit(main())
