"""llama.cpp's OpenAI-compatible server for one GGUF file, and its own chat page, until it is stopped."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigError
from .facts import GGUFFacts, read_facts
from .llamacpp import LlamaCppServer, Service

_QUESTION = [{"role": "user", "content": "Who are you?"}]
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(path: Path, service: Service, announce: Callable[[str], None]) -> None:
    """Serve `path` until the process is interrupted; `announce` is given the lines for people once it answers.

    Raises:
        MissingExtraError: xllamacpp is not installed.
        ConfigError: no such file, no GGUF file, or an address that cannot be taken.
        VerificationError: llama.cpp does not load the file, or ends by itself.
        KeyboardInterrupt: Ctrl-C; the server has ended.
    """
    facts = read_facts(path)
    refuse_address_in_use(service)
    with LlamaCppServer(path, context_length=0, service=service) as server:
        for line in serving_lines(path, facts, service, server.address):
            announce(line)
        server.wait()


def refuse_address_in_use(service: Service) -> None:
    """Raise `ConfigError` unless a server can listen at this address."""
    if not 0 <= service.port <= 65_535:
        raise ConfigError(f"--port {service.port} is no port. Give one from 1 to 65535, or 0 for any free one.")
    family = socket.AF_INET6 if ":" in service.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just let go is free
        try:
            attempt.bind((service.host, service.port))
            attempt.listen()
        except OSError as error:
            raise ConfigError(
                f"port {service.port} of {service.host} cannot be taken ({error.strerror}). "
                "Give another: --port N (0 takes any free one)."
            ) from error


def serving_lines(path: Path, facts: GGUFFacts, service: Service, address: str) -> list[str]:
    """What a user of the server needs: engine, file, address, and two calls to copy."""
    body = json.dumps({"messages": _QUESTION})
    name = path.stem
    lines = [
        f"{path} ({facts.name}, {facts.file_type}, context {facts.context_length:,}) in llama.cpp on the CPU",
        f"OpenAI-compatible server: {address}/v1    model: {name}    Ctrl-C ends it",
    ]
    if service.web:
        lines.append(f"chat page: {address}/")
    if facts.chat_template is None:
        lines.append("note: the file has no chat template (a base model?); llama.cpp takes ChatML.")
    if service.host not in _LOOPBACK:
        lines.append(f"note: whoever reaches {service.host} can use the server; it asks for no key.")
    return [
        *lines,
        f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        f"  from openai import OpenAI; client = OpenAI(base_url={address + '/v1'!r}, api_key='none'); "
        f"print(client.chat.completions.create(model={name!r}, messages={_QUESTION}).choices[0].message.content)",
    ]
