"""Run the benchmarks: `python -m benchmarks` for all, `python -m benchmarks stall overhead` for some.

Each prints a table and writes benchmarks/results/NAME-DATE.json with the machine's name. Figures are medians; compare
ratios within one run, not times between machines.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
from pathlib import Path

from .machine import machine

NAMES = ("overhead", "stall", "train", "prepare", "eval")


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    for name in parser.parse_args().names or NAMES:
        print(f"--- {name}", flush=True)
        found = importlib.import_module(f".{name}", __package__).measure()
        print(json.dumps(found, indent=2))
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        day = datetime.date.today().isoformat()
        report = {"benchmark": name, "date": day, "machine": machine(), "results": found}
        (folder / f"{name}-{day}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
