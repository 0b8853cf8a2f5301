"""`hf-tinylm preflight`: checks before a long run."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import load_config
from ..errors import ConfigError
from .options import add_command, print_result, takes_config, takes_json
from .planning import find_batch_size


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
    preflight.add_argument(
        "--find-batch", "--find_batch", action="store_true", help="instead: measure the micro-batch size (find-batch)"
    )
    preflight.add_argument("--write", metavar="NAME.yaml", help="with --find-batch: a copy with the fastest size")
    preflight.set_defaults(num_processes="1", seconds="10", max_rows=None)


def check_run(options: argparse.Namespace) -> int:
    """Print every check of the run that a config describes; 1 when one fails."""
    if options.find_batch:
        find_batch_size(options)
        return 0
    if options.write:
        raise ConfigError("--write goes with --find-batch: it writes the measured size. Leave it out, or give both.")
    config = load_config(options.config, options.overrides)
    from ..preflight.report import report_json, report_lines
    from ..preflight.run import examine

    checks = examine(config)
    print_result(options, report_json(checks), lambda: report_lines(checks))
    return 0 if all(check.ok for check in checks) else 1
