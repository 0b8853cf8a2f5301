"""One page of a run, or of several."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from hf_tinylm.cli import main
from hf_tinylm.monitor.compare import last_loss
from hf_tinylm.monitor.report import report_page, write_report
from hf_tinylm.monitor.run import Run
from hf_tinylm.training.curves import MOST_POINTS, thin

ATTACK = '<script>alert("1")</script><img src=x onerror=alert(2)>'
VOID = {"meta", "img", "br", "hr", "link"}


class Page(HTMLParser):
    """Tags of a page, what loads or runs something, and its text; fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_the_page_stands_alone_and_says_what_the_run_says(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") == 5  # loss over hours too; no MFU is known
    assert all(address.startswith("#") for address in page.addresses)
    assert "url(http" not in text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    words = " ".join(page.text.split())
    assert "tokens (supervised) 4,000 1,000 25.0%" in words
    assert "clipped above 1" in words
    assert "30.0% of the updates were clipped" in words  # updates 2, 5 and 8 of ten
    assert "Last validation: 7.2500 nats per token at update 10 over 500 tokens" in words
    assert "money - 0.10 9 per hour" in words
    assert "no speed was measured before the run" in words
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "report.html"} == before


def test_every_text_of_a_run_is_escaped(write_run: Callable[..., Path]) -> None:
    folder = write_run(run_name=ATTACK)
    contract = json.loads((folder / "run.json").read_text())
    contract["facts"] = {"note": ATTACK, "expect": "\ud800"}
    contract["config"]["data"]["sources"][0] = {"name": ATTACK, "path": ATTACK, "licence": ATTACK}
    contract["identity"][ATTACK] = ATTACK
    contract["identity"]["training"][ATTACK] = ATTACK
    contract["environment"] = {ATTACK: ATTACK, "git_diff": ATTACK}
    (folder / "run.json").write_text(json.dumps(contract))
    events = [
        {"event": ATTACK, "x": ATTACK},
        {"event": "warned", "reason": ATTACK},
        {"event": "saved", "removed": [ATTACK]},
    ]
    rows = [{"step": 10, "eval_loss": 7.0, "eval_loss_by_source": {ATTACK: 7.0}}]
    for name, more in (("events.jsonl", events), ("metrics.jsonl", rows)):
        with (folder / name).open("a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in more))
    (folder / "eval").mkdir()
    result = {"value": 0.5, "interval": [0.4, 0.6], "rule": ATTACK}
    report = {"model": ATTACK, "suite": ATTACK, "items": 3, "results": {ATTACK: result}}
    (folder / "eval" / "x.json").write_text(json.dumps(report))
    other = write_run("other")
    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder), str(other), "--output", str(folder / "both.html")]) == 0
    for name in ("report.html", "both.html"):
        page = Page((folder / name).read_text())
        assert not {"script", "img"} & set(page.tags)
        assert page.text.count(ATTACK) >= (15 if name == "report.html" else 4)


