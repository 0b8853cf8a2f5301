"""`hf-tinylm tail`, `report` and `diagnose`: a run seen from outside. They read its folder and cost the run nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .options import add_command, print_result, takes_json

REPORT = "report.html"


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    tail = add_command(
        commands,
        "tail",
        tail_run,
        "a running or finished run in the terminal: progress, last rows, time left, checkpoints, events",
        "hf-tinylm tail runs/my --follow",
    )
    tail.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    how = tail.add_mutually_exclusive_group()
    how.add_argument("--follow", action="store_true", help="go on until the run is finished; Ctrl-C ends it")
    how.add_argument("--once", action="store_false", dest="follow", help="print once and end (the default)")
    takes_json(tail)

    diagnosis = add_command(
        commands,
        "diagnose",
        diagnose_run,
        "what is wrong with a running or finished run: evidence, meaning and next step; exit 1 when something is",
        "hf-tinylm diagnose runs/my",
    )
    diagnosis.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run")
    takes_json(diagnosis)

    report = add_command(
        commands,
        "report",
        write_report,
        "one self-contained HTML page of a run, or of several on the same axes",
        "hf-tinylm report runs/my && hf-tinylm report runs/a runs/b --output comparison.html",
    )
    report.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="output_dir of a run; several are compared")
    report.add_argument("--output", metavar="FILE.html", help=f"default: RUN_DIR/{REPORT}; needed for several runs")


def tail_run(options: argparse.Namespace) -> int:
    """Print the state of a run, once or until it is finished."""
    if options.follow and options.json:
        raise ConfigError("--json prints one object, so it cannot follow. Leave out --follow or --json.")
    from ..monitor.tail import follow, open_run, state_lines, state_of

    try:
        run = open_run(Path(options.run_dir))
        if options.follow:
            follow(run, lambda line: print(line, flush=True))
        else:
            state = state_of(run)
            print_result(options, state, lambda: state_lines(state))
    except KeyboardInterrupt:
        return 130  # asked for, and nothing is lost: no word on it
    return 0


def diagnose_run(options: argparse.Namespace) -> int:
    """Print the findings; 1 when there are any."""
    from ..monitor.diagnosis import as_json, diagnose, finding_lines
    from ..monitor.run import Run
    from ..monitor.tail import printable

    run = Run(Path(options.run_dir))
    found = diagnose(run)
    updates = len(run.updates)
    told = {"run": run.name, "status": run.status(), "updates": updates, "findings": as_json(found)}
    lines = [*finding_lines(found, updates), *(f"notice: {words}" for words in run.missing)]
    print_result(options, told, lambda: [printable(line) for line in lines])
    return int(bool(found))


def write_report(options: argparse.Namespace) -> None:
    """Write the page and print its path."""
    from ..files import write_text
    from ..monitor.run import Run

    folders = [Path(name) for name in options.run_dirs]
    if len(folders) > 1 and options.output is None:
        raise ConfigError("several runs have no folder of their own for a page. Say where: --output comparison.html.")
    if len(folders) > 26:
        raise ConfigError(f"{len(folders)} runs were given; 26 fit on one page. Leave some out.")
    output = Path(options.output) if options.output else folders[0] / REPORT
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; a file was expected. Give --output FILE.html.")
    runs = [Run(folder) for folder in folders]
    if len(runs) == 1:
        from ..monitor.report import report_page

        text = report_page(runs[0])
    else:
        from ..monitor.compare import comparison_page

        text = comparison_page(runs)
    write_text(output, text)
    print(output)
