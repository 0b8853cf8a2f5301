"""The whole road on bundled text: tokenizer, shards, training, chat, GGUF, llama.cpp, and an honest summary."""

from __future__ import annotations

import importlib.util
import json
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

NAME = "Wren"  # of the assistant in recipes/persona
QUESTION = "Who are you?"
REPLIES, REPLY_TOKENS = 100, 64
PROMPT = "It is a truth universally acknowledged, that"
GREEDY_TOKENS = 40


def run_demo(overrides: list[str]) -> int:
    """Run every stage that `runs/demo` does not hold yet, print the summary, and check it.

    Returns:
        0; or 1 when the model is no better than a bigram count, llama.cpp continues differently from transformers, or
        the chat model has not learned what it was taught (`chat_failures`).

    Raises:
        TrainingError: a training command failed; its own error is above.
    """
    began = time.monotonic()
    config = load_config("demo", overrides)
    assert config.training.output_dir is not None, "the bundled configuration names its folders"
    run = Path(config.training.output_dir)
    chat, chat_settings = run.with_name("chat"), _chat_settings(config, run)
    chat_config = load_config("sft-demo", chat_settings)
    _refuse_other_settings(config, run)
    _refuse_other_settings(chat_config, chat)
    _write_pack(config)
    if not (run / "DONE.json").is_file():
        _train("pretrain.py", config, ["--config", "demo", *overrides])
    if not (chat / "DONE.json").is_file():
        _train("sft.py", chat_config, ["--config", "sft-demo", *chat_settings])
    summary = summarise(config, run)
    summary["chat"] = summarise_chat(chat_config, chat, run / "final")
    summary["minutes"] = (time.monotonic() - began) / 60
    write_json(run / "summary.json", summary)
    print("\n".join(summary_lines(summary)))
    better = summary["loss"] < summary["kneser_ney_bigram_loss"]
    failures = chat_failures(summary["chat"])
    for failure in failures:
        print(f"NOT LEARNED: {failure}")
    return 0 if better and summary["continuations_equal"] in (True, None) and not failures else 1


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


def summarise_chat(config: RunConfig, run: Path, base: Path) -> dict[str, Any]:
    """What the demo says of a chat run beside the `base` model it started from.

    Greedy replies are asked for on the persona's held-out questions and, up to `REPLIES`, on its training questions.
    """
    from transformers import AutoModelForCausalLM

    from .data.conversations import load_conversations
    from .evaluation.chat import TransformersChat
    from .evaluation.promotion import conversation_losses
    from .modeling.factory import load_model
    from .tokenization.load import load_tokenizer

    tokenizer = load_tokenizer(run / "final")
    data, held_out, taught = config.data, _persona("test"), _persona("train")
    test = load_conversations(data.test_conversations, tokenizer, data.sequence_length, truncation=data.truncation)
    losses = {}
    for name, folder in (("base_loss", base), ("loss", run / "final")):
        nats, targets = conversation_losses(load_model(folder), test)
        losses[name] = float(nats.sum() / targets.sum())
    prompts = [messages[: i + 1] for _, messages in (*held_out, *taught) for i in _user_turns(messages)]
    first: dict[bool, list[Any]] = {True: [], False: []}  # held-out questions about the assistant's name, and others
    for kind, messages in held_out:
        first[kind == "identity"].append(messages[: _user_turns(messages)[0] + 1])
    done = read_json(run / "DONE.json")
    found = {
        "updates": done["updates"],
        "supervised_tokens": done["supervised_tokens"],
        "test_tokens": int(test.targets.sum()),
        **losses,
        "asked_for_its_name": len(first[True]),
        "asked_for_something_else": len(first[False]),
        "replies": len(prompts[:REPLIES]),
    }
    engine = TransformersChat(AutoModelForCausalLM.from_pretrained(run / "final"), tokenizer)
    found |= _replies("transformers", engine, first, prompts[:REPLIES])
    files = sorted(run.glob("*.gguf"))
    if files and importlib.util.find_spec("xllamacpp") is not None:
        from .export.llamacpp_chat import LlamaCppChat

        with LlamaCppChat(files[0]) as other:
            found |= _replies("llamacpp", other, first, prompts[:REPLIES])
    return {**found, "files": [str(path) for path in (run / "final", *files)]}


