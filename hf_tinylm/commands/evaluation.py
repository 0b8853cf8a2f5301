"""`hf-tinylm eval` and `sample`: what a model scores and says."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .options import add_command, config_of, print_result, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    evaluate = add_command(
        commands,
        "eval",
        evaluate_model,
        "score a model on a suite, on raw text, or on the validation text of a config's pack; compare models or runs",
        "hf-tinylm eval runs/demo/pretrain/final --suite hellaswag",
    )
    evaluate.add_argument("model", nargs="?", help="a final folder, a checkpoint, a name on the Hub, or a .gguf file")
    evaluate.add_argument("--suite", help="a bundled suite, a YAML file, or lm-eval:TASK")
    evaluate.add_argument("--data", metavar="FILE", help="JSONL rows that take the place of the suite's dataset")
    evaluate.add_argument("--text", nargs="+", metavar="FILE", help="raw text or JSONL (fields text and source)")
    evaluate.add_argument("--splitter", help="cut text files into documents: lines or paragraphs_N (default: do not)")
    evaluate.add_argument("--config", help="a YAML file, or the name of a bundled one: its pack is scored or counted")
    evaluate.add_argument("--window", type=int, help="tokens read at once, with --text (default: the model's context)")
    evaluate.add_argument("--stride", type=int, help="tokens from one window to the next (default: the window)")
    evaluate.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two saved SUITE.json, or two models")
    evaluate.add_argument("--metric", help="compare this one only; with --curves: loss (default) or bits_per_byte")
    evaluate.add_argument("--curves", nargs="+", metavar="RUN", help="folders of runs, the first is the baseline")
    evaluate.add_argument("--published", metavar="FILE.csv", help="a curve beside --curves: tokens,validation")
    evaluate.add_argument("--over", choices=("tokens", "flops", "hours"), help="one axis of --plot (default: all)")
    evaluate.add_argument("--plot", metavar="FILE.png", help="draw --curves on the same axes")
    evaluate.add_argument("--seed", type=int, default=0, help="of the bootstrap (default 0)")
    evaluate.add_argument("--limit", type=int, help="only the first N items of the suite")
    evaluate.add_argument("--batch_size", type=int, default=8, help="texts computed together (default 8)")
    evaluate.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    evaluate.add_argument("--device", help="such as cuda:0 or cpu (default: an accelerator where there is one)")
    evaluate.add_argument("--tokenizer", help="needed when neither the model nor its run names one")
    evaluate.add_argument("--output_dir", help="where SUITE.json is written (default: eval in the run's folder)")
    takes_json(evaluate)

    sample = add_command(
        commands,
        "sample",
        sample_text,
        "continue a prompt, or a file of prompts with several models side by side",
        'hf-tinylm sample runs/demo/pretrain/final --prompt "Emma was" --temperature 0',
    )
    sample.add_argument("model", nargs="+", help="a final folder, a checkpoint of a run, or a llama/qwen3/gpt2 folder")
    sample.add_argument("--prompt", help="text to continue (default: begin a document)")
    sample.add_argument("--prompts", nargs="?", const="", metavar="FILE", help="a prompt a line (default: bundled)")
    sample.add_argument("--max_new_tokens", type=int, default=128)
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    sample.add_argument("--top_p", type=float, default=0.9, help="from the likeliest of this probability (default 0.9)")
    sample.add_argument("--top_k", type=int, default=0, help="from so many likeliest tokens (default 0: all)")
    sample.add_argument(
        "--min_p", type=float, default=0.0, help="from tokens this likely beside the likeliest (0: all)"
    )
    sample.add_argument("--repetition_penalty", type=float, default=1.0, help="weakens tokens seen before (default 1)")
    sample.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="end before the first of these texts")
    sample.add_argument("--seed", type=int, default=42)
    sample.add_argument("--tokenizer", help="needed when neither the model nor its run names one")
    takes_json(sample)


def evaluate_model(options: argparse.Namespace) -> None:
    """Print what a model scores, write it down, and put it into the model's card."""
    _check_options(options)
    if options.compare or options.curves:
        (_compare if options.compare else _curves)(options)
        return
    report, records = _scored(options, options.model)
    if int(os.environ.get("RANK", "0")):
        return  # one process of several speaks
    print_result(options, report, lambda: _lines(report))
    from ..evaluation.engines import resolve_model
    from ..evaluation.report import results_folder, save_report, update_card

    model = resolve_model(options.model)
    if options.output_dir is None and not Path(options.model).expanduser().exists():
        return  # a model of the Hub has no folder of ours
    folder = Path(options.output_dir) if options.output_dir else results_folder(model)
    written = [str(save_report(report, records, folder))]
    if Path(options.model).expanduser().exists() and update_card(model, folder):
        written.append(str(model / "README.md"))
    if not options.json:
        print(f"written: {', '.join(written)}")


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what contradicts itself before anything is loaded."""
    saved = options.compare and all(name.endswith(".json") for name in options.compare)
    asked = [name for name in ("suite", "text") if getattr(options, name)]
    if sum(map(bool, (options.model, options.compare, options.curves))) != 1:
        raise ConfigError(
            "Give one model, or two things to compare: hf-tinylm eval MODEL, --compare A B, or --curves RUN RUN."
        )
    if not options.curves and (options.published or options.over or options.plot):
        raise ConfigError("--published, --over and --plot are for the curves of runs: --curves RUN RUN.")
    if options.curves and (asked or options.config):
        raise ConfigError("--curves reads what runs have recorded. Leave out --suite, --text and --config.")
    if len(asked) > 1 or not (asked or options.config or saved or options.curves):
        raise ConfigError("Say what to score: --suite NAME, --text FILE, or --config NAME for its validation text.")
    if options.batch_size < 1 or (options.limit is not None and options.limit < 1):
        raise ConfigError("--batch_size and --limit must be 1 or more.")
    if options.data and not options.suite:
        raise ConfigError("--data holds the rows of a suite. Name the suite: --suite NAME.")
    if (options.window or options.stride or options.splitter) and not options.text:
        raise ConfigError("--window, --stride and --splitter are for raw text: --text FILE.")


def _scored(options: argparse.Namespace, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report of one model on what the options ask for, and the record of each item."""
    from ..evaluation.engines import resolve_model
    from ..evaluation.report import new_report

    model, progress = resolve_model(name), not options.json
    if options.suite and options.suite.startswith("lm-eval:"):
        from ..evaluation.harness import run_harness

        task = options.suite.removeprefix("lm-eval:")
        found = run_harness(model, task, options.data, options.limit, options.batch_size, options.device)
        return new_report(name, options.suite, found.pop("facts"), found), found["records"]
    if options.suite:
        from ..evaluation.multiple_choice import score_suite
        from ..evaluation.suites import load_items, load_suite

        suite = load_suite(options.suite)
        items = load_items(suite, options.data, options.limit)
        engine = _engine(options, model)
        return _reported(name, suite.name, engine, score_suite(engine, suite, items, progress))
    pack = None
    if options.config:
        from ..data.pack import open_pack

        config = config_of(options)
        options.tokenizer = options.tokenizer or _own_tokenizer(model) or config.tokenizer.tokenizer_path
        pack = open_pack(config)
    if options.text:
        from ..evaluation.perplexity import evaluate_text
        from ..evaluation.rows import text_documents

        documents = text_documents(options.text, options.splitter)
        engine = _engine(options, model)
        found = evaluate_text(engine, documents, options.window, options.stride, pack, progress)
        return _reported(name, f"text:{'+'.join(Path(path).name for path in options.text)}", engine, found)
    from ..evaluation.perplexity import evaluate_pack

    assert pack is not None
    engine = _engine(options, model)
    found = evaluate_pack(engine, pack, config.evaluation.eval_tokens, progress)
    return _reported(name, "validation", engine, found)


