"""A second copy of a run's rows, from which it can be read when its folder is gone."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_tinylm.errors import ConfigError
from hf_tinylm.files import write_text
from hf_tinylm.training import mirror as module
from hf_tinylm.training.mirror import Mirror


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Path, Mirror, list[str]]]]:
    """A function that starts the mirror of a small run: (its folder, the mirror's, the mirror, what it told)."""
    threads = []

    def start(folder: str = "mirror") -> tuple[Path, Path, Mirror, list[str]]:
        run, told = tmp_path / "run", []
        run.mkdir()
        (run / "run.json").write_text('{"identity": 1}')
        (run / "events.jsonl").write_text('{"step": 0}\n')
        (run / "metrics.jsonl").write_text('{"step": 1}\n{"st')
        mirror = Mirror(run, str(tmp_path / folder), told.append)
        mirror.start()
        threads.append(mirror._thread)
        return run, tmp_path / folder, mirror, told

    yield start
    for thread in threads:
        thread.join(0.01)


def test_whole_lines_arrive_and_a_resume_takes_its_rows_back(started: Callable[..., tuple]) -> None:
    run, copy, mirror, told = started()
    mirror.finish()
    assert (copy / "metrics.jsonl").read_text() == '{"step": 1}\n'
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    (run / "hardware.jsonl").write_text('{"time": 1}\n')
    mirror.finish()
    assert (copy / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert (copy / "hardware.jsonl").read_text() == '{"time": 1}\n'
    before = (copy / "metrics.jsonl").stat().st_ino
    assert mirror._thread is not None
    assert not mirror._thread.is_alive()  # another trainer of this process may go on with the run
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4}\n')
    mirror.finish()
    assert (copy / "metrics.jsonl").stat().st_ino == before  # appended, not written anew
    write_text(run / "metrics.jsonl", '{"step": 1}\n{"step": 2}\n')
    (run / "DONE.json").write_text("{}")
    mirror.finish()
    assert (copy / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (copy / "DONE.json").read_text() == "{}"
    assert (copy / "run.json").read_bytes() == (run / "run.json").read_bytes()
    assert json.loads((copy / "mirror.json").read_text())["run"] == str(run)
    assert told == []


def test_copies_are_made_without_being_asked(started: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD", 0.01)
    run, copy, _, _ = started()
    with (run / "events.jsonl").open("a") as file:
        file.write('{"step": 7}\n')
    limit = time.monotonic() + 20
    while time.monotonic() < limit and not (
        (copy / "events.jsonl").exists() and "7" in (copy / "events.jsonl").read_text()
    ):
        time.sleep(0.02)
    assert (copy / "events.jsonl").read_text() == '{"step": 0}\n{"step": 7}\n'


def test_a_mirror_that_cannot_be_written_is_told_once_and_holds_nothing_up(
    started: Callable[..., tuple], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    began = time.monotonic()
    _, copy, mirror, told = started("file/mirror")
    for _ in range(3):
        mirror.finish()
    assert time.monotonic() - began < 5
    assert len(told) == 1
    assert f"mirror_dir={copy} gets no more copies" in told[0]


def test_a_disk_that_hangs_holds_the_end_of_a_run_up_for_a_moment_only(
    started: Callable[..., tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAST_WAIT", 0.1)
    hangs = threading.Event()
    monkeypatch.setattr(Mirror, "_copy", lambda self, folder: hangs.wait(30))
    _, _, mirror, _ = started()
    began = time.monotonic()
    for _ in range(100):
        mirror.finish()
    assert time.monotonic() - began < 5
    hangs.set()


def test_the_mirror_of_another_run_is_never_replaced(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "mirror"
    run.mkdir()
    copy.mkdir()
    mirror = Mirror(run, str(copy), print)
    mirror.check(resumed=False)
    (copy / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the mirror of another run"):
        mirror.check(resumed=False)  # perhaps the only copy of a run that was lost
    (run / "run.json").write_text("{ }")
    with pytest.raises(ConfigError, match="holds the mirror of another run"):
        mirror.check(resumed=True)
    shutil.copy(run / "run.json", copy)
    mirror.check(resumed=True)
    with pytest.raises(ConfigError, match="is the output_dir itself"):
        Mirror(run, str(run / ".." / "run"), print).check(resumed=False)
    Mirror(run, None, print).check(resumed=False)
