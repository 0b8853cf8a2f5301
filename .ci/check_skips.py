"""Fail when a test was skipped, or expected to fail, that the written list does not allow.

Usage: check_skips.py ALLOWED.txt REPORT.xml [REPORT.xml ...]     (reports of pytest --junitxml)
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from fnmatch import fnmatchcase
from pathlib import Path


def skipped_tests(report: Path) -> list[tuple[str, str]]:
    """(`module::test`, reason) of every test of a report that did not run to a verdict."""
    skipped = []
    for case in ElementTree.parse(report).iter("testcase"):
        for mark in case.findall("skipped"):
            name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
            skipped.append((name, mark.get("message") or ""))
    return skipped


def allowed_patterns(path: Path) -> list[str]:
    """The patterns of the list, comments and empty lines left out."""
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def main(arguments: list[str]) -> int:
    """Print each skipped test that is not allowed; 1 if there is one or if a report is missing, else 0."""
    patterns = allowed_patterns(Path(arguments[0]))
    reports = [Path(argument) for argument in arguments[1:]]
    missing = [report for report in reports if not report.is_file()]
    skipped = [entry for report in reports if report not in missing for entry in skipped_tests(report)]
    refused = [(name, reason) for name, reason in skipped if not any(fnmatchcase(name, p) for p in patterns)]
    for report in missing:
        print(f"error: {report.name} was not written, so its tests did not run to the end.")
    for name, reason in refused:
        print(f"error: {name} was skipped ({reason}). Make it run, or add it with a reason to {arguments[0]}.")
    print(f"{len(skipped)} skipped, {len(refused)} of them not allowed")
    return 1 if refused or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
