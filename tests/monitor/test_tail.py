"""A run in the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.cli import main
from hf_tinylm.files import write_text
from hf_tinylm.monitor.tail import follow, open_run, state_of


def test_progress_rate_and_time_left_follow_from_the_rows(
    write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run()
    assert main(["tail", str(folder), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["updates"], state["planned_updates"], state["percent"]) == (10, 40, 25.0)
    assert state["tokens_per_second"] == 25  # 100 tokens each 4 seconds of wall time, not the 50 of training alone
    assert state["seconds_left"] == 3_000 / 25
    assert state["cost"] == pytest.approx(40 / 3_600 * 9)
    assert state["status"] == "running"
    assert state["last_evaluation"]["eval_loss"] == 7.25
    assert main(["tail", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "update 10 of 40, 1,000 of 4,000 tokens, 25.0%" in shown
    assert "25 tokens/s, 2 min 00 s left, until 20" in shown
    assert "7.2500 at update 10, 2.5000 bits per byte" in shown
    assert "2001-09-09 01:46:40 UTC  update 0: started: 40 updates, 4,000 tokens" in shown


def test_the_start_up_of_a_resume_does_not_slow_the_forecast(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run()
    add_lines(folder / "events.jsonl", {"time": 1e9, "event": "resumed", "step": 10, "wall_seconds": 1_000.0})
    run = open_run(folder)
    assert run.tokens_per_second() is None  # no update of this invocation yet
    rows = [{"step": s, "loss": 1.0, "supervised_tokens": 100 * s, "wall_seconds": 1_000.0 + 4 * s} for s in (11, 12)]
    add_lines(folder / "metrics.jsonl", *rows)
    run.refresh()
    assert run.tokens_per_second() == 25


def test_a_run_is_followed_over_a_resume_to_its_end(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run()
    metrics, events, said = folder / "metrics.jsonl", folder / "events.jsonl", []

    def killed() -> None:
        add_lines(metrics, 11, 12, torn='{"step": 13, "supe')

    def resumed() -> None:
        resume = {"time": 1e9, "event": "resumed", "step": 8, "checkpoint": "checkpoint-00000008", "changed": []}
        add_lines(events, resume | {"thrown_away_updates": 4})
        write_text(metrics, "".join(metrics.read_text().splitlines(keepends=True)[:8]))

    def went_on() -> None:
        add_lines(metrics, 9, {"step": 9, "eval_loss": 7.5})

    def finished() -> None:
        add_lines(events, {"time": 1e9, "event": "finished", "step": 9, "supervised_tokens": 900})
        (folder / "DONE.json").write_text("{}")

    steps = iter([killed, resumed, lambda: None, went_on, finished])
    follow(open_run(folder), said.append, lambda _: next(steps)())
    text = "\n".join(said[said.index(next(line for line in said if "started" in line)) + 1 :])
    order = [
        *(
            "        12            1,200",
            "the rows went back from update 12 to 8",
            "resumed from checkpoint-00000008, 4",
        ),
        *("validation    7.5000 at update 9", "         9              900", "finished: 900 tokens"),
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert text.count("\n") == len(order) - 1  # nothing else was said
    assert next(steps, None) is None


def test_silence_is_told_from_a_clean_stop(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> None:
    folder = write_run()
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    assert state_of(open_run(folder), now=1e9 + 100)["status"] == "running"
    assert state_of(open_run(folder), now=1e9 + 5_000)["status"] == "silent"
    add_lines(folder / "events.jsonl", {"time": 1e9, "event": "interrupted", "step": 10, "reason": "SIGTERM"})
    assert state_of(open_run(folder))["status"] == "stopped"
    (folder / "DONE.json").write_text("{}")
    assert state_of(open_run(folder))["status"] == "finished"


def test_text_of_a_run_cannot_steer_the_terminal(
    write_run: Callable[..., Path], add_lines: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(run_name="\x1b[2Jname\ud800")
    add_lines(folder / "events.jsonl", {"event": "warned", "reason": "\x1b]0;title\x07"})
    assert main(["tail", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "name" in shown
    assert "warning: " in shown
    assert not set("\x1b\x07\ud800") & set(shown)


def test_control_c_ends_with_130_and_no_word(
    write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_run: object, say: Callable[[str], None]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_tinylm.monitor.tail.follow", press)
    assert main(["tail", str(write_run()), "--follow"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", ["tail", "report"])
def test_what_is_no_run_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").write_text("{}")
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main([command, str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert "is no run: it has no run.json" in error
    assert f"Did you mean {tmp_path / 'runs' / 'a'}?" in error
    assert error.count("\n") == 1


def test_one_json_object_cannot_be_followed(write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tail", str(write_run()), "--follow", "--json"]) == 2
    assert "cannot follow" in capsys.readouterr().err
