"""`hf-tinylm`: every command of the package. Heavy imports are inside the commands, so `--help` is instant."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .config import RunConfig, load_config
from .errors import ConfigError, VerificationError, exit_with_error_line
from .files import bundled


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; the exit code."""
    parser = build_parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and not getattr(known, "takes_overrides", False):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    known.overrides = rest
    return exit_with_error_line(lambda: known.run(known))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="hf-tinylm",
        allow_abbrev=False,
        description="Train a small language model from raw text to a GGUF file that llama.cpp runs.",
        epilog="example: hf-tinylm tokenizer train --config demo && hf-tinylm prepare --config demo",
    )
    parser.add_argument("--version", action="version", version=f"hf-tinylm {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = _add(
        commands,
        "demo",
        run_the_demo,
        "the whole road on bundled prose in minutes: text to tokenizer, shards, model and llama.cpp, in runs/demo",
        "hf-tinylm demo --train_tokens 1_000_000",
    )
    demo.set_defaults(takes_overrides=True)

    tokenizer = commands.add_parser("tokenizer", help="train or audit a tokenizer").add_subparsers(
        required=True, metavar="COMMAND"
    )
    train = _add(
        tokenizer,
        "train",
        tokenizer_train,
        "learn a byte-level BPE tokenizer from the sources of a config",
        "hf-tinylm tokenizer train --config demo --vocab_size 4096",
    )
    _takes_config(train)
    audit = _add(
        tokenizer,
        "audit",
        tokenizer_audit,
        "bytes per token by source, round trips, comparison with other tokenizers",
        "hf-tinylm tokenizer audit runs/demo/tokenizer --config demo --compare gpt2",
    )
    audit.add_argument("tokenizer", nargs="?", help="a folder, or a name on the Hub (default: that of the config)")
    audit.add_argument("--compare", nargs="*", default=[], metavar="TOKENIZER", help="folders or names on the Hub")
    _reads_config(audit)
    _takes_json(audit)

    prepare = _add(
        commands,
        "prepare",
        prepare_shards,
        "write the sources of a config as token shards",
        "hf-tinylm prepare --config demo",
    )
    _takes_config(prepare)
    _takes_json(prepare)

    inspect = _add(
        commands,
        "inspect",
        inspect_shards,
        "what is in a folder of shards, with decoded windows",
        "hf-tinylm inspect runs/demo/shards --tokenizer runs/demo/tokenizer",
    )
    inspect.add_argument("shards")
    inspect.add_argument("--tokenizer", help="decode windows with this tokenizer")
    inspect.add_argument("--sequence_length", type=int, default=64, help="tokens of a decoded window (default 64)")
    inspect.add_argument("--windows", type=int, default=3, help="windows to decode (default 3)")
    _takes_json(inspect)

    evaluate = _add(
        commands,
        "eval",
        evaluate_model,
        "loss and bits per byte on the validation text of a config's pack, beside counting baselines",
        "hf-tinylm eval runs/demo/pretrain/final --config demo",
    )
    evaluate.add_argument("model", help="a final folder, a checkpoint of a run, or a llama/qwen3 folder")
    _reads_config(evaluate)
    _takes_json(evaluate)

    sample = _add(
        commands,
        "sample",
        sample_text,
        "continue a prompt",
        'hf-tinylm sample runs/demo/pretrain/final --prompt "Emma was" --temperature 0',
    )
    sample.add_argument("model", help="a final folder, a checkpoint of a run, or a llama/qwen3 folder")
    sample.add_argument("--prompt", default="", help="text to continue (default: begin a document)")
    sample.add_argument("--max_new_tokens", type=int, default=128)
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    sample.add_argument("--top_p", type=float, default=0.9)
    sample.add_argument("--seed", type=int, default=42)
    sample.add_argument("--tokenizer", help="needed when neither the model nor its run names one")

    export = _add(
        commands,
        "export",
        export_files,
        "write a model as a stock Hugging Face folder and GGUF files",
        "hf-tinylm export runs/demo/pretrain/checkpoint-00000100 --output_dir exported --gguf f16 --verify",
    )
    export.add_argument("model", help="a final folder, a checkpoint of a run, or a llama/qwen3 folder")
    export.add_argument("--output_dir", required=True)
    export.add_argument("--gguf", nargs="*", default=[], choices=("f32", "f16"), metavar="TYPE", help="f32, f16")
    export.add_argument("--verify", action="store_true", help="compare each GGUF file in llama.cpp with the model")
    export.add_argument("--tokenizer", help="needed when neither the model nor its run names one")
    _takes_json(export)

    verify = _add(
        commands,
        "verify-gguf",
        verify_file,
        "compare a GGUF file in llama.cpp with its model folder",
        "hf-tinylm verify-gguf model-F16.gguf --against runs/demo/pretrain/final",
    )
    verify.add_argument("gguf")
    verify.add_argument(
        "--against", required=True, metavar="MODEL", help="the stock folder that the file was made from"
    )
    _takes_json(verify)

    where = _add(
        commands,
        "where",
        print_where,
        "print the folder of the bundled recipes, configs, tokenizer or eval files",
        'accelerate launch "$(hf-tinylm where recipes)/pretrain.py" --config demo',
    )
    where.add_argument("what", choices=("recipes", "tokenizer", "eval"))
    return parser


