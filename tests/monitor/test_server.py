"""The live page: what it sends, what it reads for that, and what it refuses."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_tinylm.cli import main
from hf_tinylm.files import write_text
from hf_tinylm.monitor import page as page_module
from hf_tinylm.monitor.follow import Follower
from hf_tinylm.monitor.page import LivePage
from hf_tinylm.monitor.server import MonitorServer

ATTACK = '<script>alert("1")</script><img src=x onerror=alert(2)>'


@pytest.fixture(autouse=True)
def _look_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(page_module, "_DRAWING_SHARE", 1e9)


@pytest.fixture
def serve() -> Iterator[Callable[[Path], MonitorServer]]:
    """A function that serves the page of a folder on a free port."""
    servers: list[MonitorServer] = []

    def start(folder: Path) -> MonitorServer:
        server = MonitorServer(folder, "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: MonitorServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """(status, headers, body); the path goes out as it is."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=120)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return found


def all_parts(page: LivePage) -> dict[str, str]:
    return page.news("", 0, "tokens")["parts"]


def test_a_poll_brings_what_changed_and_nothing_else(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run()
    page = LivePage(folder)
    first = page.news("", 0, "tokens")
    assert {"summary", "curves", "timeline", "checkpoints", "time", "samples"} <= set(first["parts"])
    assert "<dd>10 of 40</dd>" in first["parts"]["summary"]
    assert "<dd>7.9000</dd>" in first["parts"]["summary"]
    assert "<dd>7.2500 at update 10</dd>" in first["parts"]["summary"]
    assert "<dd>0.10 of 0.40</dd>" in first["parts"]["summary"]  # 40 s at 9 an hour, and 120 s are left
    assert set(page.news(first["server"], first["version"], "tokens")["parts"]) <= {"summary"}  # the end it expects
    add_lines(folder / "metrics.jsonl", 11)
    second = page.news(first["server"], first["version"], "tokens")
    assert {"summary", "curves"} <= set(second["parts"]) <= {"summary", "curves", "time", "checkpoints"}
    assert "<dd>11 of 40</dd>" in second["parts"]["summary"]
    add_lines(folder / "events.jsonl", {"time": 1e9, "event": "warned", "step": 11, "reason": "hot"})
    third = page.news(first["server"], second["version"], "tokens")
    assert "warning: hot" in third["parts"]["timeline"]
    assert "curves" not in third["parts"]
    assert set(page.news("an earlier server", third["version"], "tokens")["parts"]) == set(first["parts"])


def test_curves_are_over_hours_where_that_is_asked(write_run: Callable[..., Path]) -> None:
    page = LivePage(write_run())
    tokens, hours = (page.news("", 0, over)["parts"]["curves"] for over in ("tokens", "hours"))
    assert ">tokens<" in tokens
    assert ">hours<" in hours
    assert tokens.count("<svg") == hours.count("<svg") == 4
    assert "clipped above 1" in tokens


def test_curves_wait_while_their_cost_is_high(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> None:
    folder = write_run()
    page = LivePage(folder)
    first = page.news("", 0, "tokens")
    add_lines(folder / "metrics.jsonl", 11)
    with mock.patch.object(page_module, "_DRAWING_SHARE", 1e-9):
        assert "curves" not in page.news(first["server"], first["version"], "tokens")["parts"]
        (folder / "DONE.json").write_text("{}")
        assert "curves" in page.news(first["server"], first["version"], "tokens")["parts"]


def test_a_poll_reads_only_the_bytes_that_were_appended_to_a_long_run(
    write_run: Callable[..., Path], add_lines: Callable[..., None]
) -> None:
    folder = write_run()
    line = (
        '{"step": %d, "supervised_tokens": %d, "loss": 2.479785919189453, "learning_rate": 6.666666666666667e-05, '
        '"grad_norm": 0.9863028526306152, "clipped": true, "tokens_per_second": 3727.0, "wall_seconds": %d}\n'
    )
    (folder / "metrics.jsonl").write_text("".join(line % (i, 100 * i, 2 * i) for i in range(1, 200_001)))
    read = mock.patch.object(Follower, "read", autospec=True, side_effect=Follower.read)
    with read as reads:
        sizes = []
        reads.side_effect = lambda self, real=read.temp_original: (found := real(self), sizes.append(len(found[0])))[0]
        page = LivePage(folder)
        first = page.news("", 0, "tokens")
        assert sum(sizes) > 30_000_000
        assert len(json.dumps(first)) < 300_000  # drawn from a thinned line, so it loads at once
        sizes.clear()
        page.news(first["server"], first["version"], "tokens")
        assert sum(sizes) == 0
        add_lines(folder / "metrics.jsonl", 200_001, torn='{"step": 200')
        summary = page.news(first["server"], first["version"], "tokens")["parts"]["summary"]
        assert 0 < sum(sizes) < 500
        assert "200,001 of" in summary


def test_it_waits_for_a_folder_that_is_not_there_and_for_one_that_went(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    page = LivePage(tmp_path / "later")
    assert "Waiting for the files of a run" in all_parts(page)["summary"]
    folder = write_run("later")
    assert "10 of 40" in all_parts(page)["summary"]
    folder.rename(tmp_path / "moved")
    parts = all_parts(page)
    assert "Waiting" in parts["summary"]
    assert parts["timeline"] == ""
    (tmp_path / "moved").rename(folder)
    assert "10 of 40" in all_parts(page)["summary"]


def test_a_stop_and_a_resume_are_one_history(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> None:
    folder = write_run()
    page = LivePage(folder)
    all_parts(page)
    stop = {"time": 1e9 + 50, "event": "interrupted", "step": 8, "reason": "SIGTERM", "wall_seconds": 50.0}
    again = {"time": 1e9 + 90, "event": "resumed", "step": 8, "checkpoint": "checkpoint-00000008", "wall_seconds": 60}
    add_lines(folder / "events.jsonl", stop, again)
    metrics = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    write_text(folder / "metrics.jsonl", "".join(metrics[:8]))
    parts = all_parts(page)
    assert "8 of 40" in parts["summary"]
    assert "in 2 invocations" in parts["summary"]
    assert parts["timeline"].index("resumed from checkpoint-00000008") < parts["timeline"].index("SIGTERM")
    assert "SIGTERM" in parts["time"]


def test_two_runs_in_one_folder_are_told(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> None:
    folder = write_run()
    add_lines(folder / "metrics.jsonl", 1, 2)
    assert "holds the rows of two runs: update 1 comes after update 10" in all_parts(LivePage(folder))["summary"]


def test_no_text_of_a_run_is_markup(write_run: Callable[..., Path], add_lines: Callable[..., None]) -> None:
    folder = write_run(run_name=ATTACK)
    samples = [{"prompt": ATTACK, "text": ATTACK}]
    add_lines(
        folder / "events.jsonl",
        {"event": ATTACK, "x": ATTACK, "time": 1e9},
        {"event": "warned", "reason": ATTACK},
        {"event": "sampled", "step": 3, "samples": samples},
        {"event": "interrupted", "reason": ATTACK},
        {"event": "warned", "finding": ATTACK, "meaning": ATTACK, "next_step": ATTACK},
    )
    add_lines(folder / "metrics.jsonl", {"step": 10, "eval_loss": 7.0, "eval_loss_by_source": {ATTACK: 7.0}})
    text = "".join(all_parts(LivePage(folder)).values())
    assert "<script" not in text
    assert "<img" not in text
    assert text.count("&lt;script&gt;") >= 9


@pytest.mark.parametrize(
    "path",
    [
        "/run.json",
        "/metrics.jsonl",
        "/../../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc/passwd",
        "//etc/passwd",
        "/data/../run.json",
        "/page.js/../run.json",
        "/data%00",
        "http://evil.example/run.json",
        "/\\..\\run.json",
    ],
)
def test_no_file_is_served_by_its_name(
    path: str, write_run: Callable[..., Path], serve: Callable[[Path], MonitorServer]
) -> None:
    status, _, body = ask(serve(write_run(updates=0)), path)
    assert status == (403 if "evil" in path else 404)
    assert body in ("Not found. The page is at /\n", "This name is not one of the machine's. Use its address.\n")


def test_every_answer_says_what_a_browser_may_do(
    write_run: Callable[..., Path], serve: Callable[[Path], MonitorServer]
) -> None:
    server = serve(write_run(updates=0))
    kinds = {"/": "text/html", "/page.js": "text/javascript", "/data": "application/json", "/x": "text/plain"}
    for path, kind in kinds.items():
        _, headers, body = ask(server, path)
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "script-src 'self';" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        assert body
        assert ask(server, path, "HEAD")[2] == ""
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, _ = ask(server, "/data", method)
        assert status == 501
        assert headers["x-content-type-options"] == "nosniff"
    for query in ("since=-1", "since=x", "since=1e9", "since=" + 30 * "9", "over=flops", "over=../x"):
        assert ask(server, f"/data?{query}")[0] == 400
    assert json.loads(ask(server, "/data")[2])["title"] == "run: running"


@pytest.mark.parametrize(
    ("host", "known"),
    [
        *(("127.0.0.1", True), ("localhost:9999", True), ("[::1]:80", True), (socket.gethostname(), True)),
        *(("10.0.0.7:8765", True), ("evil.example", False), ("127.0.0.1.evil.example", False), ("", False)),
        *(("localhost.evil.example", False), ("[", False), ("evil.example:127.0.0.1", False)),
    ],
)
def test_only_addresses_and_names_of_the_machine_are_answered(
    host: str, known: bool, write_run: Callable[..., Path], serve: Callable[[Path], MonitorServer]
) -> None:
    assert ask(serve(write_run(updates=0)), "/data", Host=host)[0] == (200 if known else 403)


def test_the_server_binds_to_this_machine_alone_and_says_it_when_not(
    write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    bound: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        MonitorServer, "serve_forever", lambda self: (bound.append(self.server_address), interrupted(self))
    )
    folder = str(write_run())
    assert main(["monitor", folder, "--port", "0"]) == 130
    captured = capsys.readouterr()
    assert bound[0][0] == "127.0.0.1"
    assert captured.out == f"http://127.0.0.1:{bound[0][1]}/\n"
    assert captured.err == ""
    assert main(["monitor", folder, "--port", "0", "--host", "0.0.0.0"]) == 130
    assert "whoever reaches this machine can read the page" in capsys.readouterr().err


def test_bad_usage_is_one_line(
    write_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run()
    taken = socket.create_server(("127.0.0.1", 0))
    cases = {
        ("--port", "70000"): "from 0",
        ("--port", "x"): "from 0",
        ("--port", str(taken.getsockname()[1])): "--port 0",
        ("--host", "203.0.113.5", "--port", "0"): "--host 127.0.0.1",
    }
    for arguments, told in cases.items():
        assert main(["monitor", str(folder), *arguments]) == 2
        assert told in capsys.readouterr().err
    taken.close()
    assert main(["monitor", str(folder / "run.json")]) == 2
    assert "is a file" in capsys.readouterr().err
