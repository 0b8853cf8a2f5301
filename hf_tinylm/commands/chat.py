"""`hf-tinylm persona check`, `chat`, `serve` and `promote`: what becomes of a model that talks."""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import RunStopped, VerificationError
from .options import add_command, print_result, takes_config, takes_json


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

    chat = add_command(
        commands,
        "chat",
        chat_with_model,
        "chat with a model folder or a GGUF file in the terminal",
        'hf-tinylm chat runs/demo/chat/final --prompt "Who are you?"',
    )
    chat.add_argument("model", help="a final folder, a checkpoint, a name on the Hub, or a GGUF file (in llama.cpp)")
    chat.add_argument("--prompt", help="print one reply and end; without it and with piped stdin, that is the prompt")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--max_new_tokens", type=int, default=128, help="tokens of a reply at most (default 128)")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely token (default 0.7)")
    chat.add_argument("--top_p", type=float, default=0.9)
    chat.add_argument("--seed", type=int, default=42)
    chat.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu (beside a run), cuda:1")
    chat.add_argument("--tokenizer", help="needed when neither the model nor its run names one")

    serving = add_command(
        commands,
        "serve",
        serve_file,
        "serve a GGUF file through llama.cpp's OpenAI-compatible server, with its chat page",
        "hf-tinylm serve runs/demo/chat/chat-F16.gguf --web",
    )
    serving.add_argument("gguf")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1: this machine)")
    serving.add_argument("--port", type=int, default=8080, help="0 takes a free one (default 8080)")
    serving.add_argument("--web", action="store_true", help="also serve llama.cpp's chat page")

    promotion = add_command(
        commands,
        "promote",
        promote_model,
        "point CURRENT at a candidate if it is better on the held-out sets of a config",
        "hf-tinylm promote runs/new/final --over runs/current --config sft-demo --shards runs/demo/shards",
    )
    promotion.add_argument("candidate", help="the final folder of a chat run")
    promotion.add_argument("--over", required=True, metavar="CURRENT", help="a symbolic link to the model in use")
    promotion.add_argument("--tolerance", type=float, default=0.05, help="nats per token on conversations (0.05)")
    promotion.add_argument("--text_tolerance", type=float, default=0.1, help="nats per token on base text (0.1)")
    promotion.add_argument("--min_stop_share", type=float, default=0.95, help="replies that end by themselves (0.95)")
    promotion.add_argument("--max_new_tokens", type=int, default=128, help="limit of a reply (default 128)")
    promotion.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda:1")
    takes_json(promotion)
    takes_config(promotion)


def persona_check(options: argparse.Namespace) -> int:
    """Print every problem of a persona set with its file and line; 1 when there is one."""
    from ..data.persona import check_persona

    report = check_persona(options.paths, options.name)
    print_result(options, report.to_json(), report.lines)
    return 0 if report.ok else 1


def chat_with_model(options: argparse.Namespace) -> None:
    """Answer one prompt, or chat."""
    from .terminal import open_engine, reply_once, talk

    with open_engine(options.model, options.device, options.tokenizer) as (engine, lines):
        from ..evaluation.chat import Conversation
        from ..evaluation.sampling import check_arguments
        from ..tokenization.chat import Drawing

        check_arguments(options.max_new_tokens, options.temperature, options.top_p)
        drawing = Drawing(**{name: getattr(options, name) for name in Drawing.__dataclass_fields__})
        conversation = Conversation(engine, options.system, drawing)
        sampling = ", ".join(f"{name} {value}" for name, value in asdict(drawing).items())
        print(*lines, f"context {engine.context:,}, {sampling}", sep="\n", file=sys.stderr, flush=True)
        if options.prompt is None and sys.stdin.isatty():
            talk(conversation)
        else:
            reply_once(conversation, sys.stdin.read() if options.prompt is None else options.prompt)


def serve_file(options: argparse.Namespace) -> None:
    """Serve until Ctrl-C."""
    from ..export.llamacpp import Service
    from ..export.serving import serve

    service = Service(options.host, options.port, options.web)
    try:
        serve(Path(options.gguf), service, functools.partial(print, flush=True))
    except KeyboardInterrupt:
        raise RunStopped("the server has ended (Ctrl-C).", exit_code=130) from None


def promote_model(options: argparse.Namespace) -> int:
    """Print the table of both models; 1 when the candidate does not replace the current one."""
    from ..config import load_config
    from ..evaluation.promotion import Rules, promote, promotion_lines
    from ..evaluation.sampling import check_arguments
    from .terminal import chosen_device

    check_arguments(options.max_new_tokens, temperature=0, top_p=1)
    rules = Rules(options.tolerance, options.text_tolerance, options.min_stop_share, options.max_new_tokens)
    config = load_config(options.config, options.overrides)
    pointer, device = Path(options.over), chosen_device(options.device)
    report = promote(Path(options.candidate), pointer, config, rules, device, progress=not options.json)
    print_result(options, report, lambda: promotion_lines(report))
    if report["promoted"]:
        print(f"{pointer} points at {options.candidate} now.", file=sys.stderr)
    elif not options.json:
        raise VerificationError(f"{pointer} stays as it is: {'; '.join(report['failures'])}.")
    return 0 if report["promoted"] else 1
