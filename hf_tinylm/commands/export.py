"""`hf-tinylm export` and `verify-gguf`: files for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import VerificationError
from .options import add_command, print_result, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    export = add_command(
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
    takes_json(export)

    verify = add_command(
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
    takes_json(verify)


def export_files(options: argparse.Namespace) -> None:
    """Write a stock folder and GGUF files."""
    from ..export.hf import export_model

    done = export_model(Path(options.model), Path(options.output_dir), options.gguf, options.verify, options.tokenizer)
    print_result(options, done.to_json(), lambda: [f"{done.folder}: stock Hugging Face folder", *done.lines()])


def verify_file(options: argparse.Namespace) -> int:
    """Print what a GGUF file does differently from its model; 1 when anything differs."""
    from ..export.parity import verify_gguf

    report = verify_gguf(Path(options.gguf), Path(options.against))
    print_result(options, report.to_json(), lambda: [f"{key}: {value}" for key, value in report.to_json().items()])
    if not report.ok and not options.json:
        raise VerificationError(f"{options.gguf} does not match {options.against}: {'; '.join(report.failures)}.")
    return 0 if report.ok else 1
