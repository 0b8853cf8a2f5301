"""`hf-tinylm persona check`, `chat`, `serve` and `promote`: what becomes of a model that talks."""

from __future__ import annotations

import argparse
from typing import Any

from .options import add_command, print_result, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    persona = commands.add_parser("persona", help="check conversations written for a persona").add_subparsers(
        required=True, metavar="COMMAND"
    )
    check = add_command(
        persona,
        "check",
        persona_check,
        "find duplicates, leaks into the test set, other names, wrong roles and long replies in a persona set",
        "hf-tinylm persona check recipes/persona",
    )
    check.add_argument("paths", nargs="+", metavar="PATH", help="a folder with train.jsonl and test.jsonl, or files")
    check.add_argument("--name", help="the assistant's name (default: the one claimed most often)")
    takes_json(check)


def persona_check(options: argparse.Namespace) -> int:
    """Print every problem of a persona set with its file and line; 1 when there is one."""
    from ..data.persona import check_persona

    report = check_persona(options.paths, options.name)
    print_result(options, report.to_json(), report.lines)
    return 0 if report.ok else 1