def _reported(name: str, suite: str, engine: Any, found: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from ..evaluation.report import new_report

    return new_report(name, suite, engine.facts(), found), found["records"]


def _own_tokenizer(model: Path) -> str | None:
    return str(model) if (model / "tokenizer.json").is_file() else None


def _engine(options: argparse.Namespace, model: Path) -> Any:
    from ..evaluation.engines import open_engine
    from ..tokenization.load import find_tokenizer

    is_file = model.suffix == ".gguf"
    tokenizer = options.tokenizer or ("" if is_file else find_tokenizer(model))
    return open_engine(model, tokenizer, options.batch_size, options.bf16, options.device)


def _compare(options: argparse.Namespace) -> None:
    """Print the difference between two saved reports or two models, and what may be concluded."""
    from ..evaluation.compare import compare
    from ..evaluation.report import load_report

    both = [load_report(Path(n)) if n.endswith(".json") else _scored(options, n) for n in options.compare]
    if int(os.environ.get("RANK", "0")):
        return
    found = compare(both[0], both[1], options.metric, options.seed)
    print_result(options, found, lambda: _comparison_lines(found))


def _curves(options: argparse.Namespace) -> None:
    """Print where runs ended and when they reach the first one's last loss; draw them on the same axes."""
    from ..evaluation.curves import UNITS, check_curves, curve_lines, curve_report, load_published, load_run
    from ..training.curves import AXES, draw_losses

    metric = options.metric or "loss"
    if metric not in UNITS:
        raise ConfigError(f"--metric {metric} has no curve; {' and '.join(UNITS)} have one.")
    folders = [Path(name) for name in options.curves]
    if len(folders) + bool(options.published) < 2 or len(set(folders)) < len(folders):
        raise ConfigError("--curves needs two different runs, or one and --published FILE.csv.")
    runs = [load_run(folder, metric) for folder in folders]
    runs += [load_published(Path(options.published), metric)] if options.published else []
    over = (options.over,) if options.over else AXES[:1] if options.published else AXES  # tokens come first
    report = curve_report(runs, metric, check_curves(runs, metric, over))
    if options.plot:
        draw_losses([run.curve for run in runs], Path(options.plot), over, UNITS[metric])
    drawn = [f"curves: {options.plot}"] if options.plot else []
    print_result(options, {**report, "picture": options.plot}, lambda: [*curve_lines(report), *drawn])


_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")


def sample_text(options: argparse.Namespace) -> None:
    """Print prompts and their continuations: one alone as it is, several grouped by prompt."""
    from ..evaluation.prompts import read_prompts
    from ..evaluation.sampling import check_arguments, sample
    from ..modeling.factory import load_model
    from ..tokenization.load import find_tokenizer, load_tokenizer

    if options.prompt is not None and options.prompts is not None:
        raise ConfigError("--prompt and --prompts were both given. Leave out one of them.")
    settings = {name: getattr(options, name) for name in _SAMPLING}
    check_arguments(**{name: value for name, value in settings.items() if name != "seed"})
    prompts = [options.prompt or ""] if options.prompts is None else read_prompts(options.prompts or None)
    texts = []  # of each model, one a prompt
    for name in options.model:
        source = Path(name)
        model, tokenizer = load_model(source), load_tokenizer(options.tokenizer or find_tokenizer(source))
        texts.append([sample(model, tokenizer, prompt, **settings) for prompt in prompts])
    samples = [
        {"prompt": prompt, "texts": list(of)} for prompt, of in zip(prompts, zip(*texts, strict=True), strict=True)
    ]
    report = {"models": options.model, "settings": settings, "samples": samples}
    print_result(options, report, lambda: _sample_lines(report))


def _sample_lines(report: dict[str, Any]) -> list[str]:
    if len(report["models"]) == 1 and len(report["samples"]) == 1:
        return [row["prompt"] + row["texts"][0] for row in report["samples"]]
    lines = []
    for row in report["samples"]:
        lines.append(f"=== {row['prompt']}")
        for name, text in zip(report["models"], row["texts"], strict=True):
            lines += [f"--- {name}", row["prompt"] + text]
        lines.append("")
    return lines[:-1]


def _lines(report: dict[str, Any]) -> list[str]:
    tokens = f", {report['tokens']:,} tokens" if "tokens" in report else ""
    lines = [f"{report['model']}: {report['suite']}, {report['items']:,} items{tokens}"]
    if report.get("truncated"):
        lines.append(f"  {report['truncated']:,} endings had their context cut to what the model reads")
    lines += _result_lines(report["results"])
    return lines


def _result_lines(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, found in results.items():
        interval = found.get("interval")
        between = "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
        lines.append(f"  {name:<32}{found['value']:10.4f}  {between:<18}  {found['rule']}")
    return lines


def _comparison_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"A {found['a']}", f"B {found['b']}", f"{found['suite']}, {found['items']:,} items"]
    if found["notice"]:
        lines.append(found["notice"])
    for name, result in found["results"].items():
        lines += [f"  {name}: A {result['a']:.4f}, B {result['b']:.4f}", f"    {result['sentence']}"]
    return lines
