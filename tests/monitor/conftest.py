"""Folders of runs, written row by row, and a browser to look at their pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest


def row(step: int, **more: Any) -> dict[str, Any]:
    """An update of 100 tokens that took 2 seconds of training and, with all the rest, 4 of wall time."""
    return {
        **{"step": step, "supervised_tokens": 100 * step, "loss": 8.0 - step / 100, "learning_rate": 1e-3},
        **{"grad_norm": 0.5 + step % 3, "clipped": step % 3 == 2, "seconds": 2.0, "tokens_per_second": 50.0},
        **{"wall_seconds": 4.0 * step},
        **more,
    }


def lines(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as the text of a JSON-lines file."""
    return "".join(json.dumps(one) + "\n" for one in rows)


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a run of 40 planned updates, `updates` done; keyword arguments change its run.json."""

    def write(name: str = "run", updates: int = 10, learning_rate: float = 1e-3, **training: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        identity = {
            "model": {"hidden_size": 32},
            "training": {"train_tokens": 4_000, "global_batch_tokens": 100, "max_grad_norm": 1.0}
            | {"learning_rate": learning_rate},
            "data": {"sequence_length": 10, "manifest_sha256": "ab" * 32},
        }
        config = {
            "training": {"price_per_hour": 9.0, **training},
            "data": {"shards": None, "sources": [{"name": "prose", "path": "a.txt", "licence": "none"}]},
        }
        contract = {"identity": identity, "config": config, "facts": {"note": None}, "environment": {"python": "3"}}
        (folder / "run.json").write_text(json.dumps(contract))
        rows = [row(step) for step in range(1, updates + 1)]
        scored = {"step": updates, "eval_loss": 7.25, "bits_per_byte": 2.5, "eval_tokens": 500}
        (folder / "metrics.jsonl").write_text(lines([*rows, scored]))
        started = {"time": 1e9, "event": "started", "step": 0, "updates": 40, "train_tokens": 4_000}
        (folder / "events.jsonl").write_text(lines([started]))
        return folder

    return write


@pytest.fixture
def add_lines() -> Callable[..., None]:
    """A function that appends updates, or any rows, to a file, as a run does."""

    def add(path: Path, *rows: int | dict[str, Any], torn: str = "") -> None:
        with path.open("a") as file:
            file.write(lines(row(one) if isinstance(one, int) else one for one in rows) + torn)

    return add


@pytest.fixture
def html_text() -> Callable[[str], str]:
    """What a page says, with single spaces."""

    def text_of(page: str) -> str:
        pieces: list[str] = []
        parser = HTMLParser()
        parser.handle_data = pieces.append  # type: ignore[method-assign]
        parser.feed(page)
        return " ".join(" ".join(pieces).split())

    return text_of


class Browser:
    """One tab of a headless Chromium, driven by the DevTools protocol. `faults` are errors of its console."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect

        self._socket = connect(address, max_size=2**26, ping_interval=None)
        self._number = 0
        self.faults: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; what happens before it comes is noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        wrong = method == "Runtime.exceptionThrown"
        wrong |= method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert", "warning")
        wrong |= method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning")
        self.faults += [json.dumps(told)] if wrong else []
        self.requests += [told["request"]["url"]] if method == "Network.requestWillBeSent" else []

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, address: str, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of that size."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, script: str, seconds: float = 90.0) -> None:
        """Wait until a JavaScript expression is true; fails with the text of the page."""
        limit = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < limit, f"{script} is not true; the page says: {self.text()}"
            time.sleep(0.1)

    def text(self) -> str:
        """What a reader sees."""
        return str(self.run("document.body.innerText"))

    def screenshot(self, path: Path, width: int, dark: bool = False) -> None:
        """Write the whole page as a PNG, `width` pixels wide."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)
        height = int(self.run("document.documentElement.scrollHeight"))  # all of it, with its last line at the end
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        found = self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Let go of the tab."""
        self._socket.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A tab of a headless Chromium; skipped where there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    profile = tmp_path / "chromium"
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--remote-debugging-port=0",
        "about:blank",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        port, limit = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port.is_file() and port.read_text().count("\n")):
            assert time.monotonic() < limit, "Chromium did not start"
            time.sleep(0.1)
        listed = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
        with urllib.request.urlopen(listed, timeout=30) as answer:
            address = next(tab for tab in json.load(answer) if tab["type"] == "page")["webSocketDebuggerUrl"]
        tab = Browser(address)
        yield tab
        tab.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its helpers too
        process.wait(timeout=30)