# ---- commands ---------------------------------------------------------------------------------------------------


def run_the_demo(options: argparse.Namespace) -> int:
    """Run the demo."""
    from .demo import run_demo

    return run_demo(options.overrides)


def tokenizer_train(options: argparse.Namespace) -> None:
    """Train and save the tokenizer of a config."""
    config = _config(options)
    from .data.tokenizer_corpus import train_from_config

    report = train_from_config(config)
    print(f"tokenizer of {report['vocab_size']:,} tokens from {report['bytes']:,} bytes: {report['tokenizer_path']}")


def tokenizer_audit(options: argparse.Namespace) -> int:
    """Print what a tokenizer does with the sources of a config; 1 when a round trip fails."""
    config = _config(options)
    from .data.tokenizer_corpus import audit_from_config

    config.tokenizer.tokenizer_path = options.tokenizer or config.tokenizer.tokenizer_path
    report = audit_from_config(config, options.compare)
    _print(options, report, lambda: _audit_lines(report))
    return 0 if report["ok"] else 1


def prepare_shards(options: argparse.Namespace) -> None:
    """Write shards."""
    config = _config(options)
    from .data.inspect import manifest_lines
    from .data.prepare import prepare

    manifest = prepare(config, progress=not options.json)
    _print(options, manifest, lambda: manifest_lines(str(config.data.shards), manifest))


def inspect_shards(options: argparse.Namespace) -> None:
    """Print a manifest and decoded windows."""
    from .data.inspect import inspection, inspection_lines

    found = inspection(options.shards, options.tokenizer, options.sequence_length, options.windows)
    _print(options, found, lambda: inspection_lines(found))


def evaluate_model(options: argparse.Namespace) -> None:
    """Print a model's validation loss beside baselines."""
    config = _config(options)
    from .data.pack import open_pack
    from .evaluation.perplexity import evaluate_pack
    from .modeling.factory import load_model

    model, pack = load_model(Path(options.model)), open_pack(config)
    found = evaluate_pack(model, pack, config.evaluation.eval_tokens, progress=not options.json)
    report = {"model": options.model, "suite": "validation", **found}
    _print(options, report, lambda: _evaluation_lines(report))


def sample_text(options: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    from .evaluation.sampling import sample
    from .export.hf import find_tokenizer
    from .modeling.factory import load_model
    from .tokenization.load import load_tokenizer

    source = Path(options.model)
    model = load_model(source)
    tokenizer = load_tokenizer(options.tokenizer or find_tokenizer(source))
    text = sample(
        model, tokenizer, options.prompt, options.max_new_tokens, options.temperature, options.top_p, options.seed
    )
    print(options.prompt + text)


def export_files(options: argparse.Namespace) -> None:
    """Write a stock folder and GGUF files."""
    from .export.hf import export_model

    done = export_model(Path(options.model), Path(options.output_dir), options.gguf, options.verify, options.tokenizer)
    _print(options, done.to_json(), lambda: [f"{done.folder}: stock Hugging Face folder", *done.lines()])


def verify_file(options: argparse.Namespace) -> int:
    """Print what a GGUF file does differently from its model; 1 when anything differs."""
    from .export.parity import verify_gguf

    report = verify_gguf(Path(options.gguf), Path(options.against))
    _print(options, report.to_json(), lambda: [f"{key}: {value}" for key, value in report.to_json().items()])
    if not report.ok and not options.json:
        raise VerificationError(f"{options.gguf} does not match {options.against}: {'; '.join(report.failures)}.")
    return 0 if report.ok else 1


def print_where(options: argparse.Namespace) -> None:
    """Print a bundled folder."""
    print(bundled(options.what))


# ---- shared by commands -----------------------------------------------------------------------------------------


def _add(commands: Any, name: str, run: Callable[..., Any], help_line: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        allow_abbrev=False,
        help=help_line,
        description=help_line[0].upper() + help_line[1:] + ".",
        epilog=f"example: {example}",
    )
    parser.set_defaults(run=run)
    return parser


def _takes_config(parser: argparse.ArgumentParser) -> None:
    _reads_config(parser)
    parser.set_defaults(takes_overrides=True)
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').strip()} [--key value ...]"


def _reads_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="a YAML file, or the name of a bundled one such as demo")


def _takes_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _config(options: argparse.Namespace) -> RunConfig:
    config = load_config(options.config, options.overrides)
    if not config.data.sources:
        raise ConfigError(f"{options.config} has no data.sources. Name at least one source of text.")
    return config


def _evaluation_lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['model']}: {report['items']:,} validation windows, {report['tokens']:,} tokens"]
    for name, found in report["results"].items():
        error = "" if found["stderr"] is None else f" +- {found['stderr']:.4f}"
        lines.append(f"  {name:<32}{found['value']:9.4f}{error:<10}  {found['rule']}")
    return lines


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


def _print(options: argparse.Namespace, value: Any, lines: Callable[[], Sequence[str]]) -> None:
    print(json.dumps(value, ensure_ascii=False) if options.json else "\n".join(lines()))


if __name__ == "__main__":
    sys.exit(main())
