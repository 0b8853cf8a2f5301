"""The live page and the report as a browser shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from PIL import Image

from hf_tinylm.cli import main
from hf_tinylm.errors import RunStopped
from hf_tinylm.files import bundled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NO_SIDEWAYS = "document.documentElement.scrollWidth <= window.innerWidth"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """A function that starts `hf-tinylm monitor` on a folder and gives its address."""
    started: list[subprocess.Popen[str]] = []

    def serve(folder: Path) -> str:
        command = [sys.executable, "-m", "hf_tinylm.cli", "monitor", str(folder), "--port", "0"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    yield serve
    for process in started:
        process.kill()
        process.wait(timeout=30)


def has(part: str, words: str) -> str:
    """A JavaScript expression: a part of the page shows these words."""
    return f"document.getElementById({part!r}).innerText.includes({words!r})"


def test_the_page_follows_a_run_through_a_stop_and_a_resume_without_a_reload(
    tiny_config: Path, tmp_path: Path, browser: Any, served: Callable[[Path], str]
) -> None:
    folder = tmp_path / "run"
    recipe = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    start = ["--config", str(tiny_config), "--output_dir", str(folder), "--gguf", "[]", "--verify", "false"]
    start += ["--price_per_hour", "3600", "--sample_steps", "3"]
    browser.open(served(folder))
    browser.wait_for(has("summary", "Waiting for the files of a run"))
    browser.run("window.neverReloaded = true")
    with pytest.raises(RunStopped):
        recipe([*start, "--stop_after_updates", "3"])
    browser.wait_for(has("summary", "stopped"))
    browser.wait_for(has("summary", "3 of 6"))
    browser.wait_for("document.querySelectorAll('#curves svg').length >= 4")
    assert recipe([*start, "--resume_from_checkpoint", "auto"]) == 0
    browser.wait_for(has("summary", "finished"))
    browser.wait_for(has("timeline", "finished: 1,485 tokens"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    scored = [row for row in rows if "eval_loss" in row][-1]
    shown = browser.run(
        "Object.fromEntries([...document.querySelectorAll('dt')].map(x => [x.innerText, x.nextSibling.innerText]))"
    )
    assert shown["update"] == "6 of 6"
    assert shown["tokens"] == "1,485 of 1,485"
    assert shown["loss"] == f"{last['loss']:.4f}"
    assert shown["validation loss"] == f"{scored['eval_loss']:.4f} at update 6"
    assert shown["gradient norm"] == f"{last['grad_norm']:.3f}"
    assert "in 2 invocations" in shown["wall time"]
    timeline = browser.run("document.getElementById('timeline').innerText")
    newest_first = ["finished: 1,485", "resumed from checkpoint-00000003", "stop_after_updates=3", "started: 6 updates"]
    assert sorted(newest_first, key=timeline.index) == newest_first
    browser.run("document.querySelector('#axes input[value=hours]').click()")
    browser.wait_for("[...document.querySelectorAll('#curves text')].some(x => x.textContent === 'hours')")
    for width, dark in ((1280, False), (390, False), (390, True)):
        picture = tmp_path / f"page-{width}-{dark}.png"
        browser.screenshot(picture, width, dark)
        image = Image.open(picture).convert("L")
        assert image.width == width
        assert (image.getpixel((2, 2)) < 60) is dark
        assert len(set(image.getdata())) > 50
        assert browser.run(NO_SIDEWAYS)
    assert browser.run("window.neverReloaded")
    assert browser.faults == []


def test_the_report_opens_from_its_file_with_networking_off(
    write_run: Callable[..., Path], add_lines: Callable[..., None], tmp_path: Path, browser: Any
) -> None:
    folder = write_run(run_name='<img src="http://127.0.0.1:9/x"><script>alert(1)</script>')
    samples = [{"prompt": "<b>Once</b>", "text": " upon a time"}]
    add_lines(folder / "events.jsonl", {"time": 1e9, "event": "sampled", "step": 5, "samples": samples})
    assert main(["report", str(folder)]) == 0
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    browser.open((folder / "report.html").as_uri())
    text = browser.text()
    assert "7.2500 nats per token at update 10 over 500 tokens" in text
    assert "<b>Once</b>" in text
    assert "<script>alert(1)</script>: running" in text
    assert browser.run("document.querySelectorAll('svg').length") == 5
    assert browser.run("[...document.querySelectorAll('svg')].every(x => x.getBoundingClientRect().height > 100)")
    browser.screenshot(tmp_path / "report.png", 390)
    assert browser.run(NO_SIDEWAYS)
    assert browser.requests == [(folder / "report.html").as_uri()]
    assert browser.faults == []
