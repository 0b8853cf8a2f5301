"""`hf-tinylm preflight` and `verify-run`: checks before a long run, and of a run that was moved."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
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
        "hf-tinylm preflight --config demo --learning_rate 4e-3",
    )
    takes_config(preflight)
    takes_json(preflight)
    preflight.add_argument(
        "--find-batch", "--find_batch", action="store_true", help="instead: measure the micro-batch size (find-batch)"
    )
    preflight.add_argument("--write", metavar="NAME.yaml", help="with --find-batch: a copy with the fastest size")
    verify = add_command(
        commands,
        "verify-run",
        verify_moved_run,
        "prove that a moved run is the recorded one: hashes, windows, text, and the validation loss once more",
        "hf-tinylm verify-run runs/my --shards /data/shards",
    )
    verify.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    verify.add_argument("--shards", required=True, metavar="DIR", help="where its shards are now")
    verify.add_argument("--tokenizer", metavar="DIR", help="its tokenizer (default: in final, or where it was)")
    verify.add_argument(
        "--checkpoint", type=int, metavar="N", help="update whose validation is repeated (default: newest evaluated)"
    )
    takes_json(verify)
    preflight.set_defaults(num_processes="1", seconds="10", max_rows=None)


def verify_moved_run(options: argparse.Namespace) -> int:
    """Print every check of a moved run; 1 when one fails."""
    from ..preflight.moved_run import MovedRun, may_be_written, verify_run
    from ..preflight.report import report_json, report_lines

    run = MovedRun(Path(options.run_dir), Path(options.shards), options.checkpoint, options.tokenizer)
    checks = verify_run(run)
    print_result(options, report_json(checks), lambda: report_lines(checks, "verify-run"))
    if not may_be_written(run.folder):
        print(f"notice: {run.folder} may not be written to; the outcome is not in its events.jsonl.", file=sys.stderr)
    return 0 if all(check.ok for check in checks) else 1


def check_run(options: argparse.Namespace) -> int:
    """Print every check of the run that a config describes; 1 when one fails."""
    if options.find_batch:
        find_batch_size(options)
        return 0
    if options.write:
        raise ConfigError("--write goes with --find-batch: it writes the measured size. Leave it out, or give both.")
    config = load_config(options.config, options.overrides)
    from ..preflight.checks import none_failed
    from ..preflight.report import report_json, report_lines
    from ..preflight.run import examine

    checks = examine(config)
    print_result(options, report_json(checks), lambda: report_lines(checks))
    return 0 if none_failed(checks) else 1
