"""`hf-tinylm tokenizer`, `prepare` and `inspect`: from text to shards."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ..config import load_config
from ..errors import ConfigError
from .options import add_command, config_of, print_result, reads_config, takes_config, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    tokenizer = commands.add_parser("tokenizer", help="train or audit a tokenizer").add_subparsers(
        required=True, metavar="COMMAND"
    )
    train = add_command(
        tokenizer,
        "train",
        tokenizer_train,
        "learn a byte-level BPE tokenizer from the sources of a config",
        "hf-tinylm tokenizer train --config demo --vocab_size 4096",
    )
    takes_config(train)
    audit = add_command(
        tokenizer,
        "audit",
        tokenizer_audit,
        "bytes per token by source, round trips, comparison with other tokenizers",
        "hf-tinylm tokenizer audit runs/demo/tokenizer --config demo --compare gpt2",
    )
    audit.add_argument("tokenizer", nargs="?", help="a folder, or a name on the Hub (default: that of the config)")
    audit.add_argument("--compare", nargs="*", default=[], metavar="TOKENIZER", help="folders or names on the Hub")
    reads_config(audit)
    takes_json(audit)

    prepare = add_command(
        commands,
        "prepare",
        prepare_shards,
        "write the sources of a config as token shards",
        "hf-tinylm prepare --config demo",
    )
    takes_config(prepare)
    takes_json(prepare)

    inspect = add_command(
        commands,
        "inspect",
        inspect_data,
        "what is in a folder of shards: manifest, lengths of documents, decoded windows; or a config's conversations",
        "hf-tinylm inspect runs/demo/shards --tokenizer runs/demo/tokenizer; hf-tinylm inspect --config sft-demo",
    )
    inspect.add_argument("shards", nargs="?", help="a folder that hf-tinylm prepare wrote")
    inspect.add_argument("--config", help="show the conversations of this config, with their masks, in place of shards")
    inspect.add_argument("--tokenizer", help="decode windows with this tokenizer")
    inspect.add_argument("--sequence_length", type=int, help="targets of a shown window (default 64)")
    inspect.add_argument("--windows", type=int, default=3, help="how many windows to show (default 3)")
    which = inspect.add_mutually_exclusive_group()
    which.add_argument("--window", type=int, nargs="+", metavar="K", help="show window K of the training order")
    which.add_argument("--find", type=int, nargs="+", metavar="ID", help="find windows with this id, or ids in a row")
    inspect.add_argument("--seed", type=int, default=42, help="seed of the training order (default 42)")
    inspect.add_argument("--window_order", choices=("permutation", "random"), default="permutation")
    inspect.add_argument("--plot", metavar="FILE", help="draw the lengths of documents (.png, .pdf, .svg)")
    takes_json(inspect)


def tokenizer_train(options: argparse.Namespace) -> None:
    """Train and save the tokenizer of a config."""
    config = config_of(options)
    from ..data.tokenizer_corpus import train_from_config

    report = train_from_config(config)
    print(f"tokenizer of {report['vocab_size']:,} tokens from {report['bytes']:,} bytes: {report['tokenizer_path']}")


def tokenizer_audit(options: argparse.Namespace) -> int:
    """Print what a tokenizer does with the sources of a config; 1 when a round trip fails."""
    config = config_of(options)
    from ..data.tokenizer_corpus import audit_from_config

    config.tokenizer.tokenizer_path = options.tokenizer or config.tokenizer.tokenizer_path
    report = audit_from_config(config, options.compare)
    print_result(options, report, lambda: _audit_lines(report))
    return 0 if report["ok"] else 1


def prepare_shards(options: argparse.Namespace) -> None:
    """Write shards."""
    config = config_of(options)
    from ..data.inspect import manifest_lines
    from ..data.prepare import prepare

    manifest = prepare(config, progress=not options.json)
    print_result(options, manifest, lambda: manifest_lines(str(config.data.shards), manifest))


def inspect_data(options: argparse.Namespace) -> None:
    """Print a manifest, lengths and windows, or conversations with their masks."""
    if (options.shards is None) == (options.config is None):
        raise ConfigError("Give a folder of shards, or --config NAME for its conversations.")
    if options.config is not None:
        _inspect_conversations(options)
        return
    from ..data.inspect import inspection, inspection_lines

    found = inspection(
        options.shards,
        options.tokenizer,
        64 if options.sequence_length is None else options.sequence_length,
        options.windows,
        options.window,
        options.find,
        options.window_order,
        options.seed,
        options.plot,
    )
    print_result(options, found, lambda: inspection_lines(found))


def _inspect_conversations(options: argparse.Namespace) -> None:
    length = [] if options.sequence_length is None else ["--sequence_length", str(options.sequence_length)]
    config = load_config(options.config, length)
    from ..data.inspect_chat import chat_inspection, chat_inspection_lines
    from ..model_folder import find_model_folder
    from ..tokenization.chat import chat_tokenizer
    from ..tokenization.load import find_tokenizer

    path = options.tokenizer or config.tokenizer.tokenizer_path
    tokenizer = chat_tokenizer(path or find_tokenizer(find_model_folder(config.training.init_from)))
    found = chat_inspection(config, tokenizer, options.windows)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print_result(options, found, lambda: chat_inspection_lines(found, colour))


def _audit_lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{report['vocab_size']:,} tokens, {report['bytes_per_token']:.3f} bytes per token; "
        f"{report['unused_tokens']:,} tokens are not used on these texts"
    ]
    for name, source in report["sources"].items():
        lines.append(f"  {name}: {source['bytes_per_token']:.3f} bytes per token over {source['bytes']:,} bytes")
    for name, other in report["compare"].items():
        lines.append(
            f"  beside it {name} ({other['vocab_size']:,} tokens): {other['bytes_per_token']:.3f} bytes per token"
        )
    for text in report["round_trip_failures"]:
        lines.append(f"  NOT RESTORED: {text!r}")
    if report["missing_bytes"]:
        lines.append(f"  BYTES WITHOUT A TOKEN: {report['missing_bytes']}")
    return [*lines, "every byte value and every string comes back unchanged" if report["ok"] else "round trips FAIL"]
