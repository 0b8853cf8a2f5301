"""The whole road on the bundled prose: tokenizer, shards, training, GGUF, llama.cpp, and an honest summary."""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .config import load_config
from .contract import RUN_FILE, difference
from .errors import ConfigError, TrainingError
from .files import bundled, read_json, write_json
from .sections import RunConfig

PROMPT = "It is a truth universally acknowledged, that"
GREEDY_TOKENS = 40


def run_demo(overrides: list[str]) -> int:
    """Run every stage that `runs/demo` does not hold yet, print the summary, and check it.

    Returns:
        0; or 1 when the model is no better than a bigram count or llama.cpp continues differently from transformers.

    Raises:
        TrainingError: the training command failed; its own error is above.
    """
    began = time.monotonic()
    config = load_config("demo", overrides)
    assert config.training.output_dir is not None, "the bundled configuration names its folders"
    run = Path(config.training.output_dir)
    _refuse_other_settings(config, run)
    _write_pack(config)
    if not (run / "DONE.json").is_file():
        _train(config, overrides)
    summary = summarise(config, run)
    summary["minutes"] = (time.monotonic() - began) / 60
    write_json(run / "summary.json", summary)
    print("\n".join(summary_lines(summary)))
    better = summary["loss"] < summary["kneser_ney_bigram_loss"]
    return 0 if better and summary["continuations_equal"] in (True, None) else 1


def summarise(config: RunConfig, run: Path) -> dict[str, Any]:
    """What the demo says of a finished run: data, losses beside counting baselines, text, and files."""
    from .data.pack import open_pack
    from .evaluation.likelihood import CausalLMEngine
    from .evaluation.perplexity import evaluate_pack
    from .evaluation.sampling import sample
    from .modeling.factory import load_model
    from .training.metrics import read_rows

    pack = open_pack(config, verify=False)
    rows = read_rows(run / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    model = load_model(run / "final")
    scored = evaluate_pack(CausalLMEngine(model), pack, config.evaluation.eval_tokens)
    manifest = pack.shards.manifest
    text_bytes = sum(source["bytes"] for source in manifest["sources"].values())
    return {
        "bytes_per_token": text_bytes / (manifest["ids"] - manifest["documents"]),
        "train_ids": manifest["splits"]["train"]["ids"],
        "parameters": model.config.shape.parameters,
        "supervised_tokens": max(row.get("supervised_tokens", 0) for row in rows),
        "first_20_losses": _spread(losses[:20]),
        "last_20_losses": _spread(losses[-20:]),
        "validation_tokens": scored["tokens"],
        **{name: found["value"] for name, found in scored["results"].items()},
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows if "loss" in row),
        "prompt": PROMPT,
        "sample": sample(model, pack.tokenizer, PROMPT, 60, temperature=0.8, top_p=0.9, seed=1),
        **_continuations(run, model, pack.tokenizer),
        "files": [str(path) for path in (run / "final", *sorted(run.glob("*.gguf")), run / "metrics.jsonl")],
    }


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    first, last = summary["first_20_losses"], summary["last_20_losses"]

    def loss_line(name: str, loss: float, bits: float) -> str:
        return f"  {name:<28}{loss:7.4f} nats per token {bits:8.4f} bits per byte"

    lines = [
        "",
        f"tokenizer     {summary['bytes_per_token']:.3f} bytes per token",
        f"data          {summary['train_ids']:,} training ids; {summary['supervised_tokens']:,} tokens trained on",
        f"model         {summary['parameters']:,} parameters, {summary['tokens_per_second']:,.0f} tokens/s (median)",
        f"training loss first 20 updates: mean {first['mean']:.4f} (min {first['min']:.4f}, max {first['max']:.4f})",
        f"              last 20 updates:  mean {last['mean']:.4f} (min {last['min']:.4f}, max {last['max']:.4f})",
        f"validation    {summary['validation_tokens']:,} tokens of text that was never trained on",
        loss_line("this model", summary["loss"], summary["bits_per_byte"]),
        loss_line(
            "Kneser-Ney bigram counts", summary["kneser_ney_bigram_loss"], summary["kneser_ney_bigram_bits_per_byte"]
        ),
        loss_line("unigram counts", summary["unigram_loss"], summary["unigram_bits_per_byte"]),
        f"sample        {summary['prompt']}{summary['sample']!r}",
        f"greedy        transformers: {summary['greedy_transformers']!r}",
    ]
    if summary["continuations_equal"] is None:
        lines.append("              llama.cpp:    not run. Install it: pip install 'hf-tinylm[gguf-verify]'")
    else:
        lines.append(f"              llama.cpp:    {summary['greedy_llamacpp']!r}")
        lines.append(f"              {'equal' if summary['continuations_equal'] else 'DIFFERENT'}")
    lines += [f"files         {path}" for path in summary["files"]]
    return [*lines, f"time          {summary['minutes']:.1f} minutes in this command"]


def _refuse_other_settings(config: RunConfig, run: Path) -> None:
    """Never show an earlier demo's numbers as those of other settings.

    Raises:
        ConfigError: the folder holds a run with other settings; they are named.
    """
    if not (run / RUN_FILE).is_file():
        return
    recorded, asked = read_json(run / RUN_FILE)["config"], config.to_dict()
    for settings in (recorded, asked):
        settings["training"].pop("resume_from_checkpoint")  # how the demo continues, and where llama.cpp is missing
        settings["export"].pop("verify")
    changed = difference(recorded, asked)
    if changed:
        raise ConfigError(f"{run} holds a demo with other settings ({'; '.join(changed)}). Remove {run.parent} first.")


def _write_pack(config: RunConfig) -> None:
    from .data.prepare import prepare
    from .data.tokenizer_corpus import train_from_config

    assert config.tokenizer.tokenizer_path is not None
    assert config.data.shards is not None
    if not Path(config.tokenizer.tokenizer_path).exists():
        train_from_config(config)
    if not Path(config.data.shards).exists():
        prepare(config)


def _train(config: RunConfig, overrides: list[str]) -> None:
    """Launch the recipe as a user would; what an earlier call left unfinished is resumed."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--quiet"]
    recipe = [
        str(bundled("recipes", "pretrain.py")),
        "--config",
        "demo",
        *overrides,
        "--resume_from_checkpoint",
        "auto",
    ]
    if config.export.gguf and config.export.verify and importlib.util.find_spec("xllamacpp") is None:
        recipe += ["--verify", "false"]
    if subprocess.run(launcher + recipe, check=False).returncode:
        raise TrainingError("The training command failed; its error is above. Run the demo again to resume it.")


def _continuations(run: Path, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Greedy text after the same prompt from transformers and, where it is installed, from llama.cpp."""
    from .evaluation.sampling import prompt_ids, sample_ids
    from .export.llamacpp import LlamaCppServer

    ids = prompt_ids(tokenizer, PROMPT)
    ours = sample_ids(model, tokenizer, PROMPT, GREEDY_TOKENS, temperature=0)
    found = {"greedy_transformers": tokenizer.decode(ours), "greedy_llamacpp": None, "continuations_equal": None}
    files = sorted(run.glob("*.gguf"))
    if files and importlib.util.find_spec("xllamacpp") is not None:
        with LlamaCppServer(files[0]) as server:
            theirs = server.generate(ids, GREEDY_TOKENS)
        found |= {"greedy_llamacpp": tokenizer.decode(theirs.ids), "continuations_equal": theirs.ids == ours}
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