def test_evaluations_have_their_intervals_and_a_foreign_file_is_named(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    (folder / "eval" / "checkpoint-00000004").mkdir(parents=True)
    result = {"value": 0.25, "stderr": 0.01, "interval": [0.23, 0.27], "rule": "acc_norm"}
    report = {"model": "m", "suite": "hellaswag", "items": 100, "results": {"accuracy": result}}
    (folder / "eval" / "checkpoint-00000004" / "hellaswag.json").write_text(json.dumps(report))
    (folder / "eval" / "other.json").write_text("[]")
    words = " ".join(Page(report_page(Run(folder))).text.split())
    assert "checkpoint-00000004 hellaswag 100 accuracy 0.2500 0.2300 to 0.2700 acc_norm" in words
    assert "other.json is no report of hf-tinylm eval" in words


def test_several_invocations_are_one_history(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> None:
    folder = write_run()
    add_lines(
        folder / "events.jsonl",
        {"time": 1e9 + 50, "event": "interrupted", "step": 4, "reason": "max_hours=1", "wall_seconds": 50.0},
        {"time": 1e9 + 90, "event": "resumed", "step": 4, "checkpoint": "checkpoint-00000004", "wall_seconds": 60.0},
        {"time": 1e9 + 95, "event": "resumed", "step": 4, "checkpoint": "checkpoint-00000004", "wall_seconds": 70.0},
        {"time": 1e9 + 99, "event": "finished", "step": 10, "supervised_tokens": 1_000, "wall_seconds": 99.0},
    )
    run = Run(folder)
    starts = [(one["from_step"], one["to_step"], one["ended"]) for one in run.invocations()]
    assert starts == [(0, 4, "max_hours=1"), (4, 4, "without a word"), (4, 10, "finished")]
    assert run.wall_seconds == 99.0
    assert "1 min 39 s of wall time in 3 invocations" in report_page(run)


def test_runs_are_compared_by_what_differs(write_run: Callable[..., Path], tmp_path: Path) -> None:
    folders = [write_run("a"), write_run("b", updates=20, learning_rate=3e-3)]
    assert last_loss(Run(folders[1])) == pytest.approx((7.81 + 7.80) / 2)  # the last tenth of 20 updates
    assert main(["report", *map(str, folders)]) == 2  # where to?
    output = tmp_path / "both.html"
    assert main(["report", *map(str, folders), "--output", str(output)]) == 0
    page = Page(output.read_text())
    words = " ".join(page.text.split())
    assert page.tags.count("svg") == 5
    assert "training.learning_rate 0.001 0.003" in words
    assert "training loss, mean of the last tenth 7.9000 7.8050" in words
    assert "max_grad_norm" not in words  # the same in both
    assert sorted(path.name for path in folders[0].iterdir()) == ["events.jsonl", "metrics.jsonl", "run.json"]


def test_what_was_planned_stands_beside_what_came(write_run: Callable[..., Path]) -> None:
    settings = {"global_batch_tokens": 100, "per_device_train_batch_size": 1, "save_minutes": None, "eval_steps": None}
    folder = write_run(**settings)
    contract = json.loads((folder / "run.json").read_text())
    contract["config"]["data"]["sequence_length"] = 10
    contract["execution"] = {"device": "cpu", "processes": 1}
    contract["facts"]["expected_tokens_per_second"] = 20.0
    (folder / "run.json").write_text(json.dumps(contract))
    words = " ".join(Page(report_page(Run(folder))).text.split())
    # 4,000 tokens at 20 a second and 60 s of start-up are 260 s; the only save, of 0.16 GB, takes less than one more
    assert "hours, all invocations 0.072 0.011 15.4%" in words
    assert "money 0.65 0.10 9 per hour" in words
    assert "Planned hours follow from the 20 tokens/s that preflight measured" in words
    peak = float(words[words.index("memory at the peak, a process ") :].split()[6])
    assert 0.9 < peak < 1.3  # GB: 0.525 of framework, 28 bytes of each of 13.3M parameters, and what comes and goes


def test_samples_stand_by_prompt_from_first_to_last(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run()
    for step in range(1, 31):
        samples = [{"prompt": "Once", "text": f" upon {step}.\n"}, {"prompt": "She", "text": f" said {step}."}, 7]
        add_lines(folder / "events.jsonl", {"time": 1e9, "event": "sampled", "step": step, "samples": samples})
    words = " ".join(Page(report_page(Run(folder))).text.split())
    samples = words[words.index("Samples") : words.index("Incidents")]
    assert samples.startswith("Samples Once update text 1 upon 1. ")
    assert samples.count("upon") == samples.count("said") == 12
    assert "30 upon 30. She update text 1 said 1." in samples
    assert "12 of 30 moments are shown" in samples


def test_hardware_and_findings_stand_in_the_report(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run(price_per_kwh=0.5)
    card = {"name": "H", "power_watts": 360.0, "memory_used_bytes": 2e9, "memory_total_bytes": 8e9}
    for when in (0.0, 30.0, 60.0):
        row = {"time": 1e9 + when, "interval_seconds": 30.0, "cpu_percent": 50.0, "gpus": [card]}
        add_lines(folder / "hardware.jsonl", row)
    add_lines(
        folder / "metrics.jsonl",
        *({"step": n, "supervised_tokens": 100 * n, "loss": 30.0, "wall_seconds": 4.0 * n} for n in range(11, 200)),
    )
    words = " ".join(Page(report_page(Run(folder))).text.split())
    assert "Hardware At 2001-09-09 01:47:40 UTC:" in words
    assert "360 W" in words
    assert "0.01 kWh at the GPUs" in words  # 360 W for 60 s are 0.006 kWh
    assert "memory at the peak, a process" in words
    assert "2.00 GB" in words
    assert "Diagnosis The run diverges seen" in words


def test_incidents_are_warnings_stops_and_restarts(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run()
    kinds = ("saved", "warned", "nonfinite", "interrupted", "resumed", "evaluated")
    add_lines(folder / "events.jsonl", *({"time": 1e9, "event": kind, "step": 5, "reason": "R"} for kind in kinds))
    words = " ".join(Page(report_page(Run(folder))).text.split())
    incidents = words[words.index("Incidents") : words.index("Time 40")]
    for told in ("warning: R", "not finite", "ended before its last update: R", "resumed from a checkpoint"):
        assert told in incidents
    assert "saved" not in incidents.replace("the state was saved", "")
    assert "validation" not in incidents


def test_curves_are_pictures_where_that_is_asked(
    write_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write_run("a"), write_run("b")]
    assert main(["report", str(folders[0]), "--png"]) == 0
    assert (folders[0] / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not (folders[0] / "report.pdf").exists()
    assert main(["report", *map(str, folders), "--output", str(tmp_path / "both.html"), "--pdf"]) == 0
    assert (tmp_path / "both.pdf").read_bytes().startswith(b"%PDF")
    assert str(tmp_path / "both.pdf") in capsys.readouterr().out
    empty = write_run("empty", updates=0)
    assert main(["report", str(empty), "--pdf"]) == 0
    assert "was not written: there are no two updates to draw" in capsys.readouterr().err
    assert not (empty / "report.pdf").exists()


def test_a_report_that_cannot_be_written_is_one_line_and_no_failure(
    write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run()
    write_report(folder)
    assert (folder / "report.html").is_file()
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    write_report(folder)
    told = capsys.readouterr().err
    assert told.startswith("notice: the report was not written (")
    assert told.count("\n") == 1


def test_the_report_of_a_mirror_says_so(write_run: Callable[..., Path]) -> None:
    folder = write_run("copy")
    (folder / "mirror.json").write_text(json.dumps({"run": "/no/such/run", "host": "h"}))
    words = " ".join(Page(report_page(Run(folder))).text.split())
    assert f"From the mirror {folder} of the run /no/such/run, which is gone, or on another machine" in words


def test_an_old_or_broken_run_gives_a_page_that_says_what_is_missing(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    (folder / "run.json").write_text("{}")
    (folder / "events.jsonl").unlink()
    old = [{"step": 1, "loss": None, "supervised_tokens": 1}, {"step": [], "loss": "x", "supervised_tokens": 2}]
    text = "".join(json.dumps(one) + "\n" for one in [*old, {"step": 2, "eval_loss": None}])
    (folder / "metrics.jsonl").write_text(f'{text}no row\n{{"step": 3, "lo')
    (folder / "checkpoint-00000002").mkdir()
    words = " ".join(Page(report_page(Run(folder))).text.split())
    for told in (
        *("events.jsonl is missing", "1 damaged lines were passed over", "There are no two updates to draw"),
        *("No validation was recorded", "run.json does not say what the run was trained on", "not whole: no manifest"),
    ):
        assert told in words


def test_thinning_loses_neither_a_spike_nor_the_ends() -> None:
    ys = np.sin(np.arange(100_000) / 5_000)
    ys[54_321], ys[77_777] = 50.0, -50.0
    xs, thinned = thin(np.arange(100_000.0), ys)
    assert len(xs) <= MOST_POINTS
    assert {54_321.0, 77_777.0, 99_999.0} <= set(xs)
    assert (thinned.max(), thinned.min()) == (50.0, -50.0)
    assert (np.diff(xs) > 0).all()


@pytest.mark.slow
@pytest.mark.long
def test_two_hundred_thousand_updates_take_less_than_three_seconds(write_run: Callable[..., Path]) -> None:
    folder = write_run()
    line = (
        '{"step": %d, "supervised_tokens": %d, "loss": 2.479785919189453, "learning_rate": 6.666666666666667e-05, '
        '"grad_norm": 0.9863028526306152, "clipped": true, "seconds": 2.198, "tokens_per_second": 3727.0, '
        '"flops_per_second": 142230400840, "mfu": null, "wall_seconds": %d}\n'
    )
    text = "".join(line % (step, 8_192 * step, 2 * step) for step in range(1, 200_001))
    (folder / "metrics.jsonl").write_text(text)
    for _ in range(2):  # neighbours on the machine slow the processor down too: once more before it counts
        start = time.process_time()
        page = report_page(Run(folder))
        seconds = time.process_time() - start
        if seconds < 3:
            break
    assert "200,000" in page
    assert len(page) < 500_000
    assert seconds < 3
