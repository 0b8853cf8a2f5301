"""`serve` answers as the model's template says, serves the chat page, ends cleanly, and refuses what cannot work."""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_tinylm.cli import main
from hf_tinylm.errors import ConfigError, VerificationError
from hf_tinylm.export.facts import read_facts
from hf_tinylm.export.gguf import write_gguf
from hf_tinylm.export.llamacpp import LlamaCppServer, Service
from hf_tinylm.export.serving import refuse_address_in_use, serve, serving_lines

pytest.importorskip("xllamacpp")

CHAT = [
    {"role": "user", "content": "1984 or not?"},
    {"role": "assistant", "content": "Not."},
    {"role": "user", "content": "  two  spaces\n\nand lines"},
]


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model(chat=True)


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "served.gguf"
    write_gguf(folder, path, "f32", name="served model")
    return path


@pytest.fixture
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command as a user runs it, on a free port: the process, its address, and what it printed."""
    command = [sys.executable, "-m", "hf_tinylm.cli", "serve", str(model), "--port", "0", "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    while not (lines and lines[-1].startswith("  from openai")):
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()[1]
    found = re.search(r"http://127\.0\.0\.1:\d+", lines[1])
    assert found is not None
    yield process, found[0], lines
    process.kill()
    process.wait()


def post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def get_page(address: str) -> str:
    request = urllib.request.Request(address, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return gzip.decompress(answer.read()).decode()


def test_the_server_answers_with_the_ids_of_the_template_and_serves_its_page_and_ends_with_130(
    serving: tuple[subprocess.Popen[str], str, list[str]], folder: Path
) -> None:
    from transformers import AutoTokenizer

    process, address, lines = serving
    shown = "".join(lines)
    assert "served model, F32, context 256" in shown
    assert f"curl {address}/v1/chat/completions" in shown
    assert f"base_url='{address}/v1'" in shown

    answer = post(f"{address}/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "temperature": 0})
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 4
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = list(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False))
    prompt = post(f"{address}/apply-template", {"messages": CHAT})["prompt"]
    assert post(f"{address}/tokenize", {"content": prompt, "parse_special": True})["tokens"] == wanted
    assert answer["usage"]["prompt_tokens"] == len(wanted)

    page = get_page(address + "/")
    scripts = re.findall(r'(?:src|href|import\()\s*=?\s*"(\.?/[^"]+\.js)"', page)
    assert "<html" in page
    assert scripts
    assert all(len(get_page(address + script.removeprefix("."))) > 100 for script in scripts)

    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert error.splitlines()[-1] == "stopped: the server has ended (Ctrl-C)."
    assert "Traceback" not in error
    with pytest.raises(urllib.error.URLError):
        get_page(address + "/")


def test_the_page_is_served_only_when_asked_for(model: Path) -> None:
    with LlamaCppServer(model, context_length=0, threads=1, service=Service()) as server:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get_page(server.address + "/")
        assert post(server.address + "/v1/completions", {"prompt": "a", "max_tokens": 1})["choices"]


def test_a_server_that_dies_is_named(model: Path) -> None:
    def kill(line: str) -> None:
        if "openai" in line:
            (child,) = [c for c in psutil.Process().children() if "hf_tinylm.export.llamacpp" in c.cmdline()]
            child.kill()

    with pytest.raises(VerificationError, match=r"stopped serving .*served\.gguf.*SIGKILL"):
        serve(model, Service(), kill)


def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.gguf").write_text("not a model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, reason in (
            ([str(tmp_path / "absent.gguf")], "absent.gguf does not exist"),
            ([str(tmp_path / "notes.gguf")], "notes.gguf is not a GGUF file"),
            ([str(model), "--port", port], f"port {port} of 127.0.0.1 cannot be taken"),
            ([str(model), "--port", "70000"], "--port 70000 is no port"),
        ):
            assert main(["serve", *arguments]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert reason in line


def test_a_file_cut_short_is_named(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:3000])
    with pytest.raises(VerificationError, match=r"served\.gguf is not a whole GGUF file"):
        read_facts(model)


def test_an_open_address_and_a_missing_template_are_mentioned(make_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "base.gguf"
    write_gguf(make_model(), path, "f16")
    facts = read_facts(path)
    assert (facts.file_type, facts.context_length, facts.chat_template) == ("F16", 256, None)
    assert facts.control_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    shown = "\n".join(serving_lines(path, facts, Service("0.0.0.0", 8080), "http://0.0.0.0:8080"))
    assert "no chat template" in shown
    assert "asks for no key" in shown
    with pytest.raises(ConfigError, match=r"of 192\.0\.2\.1 cannot be taken"):  # an address of documentation, not ours
        refuse_address_in_use(Service("192.0.2.1", 8080))
