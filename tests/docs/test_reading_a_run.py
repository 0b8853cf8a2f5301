"""The page on reading a run shows what the script makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from runpy import run_path

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = run_path(str(DOCS / "pictures" / "reading_a_run.py"))


def test_each_run_of_the_script_has_a_small_picture_on_the_page() -> None:
    shown = re.findall(r"\(pictures/(\w+)\.png\)", (DOCS / "reading-a-run.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(SCRIPT["RUNS"])
    for name in shown:
        content = (DOCS / "pictures" / f"{name}.png").read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(content) < 60_000


def test_a_named_run_writes_an_ordinary_run_folder_once_with_its_fault(tiny_config: Path, tmp_path: Path) -> None:
    """The tiny configuration takes the place of the script's own, which trains for longer."""
    (tmp_path / "shards").symlink_to(tiny_config.parent / "shards")
    (tmp_path / "config.yaml").write_text(tiny_config.read_text())
    SCRIPT["RUNS"]["unshifted_targets"](tmp_path / "unshifted_targets")
    SCRIPT["RUNS"]["good"](tmp_path / "good")
    first = {}
    for name in ("unshifted_targets", "good"):
        run = tmp_path / name
        assert {"run.json", "metrics.jsonl", "events.jsonl", "final", "DONE.json"} <= {p.name for p in run.iterdir()}
        first[name] = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first["unshifted_targets"] < 5 < 6.238 < first["good"]  # ln 512 = 6.238
    before = (tmp_path / "good" / "DONE.json").stat().st_mtime_ns
    SCRIPT["RUNS"]["good"](tmp_path / "good")
    assert (tmp_path / "good" / "DONE.json").stat().st_mtime_ns == before
    SCRIPT["picture"](tmp_path / "unshifted_targets", tmp_path / "good", tmp_path / "picture.png")
    assert 5_000 < (tmp_path / "picture.png").stat().st_size < 60_000
    assert SCRIPT["facts"]("good", tmp_path / "good").startswith(f"| good | {first['good']:.2f} |")
