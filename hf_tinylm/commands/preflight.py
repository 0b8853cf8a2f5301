"""`hf-tinylm preflight`: checks before a long run."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import load_config
from .options import add_command, print_result, takes_config, takes_json


def register(commands: Any) -> None:
    """Add this command to the parser."""
    preflight = add_command(
        commands,
        "preflight",
        check_run,
        "check the data, model, mathematics and machine of a run in minutes, before it costs hours",
        "hf-tinylm preflight --config demo --learning_rate 1e-3",
    )
    takes_config(preflight)
    takes_json(preflight)


def check_run(options: argparse.Namespace) -> int:
    """Print every check of the run that a config describes; 1 when one fails."""
    config = load_config(options.config, options.overrides)
    from ..preflight.report import report_json, report_lines
    from ..preflight.run import examine

    checks = examine(config)
    print_result(options, report_json(checks), lambda: report_lines(checks))
    return 0 if all(check.ok for check in checks) else 1
