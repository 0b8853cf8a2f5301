"""`hf-tinylm persona check`, `chat`, `serve` and `promote`: what becomes of a model that talks."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from ..errors import RunStopped
from .options import add_command, print_result, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    persona = commands.add_parser("persona", help="check conversations written for a persona").add_subparsers(
        required=True, metavar="COMMAND"
    )
    check = add_command(
        persona,
        "check",
        persona_check,
        "find duplicates, leaks into the test set, other names, wrong roles and long replies in a persona set",
        "hf-tinylm persona check recipes/persona",
    )
    check.add_argument("paths", nargs="+", metavar="PATH", help="a folder with train.jsonl and test.jsonl, or files")
    check.add_argument("--name", help="the assistant's name (default: the one claimed most often)")
    takes_json(check)

    serving = add_command(
        commands,
        "serve",
        serve_file,
        "serve a GGUF file through llama.cpp's OpenAI-compatible server, with its chat page",
        "hf-tinylm serve runs/demo/sft/sft-F16.gguf --web",
    )
    serving.add_argument("gguf")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)")
    serving.add_argument("--port", type=int, default=8080, help="0 takes a free one (default 8080)")
    serving.add_argument("--web", action="store_true", help="also serve llama.cpp's chat page")


def persona_check(options: argparse.Namespace) -> int:
    """Print every problem of a persona set with its file and line; 1 when there is one."""
    from ..data.persona import check_persona

    report = check_persona(options.paths, options.name)
    print_result(options, report.to_json(), report.lines)
    return 0 if report.ok else 1


def serve_file(options: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    from ..export.llamacpp import Service
    from ..export.serving import serve

    service = Service(options.host, options.port, options.web)
    try:
        serve(Path(options.gguf), service, functools.partial(print, flush=True))
    except KeyboardInterrupt:
        raise RunStopped("the server has ended (Ctrl-C).", exit_code=130) from None