def chat_failures(chat: dict[str, Any]) -> list[str]:
    """What the chat stage of the demo should show and does not, a line each."""
    failures = []
    if chat["loss"] > chat["base_loss"] / 2:
        failures.append(f"the test loss fell from {chat['base_loss']:.4f} to {chat['loss']:.4f}, by less than half")
    for engine in ("transformers", "llamacpp"):
        if f"named_{engine}" not in chat:
            continue
        named, ended = chat[f"named_{engine}"], chat[f"ended_{engine}"]
        if named < 0.8 * chat["asked_for_its_name"]:
            failures.append(f"{named} of {chat['asked_for_its_name']} held-out questions got its name in {engine}")
        if ended < 0.95 * chat["replies"]:
            failures.append(f"{ended} of {chat['replies']} replies ended by themselves in {engine}")
    return failures


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
    lines += _chat_lines(summary["chat"])
    lines += [f"files         {path}" for path in (*summary["files"], *summary["chat"]["files"])]
    return [*lines, f"time          {summary['minutes']:.1f} minutes in this command"]


def _chat_lines(chat: dict[str, Any]) -> list[str]:
    lines = [
        f"chat          {chat['updates']:,} updates, {chat['supervised_tokens']:,} supervised tokens of replies",
        f"  persona test loss           {chat['loss']:7.4f} nats per supervised token over {chat['test_tokens']:,}; "
        f"the base model {chat['base_loss']:.4f}",
    ]
    for engine, shown in (("transformers", "transformers"), ("llamacpp", "llama.cpp")):
        if f"named_{engine}" in chat:
            named, unasked, ended = (chat[f"{what}_{engine}"] for what in ("named", "named_unasked", "ended"))
            lines += [
                f"  in {shown + ':':<25} says its name to {named} of {chat['asked_for_its_name']} held-out questions "
                f"for it, and to {unasked} of {chat['asked_for_something_else']} others",
                f"{'':<30}ends {ended} of {chat['replies']} replies by itself",
            ]
            lines.append(f"  {QUESTION:<28}{chat[f'answer_{engine}']!r}")
    return lines


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


def _chat_settings(config: RunConfig, run: Path) -> list[str]:
    """The overrides of the chat stage: its folders, and windows as long as the base model's."""
    length, shipped = config.data.sequence_length, load_config("sft-demo")
    windows = shipped.training.global_batch_tokens // shipped.data.sequence_length
    settings = {"output_dir": run.with_name("chat"), "init_from": run / "final", "sequence_length": length}
    settings |= {"global_batch_tokens": windows * length}
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def _train(recipe: str, config: RunConfig, settings: list[str]) -> None:
    """Launch a recipe as a user would; what an earlier call left unfinished is resumed."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--quiet"]
    command = [str(bundled("recipes", recipe)), *settings, "--resume_from_checkpoint", "auto"]
    if config.export.gguf and config.export.verify and importlib.util.find_spec("xllamacpp") is None:
        command += ["--verify", "false"]
    if subprocess.run(launcher + command, check=False).returncode:
        raise TrainingError("The training command failed; its error is above. Run the demo again to resume it.")


def _persona(split: str) -> list[tuple[str, list[dict[str, str]]]]:
    """(kind, messages) of each conversation of the bundled persona set."""
    lines = bundled("recipes", "persona", f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["kind"], row["messages"]) for row in map(json.loads, lines)]


def _user_turns(messages: list[dict[str, str]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def _replies(name: str, engine: Any, questions: dict[bool, list[Any]], prompts: list[Any]) -> dict[str, Any]:
    """Greedy replies of an engine: how many name the assistant and how many it ends, and one for people."""
    from .tokenization.chat import Drawing

    def reply(messages: list[dict[str, str]]) -> tuple[str, bool]:
        text, ended = engine.reply(engine.prompt_ids(messages), Drawing.greedy(REPLY_TOKENS))
        return str(text), bool(ended)

    return {
        f"answer_{name}": reply([{"role": "user", "content": QUESTION}])[0],
        f"named_{name}": sum(NAME in reply(question)[0] for question in questions[True]),
        f"named_unasked_{name}": sum(NAME in reply(question)[0] for question in questions[False]),
        f"ended_{name}": sum(reply(prompt)[1] for prompt in prompts),
    }


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
