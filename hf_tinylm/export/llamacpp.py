"""llama.cpp in a process of its own, asked through its loopback server.

A file that llama.cpp dislikes can abort the whole process, so it never runs in ours: the child
(`python -m hf_tinylm.export.llamacpp FILE`) loads the file through xllamacpp and serves until its stdin closes.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import ConfigError, MissingExtraError, VerificationError

if TYPE_CHECKING:
    from ..tokenization.chat import Drawing

_SEPARATOR = -1  # passed through by /tokenize between two texts; no token has this id
_SMALL_FILE_BYTES = 200_000_000
_NEUTRAL_SAMPLING = {
    "temperature": 0.0,
    "samplers": ["temperature"],
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "mirostat": 0,
    "seed": 0,
    "cache_prompt": False,
}


@dataclass(frozen=True)
class Continuation:
    """Greedy ids after a prompt; `ended` says that the last one ended generation."""

    ids: list[int]
    ended: bool


@dataclass(frozen=True)
class Service:
    """A server for people instead of comparisons: a known address, no key, llama.cpp's own arithmetic and caches.

    `port` 0 takes a free one; `web` serves llama.cpp's chat page at /.
    """

    host: str = "127.0.0.1"
    port: int = 0
    web: bool = False


def chosen_threads(path: Path) -> int:
    """Threads for a file; they wait for each other by spinning: on shared cores two were 40 times slower than one."""
    small = not path.is_file() or path.stat().st_size < _SMALL_FILE_BYTES
    return 1 if small else min(4, os.cpu_count() or 1)


class LlamaCppServer:
    """Context manager around a child process that has loaded `path`.

    Without a `service`, arithmetic is pinned for comparisons: CPU, F32 key/value cache, no flash attention, no prompt
    cache, one sequence. `context_length` 0 takes the model's own. `threads` 0 chooses by the size of the file.

    Raises:
        MissingExtraError: xllamacpp is not installed.
        ConfigError: `path` does not exist.
        VerificationError: llama.cpp does not load the file, dies, or does not answer in time (`timeout`, seconds).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        context_length: int = 512,
        threads: int = 0,
        timeout: float = 600.0,
        service: Service | None = None,
    ) -> None:
        self.path = Path(path)
        self.timeout = timeout
        self._settings = {"context_length": context_length, "threads": threads or chosen_threads(self.path)}
        self._service = service
        self._process: subprocess.Popen[str] | None = None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: never through a proxy

    def __enter__(self) -> LlamaCppServer:
        if importlib.util.find_spec("xllamacpp") is None:
            raise MissingExtraError("xllamacpp", "gguf-verify", "running a GGUF file in llama.cpp")
        if not self.path.is_file():
            raise ConfigError(f"{self.path} does not exist. Give a GGUF file.")
        self._log = tempfile.TemporaryFile()  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.path.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
        )
        try:
            started = self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.address, self._key = started["address"], started["key"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.close()
            process.wait(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()
        self._process = None

    @property
    def process_id(self) -> int | None:
        """The child's process id while it runs."""
        return None if self._process is None else self._process.pid

    def wait(self) -> None:
        """Wait for the child, which serves until it is stopped.

        Raises:
            VerificationError: it ended by itself.
        """
        assert self._process is not None
        self._process.wait()
        raise VerificationError(f"llama.cpp stopped serving {self.path}: {self._last_words()}")

    def tokenize(self, texts: list[str], parse_special: bool, add_special: bool = False) -> list[list[int]]:
        """Token ids of each text. `parse_special` reads control-token texts as tokens; `add_special` adds bos and eos.

        llama.cpp adds bos and eos once per request, so with `add_special` every text is a request of its own.
        """
        if add_special:
            body = {"parse_special": parse_special, "add_special": True}
            return [self._post("/tokenize", {**body, "content": text})["tokens"] for text in texts]
        rows: list[list[int]] = []
        for start in range(0, len(texts), 256):
            batch = texts[start : start + 256]
            content = [part for text in batch for part in (text, _SEPARATOR)]
            answer = self._post("/tokenize", {"content": content, "parse_special": parse_special, "add_special": False})
            row: list[int] = []
            for token in answer["tokens"]:
                if token == _SEPARATOR:
                    rows.append(row)
                    row = []
                else:
                    row.append(token)
            if row or len(rows) != start + len(batch):
                raise VerificationError(f"llama.cpp answered {len(rows)} texts of {start + len(batch)} in /tokenize.")
        return rows

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """The text that llama.cpp renders for a conversation, special tokens included.

        Raises:
            VerificationError: the template refuses the conversation, or llama.cpp fails on it.
        """
        answer = self._post("/apply-template", {"messages": messages, "add_generation_prompt": add_generation_prompt})
        return cast(str, answer["prompt"])

    def next_token_logprobs(self, prompt_ids: list[int], vocab_size: int) -> np.ndarray:
        """Log-probabilities (nats) of the token after the prompt, (V,); tokens that llama.cpp leaves out are NaN.

        They are those of the raw logits. The server drops them when the sampled token ends generation or half a
        character, so a plain letter is forced as the sample, which the raw logits do not see.
        """
        letter = self.tokenize(["a"], parse_special=False)[0][0]
        body = {
            **_NEUTRAL_SAMPLING,
            "prompt": prompt_ids,
            "n_predict": 1,
            "n_probs": vocab_size,
            "post_sampling_probs": False,
            "logit_bias": [[letter, 1e6]],
        }
        result = np.full(vocab_size, np.nan)
        for entry in self._post("/completion", body)["completion_probabilities"][0]["top_logprobs"]:
            result[entry["id"]] = np.nan if entry["logprob"] is None else entry["logprob"]
        return result

    def generate(self, prompt_ids: list[int], tokens: int) -> Continuation:
        """At most `tokens` greedy ids after the prompt, without any penalty, up to the first end-of-generation id."""
        answer = self._post(
            "/completion",
            {**_NEUTRAL_SAMPLING, "prompt": prompt_ids, "n_predict": tokens, "return_tokens": True, "n_probs": 0},
        )
        return Continuation([int(token) for token in answer["tokens"]], ended=answer["stop_type"] == "eos")

    def stream(self, prompt_ids: list[int], drawing: Drawing) -> Iterator[dict[str, Any]]:
        """The server's events while it draws ids: `content`, `tokens`, and `stop_type` in the last.

        What the prompt shares with that of the call before is not computed again.
        """
        sampling: dict[str, Any] = {"temperature": drawing.temperature, "top_p": drawing.top_p, "seed": drawing.seed}
        body = {**_NEUTRAL_SAMPLING, **sampling, "samplers": ["top_p", "temperature"], "cache_prompt": True}
        body |= {"prompt": prompt_ids, "n_predict": drawing.max_new_tokens}
        request = self._json_request("/completion", {**body, "stream": True, "return_tokens": True})
        with self._open(request) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise VerificationError(f"llama.cpp failed on {self.path}: {event['error'].get('message')}")
                    yield event

    def tokens_per_second(self, prompt_ids: list[int], tokens: int) -> float:
        """Speed of generating `tokens` ids one by one after the prompt, at this server's threads and cache type."""
        body = {**_NEUTRAL_SAMPLING, "prompt": prompt_ids, "n_predict": tokens, "ignore_eos": True}
        return float(self._post("/completion", body)["timings"]["predicted_per_second"])

    def end_of_generation_ids(self, any_id: int = 0) -> set[int]:
        """Every id at which llama.cpp ends generation: what it would forbid when asked to ignore them."""
        body = {**_NEUTRAL_SAMPLING, "prompt": [any_id], "n_predict": 1, "ignore_eos": True}
        return {int(entry["token"]) for entry in self._post("/completion", body)["generation_settings"]["logit_bias"]}

    def special_texts(self) -> dict[str, str]:
        """The texts of the bos and eos tokens and the chat template as llama.cpp has read them."""
        answer = self._request(urllib.request.Request(f"{self.address}/props"))
        return {key: answer.get(key, "") for key in ("bos_token", "eos_token", "chat_template")}

    def _start(self) -> dict[str, str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self.timeout, process.kill)
        timer.start()
        try:
            service = None if self._service is None else asdict(self._service)
            process.stdin.write(json.dumps({**self._settings, "service": service}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise VerificationError(f"llama.cpp did not load {self.path}: {self._last_words()}")
        return cast(dict[str, str], json.loads(line))

    def _post(self, endpoint: str, body: dict[str, Any]) -> Any:
        return self._request(self._json_request(endpoint, body))

    def _json_request(self, endpoint: str, body: dict[str, Any]) -> urllib.request.Request:
        data = json.dumps(body).encode("utf-8")
        return urllib.request.Request(self.address + endpoint, data, {"Content-Type": "application/json"})

    def _request(self, request: urllib.request.Request) -> Any:
        with self._open(request) as answer:
            return json.loads(answer.read())

    @contextmanager
    def _open(self, request: urllib.request.Request) -> Iterator[http.client.HTTPResponse]:
        """The server's answer to a request; whatever goes wrong while it is read becomes one error."""
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        endpoint = request.full_url.removeprefix(self.address)
        try:
            with self._opener.open(request, timeout=self.timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read().decode("utf-8", "replace").split())[:300]
            raise VerificationError(f"llama.cpp refused {endpoint} for {self.path}: {reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise VerificationError(
                f"llama.cpp failed in {endpoint} on {self.path}: {self._last_words(error)}"
            ) from error

    def _last_words(self, error: Exception | None = None) -> str:
        """How the child ended, with its last line on stderr; `error` if it is still alive."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return str(error)
        self._log.seek(0)
        return how_it_ended(code, self._log.read().decode("utf-8", "replace"))


def how_it_ended(code: int, log: str) -> str:
    """The exit code or signal of a process that ran llama.cpp, with the line of its log that says why."""
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"it ended with {cause} ({_telling_line(log)})"


def _telling_line(log: str) -> str:
    """The line that says why: an assertion or C++ exception, else the first error of the log, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    aborts = [line for line in lines if re.search(r"GGML_ASSERT|terminate called|what\(\):", line)]
    errors = [line.partition(" E ")[2] for line in lines if re.match(r"[\d.]+ E ", line)]
    failures = [line for line in lines if "failed to quantize" in line or "error loading model" in line]
    return [*aborts[-1:], *errors[:1], *failures[:1], lines[-1]][0]


def _serve(path: str) -> int:
    """The child: load `path`, print the address as one JSON line, serve until stdin closes."""
    import xllamacpp

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says when to end
    settings = json.loads(sys.stdin.readline())
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = settings["context_length"]
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cpuparams.poll = params.cpuparams_batch.poll = 0  # sleep while waiting: others use these cores too
    params.fit_params = params.warmup = params.prefill_assistant = False
    params.check_tensors = True
    key = "" if settings["service"] else secrets.token_hex(16)
    if settings["service"]:
        params.hostnames, params.port = [settings["service"]["host"]], settings["service"]["port"]
        params.ui = settings["service"]["web"]
        params.model_alias = {Path(path).stem}
    else:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads_http = 2
        params.ui = params.cache_prompt = params.cache_idle_slots = False
        params.cache_ram_mib = 0
        params.api_keys = [key]
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "key": key}), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(_serve(sys.argv[1]))
