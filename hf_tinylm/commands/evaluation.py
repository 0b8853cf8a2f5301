"""`hf-tinylm eval` and `sample`: what a model scores and says."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .options import add_command, config_of, print_result, reads_config, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    evaluate = add_command(
        commands,
        "eval",
        evaluate_model,
        "loss and bits per byte on the validation text of a config's pack, beside counting baselines",
        "hf-tinylm eval runs/demo/pretrain/final --config demo",
    )
    evaluate.add_argument("model", help="a final folder, a checkpoint of a run, or a llama/qwen3 folder")
    reads_config(evaluate)
    takes_json(evaluate)

    sample = add_command(
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


def evaluate_model(options: argparse.Namespace) -> None:
    """Print a model's validation loss beside baselines."""
    config = config_of(options)
    from ..data.pack import open_pack
    from ..evaluation.perplexity import evaluate_pack
    from ..modeling.factory import load_model

    model, pack = load_model(Path(options.model)), open_pack(config)
    found = evaluate_pack(model, pack, config.evaluation.eval_tokens, progress=not options.json)
    report = {"model": options.model, "suite": "validation", **found}
    print_result(options, report, lambda: _evaluation_lines(report))


def sample_text(options: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    from ..evaluation.sampling import sample
    from ..export.hf import find_tokenizer
    from ..modeling.factory import load_model
    from ..tokenization.load import load_tokenizer

    source = Path(options.model)
    model = load_model(source)
    tokenizer = load_tokenizer(options.tokenizer or find_tokenizer(source))
    text = sample(
        model, tokenizer, options.prompt, options.max_new_tokens, options.temperature, options.top_p, options.seed
    )
    print(options.prompt + text)


def _evaluation_lines(report: dict[str, Any]) -> list[str]:
    lines = [f"{report['model']}: {report['items']:,} validation windows, {report['tokens']:,} tokens"]
    for name, found in report["results"].items():
        error = "" if found["stderr"] is None else f" +- {found['stderr']:.4f}"
        lines.append(f"  {name:<32}{found['value']:9.4f}{error:<10}  {found['rule']}")
    return lines
