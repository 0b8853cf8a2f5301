"""`hf-tinylm export` and `verify-gguf`: files for other programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError, VerificationError
from ..gguf_plan import GGUF_TYPES
from .options import add_command, print_result, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    export = add_command(
        commands,
        "export",
        export_files,
        "write a model as a stock Hugging Face folder with GGUF files and a Modelfile in it",
        "hf-tinylm export runs/demo/pretrain/checkpoint-00000100 --output_dir exported --gguf f16 q8_0 --verify",
    )
    export.add_argument("model", help="final folder, checkpoint, or folder or Hub name of a llama/qwen3/gpt2 model")
    export.add_argument("--output_dir", help="a new or empty folder")
    export.add_argument(
        "--gguf",
        nargs="*",
        default=[],
        choices=GGUF_TYPES,
        metavar="TYPE",
        help=f"{', '.join(GGUF_TYPES)}; those with _k need the extra quantize",
    )
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the safetensors (default: float32)")
    export.add_argument(
        "--max_shard_size", metavar="SIZE", help="cut the safetensors into files of at most so much: 5GB"
    )
    export.add_argument("--plan", action="store_true", help="print sizes, types and fallbacks; write nothing")
    export.add_argument("--verify", action="store_true", help="compare each GGUF file in llama.cpp with the model")
    export.add_argument("--tokenizer", help="needed when neither the model nor its run names one")
    _takes_quality_limits(export)
    takes_json(export)

    verify = add_command(
        commands,
        "verify-gguf",
        verify_file,
        "compare a GGUF file in llama.cpp with its model folder",
        "hf-tinylm verify-gguf model-Q8_0.gguf --against runs/demo/pretrain/final --text held_out.txt",
    )
    verify.add_argument("gguf")
    verify.add_argument(
        "--against", required=True, metavar="MODEL", help="the stock folder that the file was made from"
    )
    _takes_quality_limits(verify)
    takes_json(verify)


def export_files(options: argparse.Namespace) -> None:
    """Write a stock folder and GGUF files, or print what they will be."""
    from ..export.hf import export_model, plan_model

    if options.plan:
        if not options.gguf:
            raise ConfigError("--plan needs the types of the GGUF files. Give them: --gguf f16 q8_0")
        output_dir = None if options.output_dir is None else Path(options.output_dir)
        plans = plan_model(options.model, options.gguf, options.tokenizer, output_dir)
        values = {"plans": [plan.to_json() for plan in plans]}
        print_result(options, values, lambda: [line for plan in plans for line in plan.lines()])
        return
    if not options.output_dir:
        raise ConfigError("export needs a folder to write to. Give it: --output_dir DIR (or --plan to write nothing)")
    done = export_model(
        options.model,
        Path(options.output_dir),
        options.gguf,
        options.verify,
        options.tokenizer,
        _text_of(options),
        _limits_of(options),
        tell=lambda line: print(line, file=sys.stderr if options.json else sys.stdout, flush=True),
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
    )
    print_result(options, done.to_json(), lambda: [f"{done.folder}: stock Hugging Face folder", *done.lines()])


def verify_file(options: argparse.Namespace) -> int:
    """Print what a GGUF file does differently from its model; 1 when anything differs."""
    from ..export.parity import verify_gguf
    from ..export.quality import quality_table

    path = Path(options.gguf)
    report = verify_gguf(path, Path(options.against), text=_text_of(options), limits=_limits_of(options))
    table = quality_table({report.file_type: (path.stat().st_size, report.quality)} if report.quality else {})
    values = {key: value for key, value in report.to_json().items() if not key.startswith("quality")}
    print_result(
        options,
        report.to_json(),
        lambda: [*(f"{key}: {value}" for key, value in values.items()), *table],
    )
    if not report.ok and not options.json:
        raise VerificationError(f"{options.gguf} does not match {options.against}: {'; '.join(report.failures)}.")
    return 0 if report.ok else 1


def _takes_quality_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text", metavar="FILE", help="held-out text to compare predictions on; default: bundled prose"
    )
    parser.add_argument("--max_kl", type=float, metavar="NATS", help="largest mean KL divergence of a quantized file")
    parser.add_argument("--max_perplexity_rise", type=float, metavar="SHARE", help="0.01 is one percent")
    parser.add_argument("--min_top1", type=float, metavar="SHARE", help="least share of equal most likely tokens")


def _text_of(options: argparse.Namespace) -> Path | None:
    return None if options.text is None else Path(options.text)


def _limits_of(options: argparse.Namespace) -> dict[str, float]:
    """The limits that were given, by the names of `QualityLimits`."""
    given = {
        "kl_divergence": options.max_kl,
        "perplexity_rise": options.max_perplexity_rise,
        "top1_agreement": options.min_top1,
    }
    return {name: value for name, value in given.items() if value is not None}
