"""Run the benchmarks: `python -m benchmarks` for all, `python -m benchmarks stall overhead` for some.

Each prints a table and writes benchmarks/results/NAME-DATE.json with the machine's name. Figures are medians; compare
ratios within one run, not times between machines.
"""

from __future__ import annotations

import argparse
import importlib

from .machine import report

NAMES = ("overhead", "stall", "train", "prepare", "reading", "eval", "scaling")


def main() -> None:
    """Run what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    for name in parser.parse_args().names or NAMES:
        print(f"--- {name}", flush=True)
        report(name, importlib.import_module(f".{name}", __package__).measure())


if __name__ == "__main__":
    main()
