"""`hf-tinylm tail`, `monitor`, `diagnose`, `report`: a run seen from outside, by its folder, at no cost to the run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .options import add_command, print_result, takes_json


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

    monitor = add_command(
        commands,
        "monitor",
        serve_page,
        "a page in the browser that follows a run; for a run on another machine: ssh -L 8765:127.0.0.1:8765 MACHINE",
        "hf-tinylm monitor runs/my",
    )
    monitor.add_argument("run_dir", metavar="RUN_DIR", help="output_dir of a run, also of one that has yet to begin")
    monitor.add_argument("--port", default="8765", help="default: 8765; 0: any that is free")
    monitor.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: this machine alone can see the page)"
    )

    report = add_command(
        commands,
        "report",
        write_report,
        "one self-contained HTML page of a run, or of several on the same axes",
        "hf-tinylm report runs/my && hf-tinylm report runs/a runs/b --output comparison.html",
    )
    report.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="output_dir of a run; several are compared")
    report.add_argument("--output", metavar="FILE.html", help="default: RUN_DIR/report.html; needed for several runs")
    report.add_argument("--pdf", action="store_true", help="write the curves as a PDF too, beside the page")
    report.add_argument("--png", action="store_true", help="write the curves as a PNG too, beside the page")


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


def serve_page(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    folder = Path(options.run_dir)
    if not (options.port.isascii() and options.port.isdigit() and int(options.port) < 2**16):
        raise ConfigError(f"port {options.port!r} is none. Give a number from 0 (any that is free) to 65535.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; the folder of a run was expected. Give its output_dir.")
    from ..monitor.run import Run
    from ..monitor.server import MonitorServer

    try:
        Run(folder)
    except ConfigError as error:
        print(f"notice: {error} The page waits for its files.", file=sys.stderr, flush=True)
    with MonitorServer(folder, options.host, int(options.port)) as server:
        print(server.url, flush=True)
        if not server.only_this_machine:
            print("notice: whoever reaches this machine can read the page.", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 130  # asked for, and nothing is lost
    return 0


def write_report(options: argparse.Namespace) -> None:
    """Write the page, and pictures of the curves where asked, and print their paths."""
    from ..files import write_text
    from ..monitor.charts import write_picture
    from ..monitor.compare import comparison_charts, comparison_page
    from ..monitor.lineage import curves_of
    from ..monitor.report import REPORT, report_page
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
    write_text(output, report_page(runs[0]) if len(runs) == 1 else comparison_page(runs))
    print(output)
    for kind in (kind for kind in ("pdf", "png") if getattr(options, kind)):
        charts = curves_of(runs[0]) if len(runs) == 1 else comparison_charts(runs)
        picture = output.with_suffix(f".{kind}")
        if write_picture(charts, picture):
            print(picture)
        else:
            print(f"notice: {picture} was not written: there are no two updates to draw.", file=sys.stderr)
